"""A small case of every kernel against its twin, for a machine that has loaded no model yet."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.attention import Rows, Sight, Surroundings, block_attention
from dflash_mlx.kernels.gated_delta import DeltaRows, advance, replay
from dflash_mlx.kernels.matmul import rows_matmul
from dflash_mlx.kernels.projection import HeadProjection, context_projection

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


def try_all(dtype: mx.Dtype = mx.float32) -> list[str]:
    """Run every kernel that is active once; why those that failed are not used, a sentence each."""
    if not backend.kernels_active():
        return []
    keys = mx.random.split(mx.random.key(0), 5)
    draw = mx.random.normal
    x = draw((1, _ROWS, _HIDDEN), dtype, key=keys[0])
    projection = nn.Linear(_HIDDEN, 2 * _HEADS * _DIM, bias=False)
    projection.weight = draw(projection.weight.shape, dtype, key=keys[1]) * _HIDDEN**-0.5
    rows_matmul(x, nn.QuantizedLinear.from_linear(projection, 64, 4))
    norm = nn.RMSNorm(_HIDDEN)
    norm.weight = norm.weight.astype(dtype)
    heads = HeadProjection(projection, mx.ones((1, _DIM), dtype), 1e-6, _HEADS)
    turning = _Turning(10000.0 ** (mx.arange(0, _DIM, 2) / _DIM))
    context_projection(rows_matmul(x, projection), norm, heads, turning, 11)
    queries = draw((1, 2 * _HEADS, _ROWS, _DIM), dtype, key=keys[2])
    held = Rows(*(draw((1, _HEADS, 300 + _ROWS, _DIM), dtype, key=key) for key in keys[3:]))
    block_attention(
        queries, Surroundings(joined=held), scale=_DIM**-0.5, sight=Sight(True), position=300
    )
    _try_recurrence()
    return backend.rejections()


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
