"""A small case of every kernel against its twin, for a machine that has loaded no model yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.features import Features
from dflash_mlx.kernels import backend
from dflash_mlx.kernels.attention import Rows, Sight, Surroundings, block_attention
from dflash_mlx.kernels.convolution import Coefficients, block_convolution
from dflash_mlx.kernels.fusion import fuse_taps
from dflash_mlx.kernels.gated_delta import DeltaRows, advance, replay
from dflash_mlx.kernels.matmul import gated_matmul, rows_matmul
from dflash_mlx.kernels.projection import HeadProjection, block_projection, context_projection

TYPES = (mx.float32, mx.float16, mx.bfloat16)
BITS = (0, 4, 8)  # of weights; 0: not quantized
_HIDDEN, _HEADS, _DIM, _ROWS = 256, 2, 64, 5


@dataclass
class _Turning:
    """A rotary embedding over whole heads."""

    periods: mx.array
    dims: int = _DIM
    magnitude: float = 1.0
    theta: float | None = 10000.0

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=False, base=self.theta, scale=1.0, offset=offset
        )


class _Layer(nn.Module):
    """A draft layer's projections for attention."""

    heads, kv_heads = 2 * _HEADS, _HEADS

    def __init__(self, dtype: mx.Dtype, bits: int) -> None:
        super().__init__()
        self.q_proj = _linear(2 * _HEADS * _DIM, dtype, bits, 3)
        self.k_proj = _linear(_HEADS * _DIM, dtype, bits, 4)
        self.v_proj = _linear(_HEADS * _DIM, dtype, bits, 5)
        self.q_norm, self.k_norm = _norm(_DIM, dtype), _norm(_DIM, dtype)


def _linear(
    outputs: int, dtype: mx.Dtype, bits: int, seed: int, columns: int = _HIDDEN
) -> nn.Module:
    made = nn.Linear(columns, outputs, bias=False)
    shape = made.weight.shape
    made.weight = mx.random.normal(shape, dtype, key=mx.random.key(seed)) * columns**-0.5
    return nn.QuantizedLinear.from_linear(made, 64, bits) if bits else made


def _norm(size: int, dtype: mx.Dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(size)
    norm.weight = norm.weight.astype(dtype)
    return norm


def try_all(types: Sequence[mx.Dtype] = TYPES, bits: Sequence[int] = BITS) -> list[str]:
    """Run every kernel that is active once in each number type, and with weights of so many bits.

    Why those that failed are not used, a sentence each.
    """
    if not backend.kernels_active():
        return []
    for dtype in types:
        for count in bits:
            _try_weights(dtype, count)
        _try_block(dtype)
    _try_recurrence()
    return backend.rejections()


def _try_weights(dtype: mx.Dtype, bits: int) -> None:
    """What multiplies with weights."""
    keys = mx.random.split(mx.random.key(0), 2)
    taps = [mx.random.normal((1, _ROWS, _HIDDEN), dtype, key=key) for key in keys]
    x, norm = taps[0], _norm(_HIDDEN, dtype)
    turning = _Turning(10000.0 ** (mx.arange(0, _DIM, 2) / _DIM))
    fused = fuse_taps(Features(taps), _linear(_HIDDEN, dtype, bits, 1, 2 * _HIDDEN), dtype)
    joined = _linear(2 * _HEADS * _DIM, dtype, bits, 2)
    keys_of, values_of = (_linear(_HEADS * _DIM, dtype, bits, seed) for seed in (8, 9))
    heads = HeadProjection(keys_of, values_of, mx.ones((1, _DIM), dtype), 1e-6, _HEADS)
    context_projection(fused, norm, heads, turning, 11)
    block_projection(x, norm, _Layer(dtype, bits), turning, 11)
    rows_matmul(x, joined)
    gated_matmul(x, norm, *(_linear(_HIDDEN, dtype, bits, seed) for seed in (6, 7)))


def _try_block(dtype: mx.Dtype) -> None:
    """What has no weights: attention and convolution."""
    keys, draw = mx.random.split(mx.random.key(1), 5), mx.random.normal
    x = draw((1, _ROWS, _HIDDEN), dtype, key=keys[0])
    coefficients = Coefficients(x[0, :2], draw((_ROWS, 2, 4), dtype, key=keys[1]))
    block_convolution(x, coefficients, norm=_norm(_HIDDEN, dtype), residual=x)
    queries = draw((1, 2 * _HEADS, _ROWS, _DIM), dtype, key=keys[2])
    held = Rows(*(draw((1, _HEADS, 300 + _ROWS, _DIM), dtype, key=key) for key in keys[3:]))
    block_attention(
        queries, Surroundings(joined=held), scale=_DIM**-0.5, sight=Sight(True), position=300
    )


def _try_recurrence() -> None:
    keys = mx.random.split(mx.random.key(1), 3)
    queries, own, values = (
        mx.random.normal((1, _ROWS, heads, _DIM), key=key) * _DIM**-0.5
        for heads, key in zip((1, 1, _HEADS), keys, strict=True)
    )
    gates = mx.full((1, _ROWS, _HEADS), 0.7)
    rows = DeltaRows(queries, own, values, gates, gates)
    ran = advance(rows, None)
    replay(rows, None, ran.changes, 2)
