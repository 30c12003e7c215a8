"""From the drafter's fused target features to keys and values of all its layers, in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.matmul import MAX_ROWS, Weights, weights_of
from dflash_mlx.kernels.source import constant, kernel

OPERATION = "context_projection"
_NAMES = ("x", "weights", "scales", "biases", "bias", "norm", "head_norms", "periods")
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
    """k_proj and v_proj of several layers as one, and the norm of their keys.

    `joined` has first the key rows of all layers, then the value rows.
    """

    joined: nn.Module
    head_norms: mx.array  # [layers, D]
    head_eps: float
    kv_heads: int

    @property
    def heads(self) -> int:
        """Key heads of all layers together."""
        return self.head_norms.shape[0] * self.kv_heads


def context_projection(
    fused: mx.array, norm: nn.RMSNorm, heads: HeadProjection, rope: Rotation, position: int
) -> tuple[mx.array, mx.array]:
    """fc's output [1, S, H] at positions position .. -> keys, values, each [layers, Hkv, S, D].

    `norm` is that of the fused features.
    """
    rows = fused.shape[1]

    def twin() -> list[mx.array]:
        return _operations(fused, norm, heads, rope, position)

    found = None
    if rows <= MAX_ROWS and backend.is_active(OPERATION):
        found = _readable(heads, rope)
    if found is None:
        keys, values = twin()
    else:
        variant = (*map(str, found.template), str(fused.dtype), rows > 8, heads.heads, rope.dims)
        keys, values = backend.run(
            OPERATION, variant, lambda: _launch(fused, found, norm, heads, rope, position), twin
        )
    return keys, values


def _readable(heads: HeadProjection, rope: Rotation) -> Weights | None:
    """The projection's weights, if the kernel can read them and a head fits a threadgroup."""
    dim = heads.head_norms.shape[1]
    tiles = _tiles(dim)
    fits = dim % (8 * tiles) == 0 and dim <= 256 and rope.dims <= dim
    return weights_of(heads.joined) if fits else None


def _tiles(dim: int) -> int:
    """Eight-wide tiles of a simdgroup; a head of 256 has sixteen simdgroups then, not 32."""
    return 2 if dim >= 128 else 1


def _launch(
    fused: mx.array,
    weights: Weights,
    norm: nn.RMSNorm,
    heads: HeadProjection,
    rope: Rotation,
    position: int,
) -> list[mx.array]:
    rows, (layers, dim) = fused.shape[1], heads.head_norms.shape
    tiles, dtype = _tiles(dim), heads.head_norms.dtype
    threads = dim // (8 * tiles) * 32
    scalars = (norm.eps, heads.head_eps, math.log2(rope.theta or 1.0), rope.magnitude)
    template: list[tuple[str, Any]] = [("X", fused.dtype), ("T", dtype), *weights.template]
    template.append(("C", norm.weight.dtype))
    keys, values = kernel(OPERATION, (*_NAMES, *_SCALARS), ("keys", "values"))(
        inputs=[
            *(mx.contiguous(fused[0]), *weights.arrays, norm.weight, heads.head_norms),
            *(rope.periods, *map(constant, map(float, scalars)), mx.array(position)),
        ],
        template=[
            *template,
            *(("D", dim), ("HEADS", heads.heads), ("KV_HEADS", heads.kv_heads)),
            *(("HALF", rope.dims // 2), ("THETA", rope.theta is not None)),
            *(("ROW_TILES", -(-rows // 8)), ("TILES", tiles)),
        ],
        grid=(2 * heads.heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(layers, heads.kv_heads, rows, dim)] * 2,
        output_dtypes=[dtype] * 2,
    )
    return [keys, values]


def _operations(
    fused: mx.array, norm: nn.RMSNorm, heads: HeadProjection, rope: Rotation, position: int
) -> list[mx.array]:
    rows, total, dim = fused.shape[1], heads.heads, heads.head_norms.shape[1]
    hidden = norm(fused.astype(heads.head_norms.dtype))
    both = heads.joined(hidden).reshape(1, rows, 2 * total, dim)
    weights = mx.repeat(heads.head_norms, heads.kv_heads, axis=0)  # [layers · Hkv, D]
    keys = mx.fast.rms_norm(both[:, :, :total], None, heads.head_eps) * weights
    keys = rope(keys.transpose(0, 2, 1, 3), position)
    values = both[:, :, total:].transpose(0, 2, 1, 3)
    return [part.reshape(-1, heads.kv_heads, rows, dim) for part in (keys, values)]
