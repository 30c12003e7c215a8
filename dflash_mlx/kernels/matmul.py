"""Products of a few rows with linear layers' weights, each weight read once for all rows."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import Launch, constant, kernel

OPERATION = "rows_matmul"
# More rows go through MLX's matmul. Chosen, not measured: two tiles of eight rows, and no released
# drafter has longer blocks.
MAX_ROWS = 16
# Simdgroups of a threadgroup, and its 8-wide tiles of outputs. Chosen, not measured.
SIMDGROUPS, TILES = 8, 2
PLAIN, WEIGHTED, SQUARED = 0, 1, 2  # Norm in metal/common.h
_INPUTS = ("x", "weights", "scales", "biases", "bias", "up", "up_scales", "up_biases")
_NAMES = (*_INPUTS, "norm", "residual", "norm_eps")


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

    @property
    def variant(self) -> tuple[Any, ...]:
        """What tells this layer apart from others: types and sizes."""
        kinds = (self.weights.dtype, self.scales.dtype, self.bits, self.group)
        return (*kinds, self.bias is None, self.outputs, self.columns)


def weights_of(linear: nn.Module) -> Weights | None:
    """The weights of a layer or a tied table, if they are affine 4 or 8 bits, or plain numbers.

    None if the kernels cannot read them, as when the number of columns is no multiple of 8, or
    when there are fewer than eight scales.
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
    # MLX hands arrays of fewer than eight elements over in constant memory, which bodies that pass
    # pointers on cannot take.
    readable = columns % 8 == 0 and found[1].size >= 8
    return Weights(*found, weight.shape[0], columns) if readable else None


def rows_matmul(
    x: mx.array,
    linear: nn.Module,
    *,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
    exact: bool = False,
) -> mx.array:
    """linear(norm(x)) for [1, S, K] -> [1, S, N], and `residual` [1, S, N] added to it.

    Without a norm of x itself. The kernel, for up to MAX_ROWS rows, sums in float32 and has the
    same bits for a row whatever rows are beside it. exact: see backend.run.
    """

    def twin() -> list[mx.array]:
        out = _operation(x if norm is None else norm(x), linear)
        return [out if residual is None else residual + out]

    wanted = x.shape[1] <= MAX_ROWS and (exact or backend.is_active(OPERATION))
    found = weights_of(linear) if wanted else None
    if found is None:
        return twin()[0]
    variant = (*found.variant, x.dtype, x.shape[1] > 8, norm is None, residual is None)
    return backend.run(
        OPERATION,
        variant,
        lambda: [_launch(x, found, norm=norm, residual=residual)],
        twin,
        launches=[launch_of(x.shape[1], found.outputs)],
        exact=exact,
    )[0]


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, elementwise, as one fused kernel."""
    return gate * mx.sigmoid(gate) * up


def gated_matmul(x: mx.array, norm: nn.RMSNorm | None, gate: nn.Module, up: nn.Module) -> mx.array:
    """swiglu(gate(n), up(n)) of n = norm(x), of x itself without a norm: [1, S, K] -> [1, S, N]."""

    def twin() -> list[mx.array]:
        normed = x if norm is None else norm(x)
        return [swiglu(gate(normed), up(normed))]

    first = second = None
    if x.shape[1] <= MAX_ROWS and backend.is_active(OPERATION):
        first, second = weights_of(gate), weights_of(up)
    if first is None or second is None or first.variant != second.variant or first.bias is not None:
        return twin()[0]
    variant = ("gated", *first.variant, x.dtype, x.shape[1] > 8, norm is None)
    return backend.run(
        OPERATION,
        variant,
        lambda: [_launch(x, first, second, norm)],
        twin,
        launches=[launch_of(x.shape[1], first.outputs, gated=True)],
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


def launch_of(rows: int, outputs: int, *, gated: bool = False) -> Launch:
    """The launch for `rows` rows; a gated one makes eight outputs a threadgroup."""
    high, wide = row_tiles(rows) * 8, TILES * 8
    memory = SIMDGROUPS * high * (wide + 1) * 4
    return Launch((-(-outputs // (8 if gated else wide)), 1, 1), (SIMDGROUPS * 32, 1, 1), memory)


def row_tiles(rows: int) -> int:
    """Eight-high tiles of rows."""
    return -(-rows // 8)


def _launch(
    x: mx.array,
    weights: Weights,
    up: Weights | None = None,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    rows, outputs = x.shape[1], weights.outputs
    launch = launch_of(rows, outputs, gated=up is not None)
    norms = weights.scales if norm is None else norm.weight
    (out,) = kernel(OPERATION, _NAMES, ("y",))(
        inputs=[
            *(mx.contiguous(x.squeeze(0)), *weights.arrays, *(up or weights).arrays[:3], norms),
            x if residual is None else mx.contiguous(residual),
            constant(0.0 if norm is None else float(norm.eps)),
        ],
        template=[
            *(("X", x.dtype), ("Y", x.dtype), *weights.template, ("C", norms.dtype)),
            *(("NORM", PLAIN if norm is None else SQUARED), ("GATED", up is not None)),
            *(("RESIDUAL", residual is not None), ("ROW_TILES", row_tiles(rows))),
            *(("TILES", TILES), ("SIMDS", SIMDGROUPS)),
        ],
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return out[None]
