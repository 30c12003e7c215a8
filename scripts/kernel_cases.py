"""Kernel cases on the shapes of real models: what must move, how it is launched, and how to run it.

kernel_cost prints the numbers, bench_kernels runs the cases on a Mac.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import (
    DeltaRows,
    HeadProjection,
    Rows,
    Sight,
    Surroundings,
    advance,
    attention,
    block_attention,
    context_projection,
    matmul,
    rows_matmul,
)
from dflash_mlx.layers.rope import Rope

DTYPE = mx.bfloat16


@dataclass(frozen=True)
class Launch:
    threadgroups: int
    threads: int
    threadgroup_bytes: int


@dataclass(frozen=True)
class Case:
    """One operation on one shape; `run` builds its result lazily, `make` the arrays it needs."""

    operation: str
    shape: str
    bytes: int  # that must be read and written at least
    flops: int
    launches: tuple[Launch, ...]
    make: Callable[[], Callable[[], list[mx.array]]] = field(repr=False)


def _noise(*shape: int, dtype: mx.Dtype | None = None) -> mx.array:
    return mx.random.normal(shape).astype(dtype or DTYPE)


def _linear(outputs: int, columns: int, bits: int) -> nn.Module:
    plain = nn.Linear(columns, outputs, bias=False)
    plain.weight = _noise(outputs, columns) * columns**-0.5
    return nn.QuantizedLinear.from_linear(plain, 64, bits) if bits else plain


def weight_bytes(outputs: int, columns: int, bits: int) -> int:
    """Of a linear layer; 16-bit scale and bias for each group of 64."""
    return outputs * columns * (bits or 16) // 8 + (outputs * columns // 16 if bits else 0)


def matmul_case(name: str, rows: int, outputs: int, columns: int, bits: int) -> Case:
    """x W^T, bfloat16 or affine groups of 64."""

    def make() -> Callable[[], list[mx.array]]:
        linear, x = _linear(outputs, columns, bits), _noise(1, rows, columns)
        mx.eval(linear.parameters(), x)
        return lambda: [rows_matmul(x, linear)]

    wide, high = 8 * matmul.TILES, -(-rows // 8) * 8
    scratch = matmul.SIMDGROUPS * high * wide * 4
    return Case(
        matmul.OPERATION,
        f"{name}, {rows} rows, {columns} -> {outputs}, {bits or 16} bits",
        weight_bytes(outputs, columns, bits) + 2 * rows * (columns + outputs),
        2 * rows * columns * outputs,
        (Launch(-(-outputs // wide), matmul.SIMDGROUPS * 32, scratch),),
        make,
    )


def projection_case(
    name: str, rows: int, hidden: int, layers: int, kv_heads: int, dim: int, bits: int
) -> Case:
    """K and V of all draft layers from the fused features."""
    heads = layers * kv_heads

    def make() -> Callable[[], list[mx.array]]:
        joined, fused = _linear(2 * heads * dim, hidden, bits), _noise(1, rows, hidden)
        norm = nn.RMSNorm(hidden)
        norm.weight = norm.weight.astype(DTYPE)
        projection = HeadProjection(joined, mx.ones((layers, dim), DTYPE), 1e-6, kv_heads)
        rope = Rope(1e6 ** (mx.arange(0, dim, 2) / dim), theta=1e6)
        mx.eval(joined.parameters(), fused)
        return lambda: list(context_projection(fused, norm, projection, rope, 1000))

    threads = dim // (16 if dim >= 128 else 8) * 32
    return Case(
        "context_projection",
        f"{name}, {rows} rows, {layers} layers of {kv_heads}x{dim}, {bits or 16} bits",
        weight_bytes(2 * heads * dim, hidden, bits) + rows * (4 * hidden + 4 * heads * dim),
        4 * rows * hidden * heads * dim,
        (Launch(2 * heads, threads, (-(-rows // 8) * 8) * (dim + 1) * 4),),
        make,
    )


def attention_case(
    name: str, heads: int, kv_heads: int, dim: int, rows: int, keys: int, sight: Sight
) -> Case:
    """A block behind `keys` rows of a cache with room for more."""

    def make() -> Callable[[], list[mx.array]]:
        queries = _noise(1, heads, rows, dim)
        held = [_noise(1, kv_heads, keys + rows + 100, dim) for _ in range(2)]
        mx.eval(queries, held)
        around = Surroundings(joined=Rows(*(part[:, :, : keys + rows] for part in held)))
        scale = dim**-0.5
        return lambda: [block_attention(queries, around, scale=scale, sight=sight, position=keys)]

    seen = keys + rows if sight.window is None else min(keys, sight.window - 1) + rows
    split = attention.split_keys(keys + rows)
    splits = -(-(keys + rows) // split)
    group_rows = heads // kv_heads * rows
    simds = min(8, max(4, -(-group_rows // 8)))
    tile = 32 if 32 * dim * DTYPE.size <= attention.TILE_BYTES else 16
    blocks = -(-group_rows // (8 * simds))
    first = Launch(splits * kv_heads * blocks, simds * 32, tile * dim * DTYPE.size)
    combine = (Launch(heads * rows, 32, 0),) if splits > 1 else ()
    partial = 2 * 4 * splits * heads * rows * (dim + 2) if splits > 1 else 0
    return Case(
        attention.OPERATION,
        f"{name}, {rows} rows of {heads}/{kv_heads}x{dim} over {keys}",
        2 * 2 * kv_heads * seen * dim + 2 * 2 * heads * rows * dim + partial,
        4 * heads * rows * seen * dim,
        (first, *combine),
        make,
    )


def recurrence_case(name: str, key_heads: int, heads: int, dim: int, rows: int) -> Case:
    """The gated delta rule over a block, float32."""

    def make() -> Callable[[], list[mx.array]]:
        single = mx.float32
        q, k = (_noise(1, rows, key_heads, dim, dtype=single) * dim**-0.5 for _ in range(2))
        gates = mx.full((1, rows, heads), 0.9)
        given = DeltaRows(q, k, _noise(1, rows, heads, dim, dtype=single), gates, gates)
        start = _noise(1, heads, dim, dim, dtype=single)
        mx.eval(given, start)

        def run() -> list[mx.array]:
            return list(advance(given, start)[:2])

        return run

    return Case(
        "gated_delta_advance",
        f"{name}, {rows} rows of {key_heads}/{heads}x{dim}",
        4 * (2 * heads * dim * dim + rows * (2 * key_heads * dim + 3 * heads * dim)),
        7 * rows * heads * dim * dim,
        (Launch(heads * dim // 4, 128, 0),),
        make,
    )


def cases() -> list[Case]:
    """The shapes that count: drafters and targets of the supported pairs."""
    full, causal = Sight(False), Sight(True)
    found = []
    for rows in (1, 5, 16):
        for bits in (0, 4):
            found.append(matmul_case("fc of Qwen3-8B's drafter", rows, 4096, 20480, bits))
            found.append(projection_case("Qwen3-8B's drafter", rows, 4096, 5, 8, 128, bits))
    found.append(matmul_case("gate_proj of Qwen3-8B", 16, 12288, 4096, 4))
    for keys in (1024, 8192, 32768):
        found.append(attention_case("Qwen3-8B's drafter", 32, 8, 128, 16, keys, full))
        found.append(attention_case("Qwen3.5-9B", 16, 4, 256, 16, keys, causal))
    found.append(attention_case("gpt-oss-20b, window", 64, 8, 64, 8, 127, Sight(True, 128)))
    found.append(attention_case("SmolLM2-135M", 9, 3, 64, 8, 1024, causal))
    found.append(recurrence_case("Qwen3.5-9B", 16, 32, 128, 16))
    return found
