"""From rows to attention heads with norm and rope, in one launch.

For a drafter's context: keys and values of all its layers. For its block: one layer's queries too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.fusion import Fused
from dflash_mlx.kernels.matmul import (
    MAX_ROWS,
    PLAIN,
    SQUARED,
    WEIGHTED,
    Weights,
    row_tiles,
    weights_of,
)
from dflash_mlx.kernels.source import Launch, constant, kernel

OPERATION = "head_projection"
MAX_HEAD = 256  # sixteen rows of such a head fill half of the threadgroup memory
_WEIGHTS = tuple(f"{p}_{a}" for p in "qkv" for a in ("weights", "scales", "biases", "bias"))
_NAMES = ("x", *_WEIGHTS, "norm", "squares", "query_norm", "key_norms", "periods")
_SCALARS = ("norm_eps", "head_eps", "log_theta", "magnitude", "position")


class Rotation(Protocol):
    """What the kernel reads of a rotary embedding; the twin calls it."""

    periods: mx.array
    dims: int
    magnitude: float
    theta: float | None

    def __call__(self, x: mx.array, offset: int) -> mx.array: ...


@dataclass(frozen=True)
class HeadProjection:
    """k_proj of several layers as one, their v_proj as one, and the norm of their keys."""

    keys: nn.Module
    values: nn.Module
    head_norms: mx.array  # [layers, D]
    head_eps: float
    kv_heads: int

    @property
    def heads(self) -> int:
        """Key heads of all layers together."""
        return self.head_norms.shape[0] * self.kv_heads


class HeadLayer(Protocol):
    """The attention layer of a block."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm
    heads: int
    kv_heads: int


class _Call(NamedTuple):
    """One launch: the heads it makes, and of which weights and norms. heads counts key heads."""

    parts: tuple[Weights, Weights, Weights]
    query_norm: mx.array
    key_norms: mx.array  # [layers, D]
    head_eps: float
    queries: int
    heads: int
    kv_heads: int

    @property
    def dim(self) -> int:
        return self.key_norms.shape[1]

    def launch(self, rows: int) -> Launch:
        return launch_of(rows, self.queries + 2 * self.heads, self.dim)

    def variant(self, x: mx.array, norm: object, rope: Rotation) -> tuple[Any, ...]:
        sizes = (self.queries, self.heads, self.kv_heads, self.dim, rope.dims, rope.theta is None)
        return (*self.parts[1].variant, *sizes, x.dtype, x.shape[1] > 8, norm)


def context_projection(
    fused: Fused, norm: nn.RMSNorm, heads: HeadProjection, rope: Rotation, position: int
) -> mx.array:
    """fc's output for positions position .. -> keys, then values: [2, layers, Hkv, S, D].

    `norm` is that of the fused features.
    """
    x, keys, values = fused.rows, None, None
    if backend.is_active(OPERATION) and _fits(x, heads.head_norms.shape[1], rope):
        keys, values = weights_of(heads.keys), weights_of(heads.values)

    def twin() -> list[mx.array]:
        return [_context_operations(x, norm, heads, rope, position)]

    if keys is None or values is None or keys.template != values.template:
        return twin()[0]
    layers, dim = heads.head_norms.shape
    norms = heads.head_norms
    call = _Call(
        *((keys, keys, values), norms, norms, heads.head_eps),
        *(0, heads.heads, heads.kv_heads),
    )

    def launched() -> list[mx.array]:
        out = _launch(call, x, norm, fused.squares, rope, position)
        return [out.reshape(2, layers, heads.kv_heads, x.shape[1], dim)]

    variant = call.variant(x, fused.squares is None, rope)
    return backend.run(OPERATION, variant, launched, twin, launches=[call.launch(x.shape[1])])[0]


def block_projection(
    x: mx.array, norm: nn.RMSNorm | None, layer: HeadLayer, rope: Rotation, position: int
) -> tuple[mx.array, mx.array, mx.array]:
    """norm(x) [1, S, H] of a block at `position` -> queries, keys, values, each [1, heads, S, D].

    Without a norm x is what it is.
    """
    found = None
    if backend.is_active(OPERATION) and _fits(x, layer.k_norm.weight.shape[0], rope):
        found = _alike(layer)

    def twin() -> list[mx.array]:
        return _block_operations(x if norm is None else norm(x), layer, rope, position)

    if found is None:
        queries, keys, values = twin()
        return queries, keys, values
    call = _Call(
        *(found, layer.q_norm.weight, layer.k_norm.weight[None], layer.k_norm.eps),
        *(layer.heads, layer.kv_heads, layer.kv_heads),
    )

    def launched() -> list[mx.array]:
        out = _launch(call, x, norm, None, rope, position)[None]
        first, last = layer.heads, layer.heads + layer.kv_heads
        return [out[:, :first], out[:, first:last], out[:, last:]]

    queries, keys, values = backend.run(
        OPERATION,
        call.variant(x, norm is None, rope),
        launched,
        twin,
        launches=[call.launch(x.shape[1])],
    )
    return queries, keys, values


def _fits(x: mx.array, dim: int, rope: Rotation) -> bool:
    """Whether the kernel takes so many rows, and heads of this size."""
    head = dim % (8 * tiles_of(dim)) == 0 and dim <= MAX_HEAD and rope.dims <= dim
    return x.shape[1] <= MAX_ROWS and head


def _alike(layer: HeadLayer) -> tuple[Weights, Weights, Weights] | None:
    """The layer's weights, if the kernel can read them: all of the same types."""
    q, k, v = map(weights_of, (layer.q_proj, layer.k_proj, layer.v_proj))
    if q is None or k is None or v is None or not q.template == k.template == v.template:
        return None
    return (q, k, v) if layer.q_norm.eps == layer.k_norm.eps else None


def tiles_of(dim: int) -> int:
    """Eight-wide tiles of a simdgroup; a head of 256 has sixteen simdgroups then, not 32."""
    return 2 if dim >= 128 else 1


def launch_of(rows: int, heads: int, dim: int) -> Launch:
    """The launch that makes `heads` heads of queries, keys and values together."""
    memory = row_tiles(rows) * 8 * (dim + 1) * 4
    return Launch((heads, 1, 1), (dim // (8 * tiles_of(dim)) * 32, 1, 1), memory)


def _launch(
    call: _Call,
    x: mx.array,
    norm: nn.RMSNorm | None,
    squares: mx.array | None,
    rope: Rotation,
    position: int,
) -> mx.array:
    """[queries + keys + values, S, D]."""
    rows, dtype, launch = x.shape[1], call.key_norms.dtype, call.launch(x.shape[1])
    kind = PLAIN if norm is None else SQUARED if squares is None else WEIGHTED
    norms, eps = (call.query_norm, 0.0) if norm is None else (norm.weight, norm.eps)
    scalars = (eps, call.head_eps, math.log2(rope.theta or 1.0), rope.magnitude)
    (out,) = kernel(OPERATION, (*_NAMES, *_SCALARS), ("out",))(
        inputs=[
            mx.contiguous(x.squeeze(0)),
            *(array for part in call.parts for array in part.arrays),
            *(norms, norms[None] if squares is None else mx.contiguous(squares)),
            *(call.query_norm, call.key_norms, rope.periods, *map(constant, map(float, scalars))),
            mx.array(position),
        ],
        template=[
            *(("X", x.dtype), ("T", dtype), *call.parts[0].template, ("C", norms.dtype)),
            *(("NORM", kind), ("D", call.dim), ("QUERIES", call.queries), ("HEADS", call.heads)),
            *(("KV_HEADS", call.kv_heads), ("HALF", rope.dims // 2)),
            *(("THETA", rope.theta is not None), ("ROW_TILES", row_tiles(rows))),
            ("TILES", tiles_of(call.dim)),
        ],
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=[(launch.groups[0], rows, call.dim)],
        output_dtypes=[dtype],
    )
    return out


def _context_operations(
    fused: mx.array, norm: nn.RMSNorm, heads: HeadProjection, rope: Rotation, position: int
) -> mx.array:
    rows, dim = fused.shape[1], heads.head_norms.shape[1]
    hidden = norm(fused.astype(heads.head_norms.dtype))
    keys, values = (part(hidden).reshape(1, rows, -1, dim) for part in (heads.keys, heads.values))
    weights = mx.repeat(heads.head_norms, heads.kv_heads, axis=0)  # [layers · Hkv, D]
    keys = mx.fast.rms_norm(keys, None, heads.head_eps) * weights
    keys = rope(keys.transpose(0, 2, 1, 3), position)
    both = mx.concatenate([keys, values.transpose(0, 2, 1, 3)])
    return both.reshape(2, -1, heads.kv_heads, rows, dim)


def _block_operations(
    x: mx.array, layer: HeadLayer, rope: Rotation, position: int
) -> list[mx.array]:
    rows = x.shape[1]
    queries = layer.q_norm(layer.q_proj(x).reshape(1, rows, layer.heads, -1))
    keys = layer.k_norm(layer.k_proj(x).reshape(1, rows, layer.kv_heads, -1))
    values = layer.v_proj(x).reshape(1, rows, layer.kv_heads, -1)
    return [
        rope(queries.transpose(0, 2, 1, 3), position),
        rope(keys.transpose(0, 2, 1, 3), position),
        values.transpose(0, 2, 1, 3),
    ]
