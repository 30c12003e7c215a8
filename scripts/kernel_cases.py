"""Kernel cases on the shapes of real models: what must move, how it is launched, and how to run it.

kernel_cost prints the numbers, bench_kernels runs the cases on a Mac.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.features import Features
from dflash_mlx.kernels import (
    Coefficients,
    DeltaRows,
    Fused,
    HeadProjection,
    Rows,
    Sight,
    Surroundings,
    advance,
    attention,
    block_attention,
    block_convolution,
    block_projection,
    context_projection,
    convolution,
    fuse_taps,
    fusion,
    gated_delta,
    gated_matmul,
    matmul,
    projection,
    replay,
    rows_matmul,
)
from dflash_mlx.kernels.source import Launch
from dflash_mlx.layers.rope import Rope

DTYPE = mx.bfloat16
Run = Callable[[], list[mx.array]]
# Rows of a verification, and (what, outputs, columns) of the layers that it multiplies with: all of
# Qwen3-8B and of Qwen3.5-9B but their heads, each size once.
VERIFIED_ROWS = (1, 2, 4, 8, 16)
VERIFIED = (
    ("q_proj, o_proj, in_proj_z", 4096, 4096),
    ("q_proj, in_proj_qkv of Qwen3.5", 8192, 4096),
    ("k_proj, v_proj", 1024, 4096),
    ("in_proj_a, in_proj_b", 32, 4096),
    ("gate_proj, up_proj", 12288, 4096),
    ("down_proj", 4096, 12288),
)
HEADS = (("lm_head of Qwen3-8B", 151936, 4096), ("lm_head of Qwen3.5-9B", 248320, 4096))


@dataclass(frozen=True)
class Case:
    """One operation on one shape; `make` builds the arrays it needs and gives its lazy call."""

    operation: str
    shape: str
    bytes: int  # that must be read and written at least
    flops: int
    launches: tuple[Launch, ...]
    make: Callable[[], Run] = field(repr=False)


def _noise(*shape: int, dtype: mx.Dtype | None = None) -> mx.array:
    return mx.random.normal(shape).astype(dtype or DTYPE)


def _linear(outputs: int, columns: int, bits: int) -> nn.Module:
    """Weights of a standard deviation of columns^-0.5.

    Codes are drawn as such: to quantize a head's real numbers takes 16 times its memory.
    """
    if not bits:
        plain = nn.Linear(columns, outputs, bias=False)
        plain.weight = _noise(outputs, columns) * columns**-0.5
        return plain
    made = nn.QuantizedLinear(columns, outputs, bias=False, group_size=64, bits=bits)
    # A split key is words of which every bit is random.
    words = mx.random.split(mx.random.key(outputs), made.weight.size // 2)
    made.weight = words.reshape(made.weight.shape)
    step = (12 / columns) ** 0.5 / 2**bits
    made.scales = (mx.random.uniform(0.5, 1.5, made.scales.shape) * step).astype(DTYPE)
    made.biases = made.scales * (0.5 - 2 ** (bits - 1))
    return made


def _norm(size: int) -> nn.RMSNorm:
    norm = nn.RMSNorm(size)
    norm.weight = norm.weight.astype(DTYPE)
    return norm


def weight_bytes(outputs: int, columns: int, bits: int) -> int:
    """Of a linear layer; 16-bit scale and bias for each group of 64."""
    return outputs * columns * (bits or 16) // 8 + (outputs * columns // 16 if bits else 0)


def matmul_case(
    name: str, rows: int, outputs: int, columns: int, bits: int, *, residual: bool = False
) -> Case:
    """x W^T, bfloat16 or affine groups of 64; with a `residual` added."""

    def make() -> Run:
        linear, x = _linear(outputs, columns, bits), _noise(1, rows, columns)
        added = _noise(1, rows, outputs) if residual else None
        mx.eval(linear.parameters(), x, added)
        return lambda: [rows_matmul(x, linear, residual=added)]

    return Case(
        matmul.OPERATION,
        f"{name}, {rows} rows, {columns} -> {outputs}, {bits or 16} bits",
        weight_bytes(outputs, columns, bits) + 2 * rows * (columns + (1 + residual) * outputs),
        2 * rows * columns * outputs,
        (matmul.launch_of(rows, outputs),),
        make,
    )


def gated_case(name: str, rows: int, outputs: int, columns: int, bits: int) -> Case:
    """swiglu of two products of normed rows."""

    def make() -> Run:
        gate, up = (_linear(outputs, columns, bits) for _ in range(2))
        norm, x = _norm(columns), _noise(1, rows, columns)
        mx.eval(gate.parameters(), up.parameters(), x)
        return lambda: [gated_matmul(x, norm, gate, up)]

    return Case(
        matmul.OPERATION,
        f"{name}, {rows} rows, {columns} -> 2 x {outputs}, {bits or 16} bits",
        2 * weight_bytes(outputs, columns, bits) + 2 * rows * (columns + outputs),
        4 * rows * columns * outputs,
        (matmul.launch_of(rows, outputs, gated=True),),
        make,
    )


def taps_case(name: str, rows: int, outputs: int, width: int, taps: int, bits: int) -> Case:
    """fc over hidden states that stay apart."""
    columns = taps * width

    def make() -> Run:
        fc = _linear(outputs, columns, bits)
        features = Features([_noise(1, rows, width) for _ in range(taps)])
        mx.eval(fc.parameters(), features.parts)
        return lambda: [fuse_taps(features, fc, DTYPE).rows]

    return Case(
        fusion.OPERATION,
        f"{name}, {rows} rows, {taps} x {width} -> {outputs}, {bits or 16} bits",
        weight_bytes(outputs, columns, bits) + rows * (2 * columns + 4 * outputs),
        2 * rows * columns * outputs,
        (fusion.launch_of(rows, outputs),),
        make,
    )


def context_case(
    name: str, rows: int, hidden: int, layers: int, kv_heads: int, dim: int, bits: int
) -> Case:
    """K and V of all draft layers from the fused features."""
    heads = layers * kv_heads

    def make() -> Run:
        keys, values = (_linear(heads * dim, hidden, bits) for _ in range(2))
        fused = _noise(1, rows, hidden)
        given = HeadProjection(keys, values, mx.ones((layers, dim), DTYPE), 1e-6, kv_heads)
        squares = mx.square(fused[0].astype(mx.float32)).sum(axis=-1)[None]
        mx.eval(keys.parameters(), values.parameters(), fused, squares)
        call = (Fused(fused, squares), _norm(hidden), given, _rope(dim), 1000)
        return lambda: [context_projection(*call)]

    shape = f"{name}, {rows} rows, {hidden} -> K and V of {heads} x {dim}, {bits or 16} bits"
    return _heads_case(shape, rows, hidden, 2 * heads, dim, bits, make)


def block_case(
    name: str, rows: int, hidden: int, heads: int, kv_heads: int, dim: int, bits: int
) -> Case:
    """Queries, keys and values of one draft layer's block."""

    def make() -> Run:
        layer = nn.Module()
        layer.heads, layer.kv_heads = heads, kv_heads
        layer.q_proj = _linear(heads * dim, hidden, bits)
        layer.k_proj, layer.v_proj = (_linear(kv_heads * dim, hidden, bits) for _ in range(2))
        layer.q_norm, layer.k_norm = _norm(dim), _norm(dim)
        x, norm, rope = _noise(1, rows, hidden), _norm(hidden), _rope(dim)
        mx.eval(layer.parameters(), x)
        return lambda: list(block_projection(x, norm, layer, rope, 1000))

    total = heads + 2 * kv_heads
    shape = f"{name}, {rows} rows, {hidden} -> {heads} + 2 x {kv_heads} heads of {dim}"
    return _heads_case(f"{shape}, {bits or 16} bits", rows, hidden, total, dim, bits, make)


def _rope(dim: int) -> Rope:
    return Rope(1e6 ** (mx.arange(0, dim, 2) / dim), theta=1e6)


def _heads_case(
    shape: str, rows: int, hidden: int, heads: int, dim: int, bits: int, make: Callable[[], Run]
) -> Case:
    return Case(
        projection.OPERATION,
        shape,
        weight_bytes(heads * dim, hidden, bits) + 2 * rows * (hidden + heads * dim),
        2 * rows * hidden * heads * dim,
        (projection.launch_of(rows, heads, dim),),
        make,
    )


def convolution_case(name: str, rows: int, hidden: int, taps: int) -> Case:
    """The input side of a sublayer of DFlash 2, with its norm and a residual; groups of 128."""

    groups = max(1, hidden // 128)

    def make() -> Run:
        x, residual = _noise(1, rows, hidden), _noise(1, rows, hidden)
        # As in a layer a view of both sides' coefficients.
        base, dynamic = _noise(taps, hidden), _noise(rows, 2, taps, groups)
        mx.eval(x, residual, base, dynamic)
        own, norm = Coefficients(base, dynamic[:, 1]), _norm(hidden)
        return lambda: [block_convolution(x, own, norm=norm, residual=residual)]

    return Case(
        convolution.OPERATION,
        f"{name}, {rows} rows of {hidden}, {taps} taps",
        # x is read for the sums of every threadgroup's rows, too, but from the cache.
        2 * (rows * hidden * 3 + taps * (hidden + rows * groups)),
        2 * rows * hidden * (2 * taps + 1),
        (convolution.launch_of(rows, taps, hidden),),
        make,
    )


def attention_case(
    name: str, heads: int, kv_heads: int, dim: int, rows: int, keys: int, sight: Sight
) -> Case:
    """A block behind `keys` rows of a cache with room for more."""

    def make() -> Run:
        queries = _noise(1, heads, rows, dim)
        held = [_noise(1, kv_heads, keys + rows + 100, dim) for _ in range(2)]
        mx.eval(queries, held)
        around = Surroundings(joined=Rows(*(part[:, :, : keys + rows] for part in held)))
        scale = dim**-0.5
        return lambda: [block_attention(queries, around, scale=scale, sight=sight, position=keys)]

    seen = keys + rows if sight.window is None else min(keys, sight.window - 1) + rows
    plan = attention.plan_of((1, heads, rows, dim), kv_heads, 0, keys, exact=False)
    partial = 2 * 4 * plan.splits * heads * rows * (dim + 2) if plan.splits > 1 else 0
    return Case(
        attention.OPERATION,
        f"{name}, {rows} rows of {heads}/{kv_heads}x{dim} over {keys}",
        2 * 2 * kv_heads * seen * dim + 2 * 2 * heads * rows * dim + partial,
        4 * heads * rows * seen * dim,
        tuple(plan.launches(attention.tile_bytes(dim, DTYPE))),
        make,
    )


def _recurrence(key_heads: int, heads: int, dim: int, rows: int) -> tuple[DeltaRows, mx.array]:
    """Rows and a state, float32."""
    single = mx.float32
    q, k = (_noise(1, rows, key_heads, dim, dtype=single) * dim**-0.5 for _ in range(2))
    gates = mx.full((1, rows, heads), 0.9)
    given = DeltaRows(q, k, _noise(1, rows, heads, dim, dtype=single), gates, gates)
    start = _noise(1, heads, dim, dim, dtype=single)
    mx.eval(given, start)
    return given, start


def advance_case(name: str, key_heads: int, heads: int, dim: int, rows: int) -> Case:
    """The gated delta rule over a block."""

    def make() -> Run:
        given, start = _recurrence(key_heads, heads, dim, rows)
        return lambda: list(advance(given, start)[:2])

    return Case(
        gated_delta.ADVANCE,
        f"{name}, {rows} rows of {key_heads}/{heads}x{dim}",
        4 * (2 * heads * dim * dim + rows * (2 * key_heads * dim + 3 * heads * dim)),
        7 * rows * heads * dim * dim,
        (gated_delta.launch_of(heads, dim),),
        make,
    )


def replay_case(name: str, key_heads: int, heads: int, dim: int, rows: int) -> Case:
    """The state behind `rows` accepted rows."""

    def make() -> Run:
        given, start = _recurrence(key_heads, heads, dim, rows)
        changes = advance(given, start).changes
        if changes is not None:
            mx.eval(changes)
        return lambda: [replay(given, start, changes, rows)]

    return Case(
        gated_delta.REPLAY,
        f"{name}, {rows} rows of {key_heads}/{heads}x{dim}",
        4 * (2 * heads * dim * dim + rows * (key_heads * dim + heads * dim + heads)),
        3 * rows * heads * dim * dim,
        (gated_delta.launch_of(heads, dim),),
        make,
    )


def verification_cases() -> list[Case]:
    """Products of a target's verification, for the choice between rows_matmul and MLX's."""
    found = [
        matmul_case(name, rows, outputs, columns, bits)
        for name, outputs, columns in VERIFIED
        for bits in (4, 8)
        for rows in VERIFIED_ROWS
    ]
    found += [matmul_case(name, rows, *sizes, 4) for name, *sizes in HEADS for rows in (1, 16)]
    return [*found, matmul_case("gate_proj, up_proj", 16, 12288, 4096, 0)]


def cases() -> list[Case]:
    """The shapes that count: drafters and targets of the supported pairs."""
    full, causal, drafter = Sight(False), Sight(True), "Qwen3-8B's drafter"
    found = []
    for rows in (1, 5, 16):
        for bits in (0, 4):
            found.append(taps_case(drafter, rows, 4096, 4096, 5, bits))
            found.append(context_case(drafter, rows, 4096, 5, 8, 128, bits))
    for bits in (0, 4):
        found.append(block_case(drafter, 16, 4096, 32, 8, 128, bits))
        found.append(gated_case(f"gate and up of {drafter}", 16, 12288, 4096, bits))
        down = f"down_proj of {drafter}"
        found.append(matmul_case(down, 16, 4096, 12288, bits, residual=True))
    found += verification_cases()
    for keys in (1024, 8192, 32768):
        found.append(attention_case(drafter, 32, 8, 128, 16, keys, full))
        found.append(attention_case("Qwen3.5-9B", 16, 4, 256, 16, keys, causal))
    found.append(attention_case("gpt-oss-20b, window", 64, 8, 64, 8, 127, Sight(True, 128)))
    found.append(attention_case("SmolLM2-135M", 9, 3, 64, 8, 1024, causal))
    found.append(convolution_case("Qwen3.8-27B's drafter", 8, 5120, 2))
    found.append(advance_case("Qwen3.5-9B", 16, 32, 128, 16))
    found.append(replay_case("Qwen3.5-9B", 16, 32, 128, 8))
    return found
