"""Products of a few rows with a linear layer's weights, each weight read once for all rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import kernel

OPERATION = "rows_matmul"
# More rows go through MLX's matmul, which uses the matrix units better from there on.
MAX_ROWS = 16
SIMDGROUPS, TILES = 8, 2  # of a threadgroup; 8-wide tiles of outputs
_INPUTS = ("x", "weights", "scales", "biases", "bias")


class Weights(NamedTuple):
    """A linear layer as kernels see it. Not quantized: bits is 0, and scales are the weights."""

    weights: mx.array
    scales: mx.array
    biases: mx.array
    bias: mx.array | None
    bits: int
    group: int
    outputs: int
    columns: int

    @property
    def template(self) -> list[tuple[str, Any]]:
        return [
            ("W", self.weights.dtype),
            ("S", self.scales.dtype),
            ("BITS", self.bits),
            ("GROUP", self.group),
            ("BIAS", self.bias is not None),
        ]

    @property
    def arrays(self) -> list[mx.array]:
        bias = self.scales if self.bias is None else self.bias
        return [self.weights, self.scales, self.biases, bias]


def weights_of(linear: nn.Module) -> Weights | None:
    """The weights of a layer or a tied table, if they are affine 4 or 8 bits, or plain numbers.

    None if the kernels cannot read them, as when the number of columns is no multiple of 8.
    """
    weight, bias = linear["weight"], linear.get("bias")
    if isinstance(linear, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if linear.mode != "affine" or linear.bits not in (4, 8):
            return None
        columns = weight.shape[1] * 32 // linear.bits
        scales, biases = linear["scales"], linear["biases"]
        found = (weight, scales, biases, bias, linear.bits, linear.group_size)
    elif isinstance(linear, nn.Linear | nn.Embedding) and weight.dtype in backend.TOLERANCE:
        columns = weight.shape[1]
        found = (weight, weight, weight, bias, 0, 1)
    else:
        return None
    return Weights(*found, weight.shape[0], columns) if columns % 8 == 0 else None


def rows_matmul(
    x: mx.array, linear: nn.Module, dtype: mx.Dtype | None = None, *, exact: bool = False
) -> mx.array:
    """linear(x) for [1, S, K] -> [1, S, N].

    The kernel, for up to MAX_ROWS rows, sums in float32 and gives `dtype` (by default x's), with
    the same bits for a row whatever rows are beside it; the twin gives the layer's own type.
    exact: see backend.run.
    """
    rows = x.shape[1]
    wanted = exact or backend.is_active(OPERATION)
    found = weights_of(linear) if rows <= MAX_ROWS and wanted else None
    if found is None:
        return _operation(x, linear)
    out_type = dtype or x.dtype
    variant = (*map(str, found.template), str(x.dtype), str(out_type), rows > 8)
    return backend.run(
        OPERATION,
        variant,
        lambda: [_launch(x, found, out_type)],
        lambda: [_operation(x, linear)],
        exact=exact,
    )[0]


def _operation(x: mx.array, linear: nn.Module) -> mx.array:
    """What MLX's own layer does, also for a subclass that calls rows_matmul."""
    for kind in (nn.QuantizedLinear, nn.Linear):
        if isinstance(linear, kind):
            return kind.__call__(linear, x)
    for kind in (nn.QuantizedEmbedding, nn.Embedding):
        if isinstance(linear, kind):
            return kind.as_linear(linear, x)
    return linear(x)


def _launch(x: mx.array, weights: Weights, dtype: mx.Dtype) -> mx.array:
    rows, outputs = x.shape[1], weights.outputs
    groups = -(-outputs // (8 * TILES))
    (out,) = kernel(OPERATION, _INPUTS, ("y",))(
        inputs=[mx.contiguous(x[0]), *weights.arrays],
        template=[
            *(("X", x.dtype), ("Y", dtype), *weights.template),
            *(("ROW_TILES", -(-rows // 8)), ("TILES", TILES)),
            ("SIMDS", SIMDGROUPS),
        ],
        grid=(groups * SIMDGROUPS * 32, 1, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[dtype],
    )
    return out[None]
