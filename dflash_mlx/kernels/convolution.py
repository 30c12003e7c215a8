"""A causal convolution over a block's rows whose coefficients are those of each row."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import Launch, constant, kernel

OPERATION = "block_convolution"
THREADS = 256  # of a threadgroup; chosen, not measured
# More rows go to MLX's operations: no block is as long.
MAX_ROWS = 32
_NAMES = ("x", "base", "dynamic", "residual", "norm", "norm_eps")


class Coefficients(NamedTuple):
    """base [taps, H] of channels, contiguous, plus dynamic [L, taps, groups] of rows and groups."""

    base: mx.array
    dynamic: mx.array


def block_convolution(
    x: mx.array,
    coefficients: Coefficients,
    *,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """y[t] = sum over taps k of c[t, k] · n[t - k] of n = norm(x), and `residual` added.

    x, residual [1, L, H] -> [1, L, H]; without a norm n is x.
    Rows before the anchor count as zero: nothing crosses into the context or another cycle.
    """

    def twin() -> list[mx.array]:
        out = _operations(x if norm is None else norm(x), coefficients)
        return [out if residual is None else residual + out]

    rows = x.shape[1]
    base, dynamic = coefficients
    sizes = (base.shape, dynamic.shape[2], x.dtype, base.dtype, dynamic.dtype)
    if rows > MAX_ROWS or not backend.is_active(OPERATION):
        return twin()[0]
    return backend.run(
        OPERATION,
        (*sizes, norm is None, residual is None),
        lambda: [_launch(x, coefficients, norm, residual)],
        twin,
        launches=[launch_of(rows, *base.shape)],
    )[0]


def launch_of(rows: int, taps: int, hidden: int) -> Launch:
    return Launch((-(-hidden // THREADS), rows, 1), (THREADS, 1, 1), taps * THREADS // 32 * 4)


def _operations(x: mx.array, coefficients: Coefficients) -> mx.array:
    base, dynamic = coefficients
    rows, taps, groups = dynamic.shape
    each = (base.reshape(taps, groups, -1) + dynamic[..., None]).reshape(rows, taps, -1)
    padded = mx.pad(x.squeeze(0), [(taps - 1, 0), (0, 0)])
    lags = [padded[taps - 1 - k : taps - 1 - k + rows] for k in range(taps)]
    return (each * mx.stack(lags, axis=1)).sum(axis=1)[None]


def _launch(
    x: mx.array, coefficients: Coefficients, norm: nn.RMSNorm | None, residual: mx.array | None
) -> mx.array:
    _, rows, hidden = x.shape
    base, dynamic = coefficients
    launch = launch_of(rows, *base.shape)
    plain = mx.contiguous(x.squeeze(0))
    (out,) = kernel(OPERATION, _NAMES, ("y",))(
        inputs=[
            *(plain, base, dynamic),
            plain if residual is None else mx.contiguous(residual.squeeze(0)),
            plain if norm is None else norm.weight,
            constant(0.0 if norm is None else float(norm.eps)),
        ],
        template=[
            *(("T", x.dtype), ("TAPS", base.shape[0]), ("THREADS", THREADS)),
            *(("NORM", norm is not None), ("RESIDUAL", residual is not None)),
        ],
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=[(rows, hidden)],
        output_dtypes=[x.dtype],
    )
    return out[None]
