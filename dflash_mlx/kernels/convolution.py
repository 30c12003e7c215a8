"""A causal convolution over a block's rows whose coefficients are those of each row."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import Launch, kernel

OPERATION = "block_convolution"
THREADS = 256  # of a threadgroup; chosen, not measured
# More rows go to MLX's operations: no block is as long.
MAX_ROWS = 32


def block_convolution(
    x: mx.array, coefficients: mx.array, residual: mx.array | None = None
) -> mx.array:
    """y[t] = sum over taps k of coefficients[t, k] · x[t - k], and `residual` [1, L, H] added.

    x [1, L, H], coefficients [L, taps, H] -> [1, L, H].
    Rows before the anchor count as zero: nothing crosses into the context or another cycle.
    """

    def twin() -> list[mx.array]:
        out = _operations(x, coefficients)
        return [out if residual is None else residual + out]

    _, rows, hidden = x.shape
    variant = (coefficients.shape[1:], x.dtype, coefficients.dtype, residual is None)
    if rows > MAX_ROWS or not backend.is_active(OPERATION):
        return twin()[0]
    return backend.run(
        OPERATION,
        variant,
        lambda: [_launch(x, coefficients, residual)],
        twin,
        launches=[launch_of(rows, hidden)],
    )[0]


def launch_of(rows: int, hidden: int) -> Launch:
    return Launch((-(-hidden // THREADS), rows, 1), (THREADS, 1, 1), 0)


def _operations(x: mx.array, coefficients: mx.array) -> mx.array:
    rows, taps = x.shape[1], coefficients.shape[1]
    padded = mx.pad(x[0], [(taps - 1, 0), (0, 0)])
    lags = [padded[taps - 1 - k : taps - 1 - k + rows] for k in range(taps)]
    return (coefficients * mx.stack(lags, axis=1)).sum(axis=1)[None]


def _launch(x: mx.array, coefficients: mx.array, residual: mx.array | None) -> mx.array:
    _, rows, hidden = x.shape
    plain = mx.contiguous(x[0])
    (out,) = kernel(OPERATION, ("x", "coefficients", "residual"), ("y",))(
        inputs=[plain, coefficients, plain if residual is None else mx.contiguous(residual[0])],
        template=[("T", x.dtype), ("RESIDUAL", residual is not None)],
        # No thread without a channel.
        grid=(hidden, rows, 1),
        threadgroup=launch_of(rows, hidden).threads,
        output_shapes=[(rows, hidden)],
        output_dtypes=[x.dtype],
    )
    return out[None]
