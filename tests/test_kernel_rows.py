"""Products and convolutions: a row has the same bits in blocks of 1 to 16 rows, at any place.

The tests of attention and of the gated delta rule have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu, launches, random
from test_kernel_block import Layer
from test_kernel_matmul import linear_layer
from test_kernel_projection import norm_of, rope_of

from dflash_mlx.features import Features
from dflash_mlx.kernels import (
    Coefficients,
    Fused,
    HeadProjection,
    block_convolution,
    block_projection,
    context_projection,
    fuse_taps,
)
from dflash_mlx.kernels.matmul import gated_matmul, rows_matmul

pytestmark = pytest.mark.metal_cpu

MAX_ROWS, POSITION = 16, 250
#: weights of each kind the kernels read: type, bits (0: plain), columns; 72 ends inside a step
KINDS = [(mx.float32, 0, 72), (mx.float16, 4, 96), (mx.bfloat16, 8, 160), (mx.bfloat16, 0, 72)]

#: rows first .. stop - 1 of one computation, each output with its rows on axis 0
Rows = Callable[[int, int], Sequence[mx.array]]


def _assert_rows_keep_their_bits(rows: Rows) -> None:
    """Every number of rows, at both ends of the block and inside it."""
    with kernels_on_cpu(Mode.FAST) as made:
        whole = rows(0, MAX_ROWS)
        for count in range(1, MAX_ROWS):
            for first in {0, (MAX_ROWS - count) // 2, MAX_ROWS - count}:
                part = rows(first, first + count)
                for got, want in zip(part, whole, strict=True):
                    assert mx.array_equal(got, want[first : first + count]), (first, count)
    assert sum(launches(made).values()) > 2 * MAX_ROWS
    assert all(mx.std(out.astype(mx.float32)).item() > 0.01 for out in whole)


# The order of sums is that of the weights' kind; what is done with a sum is elementwise.
@pytest.mark.parametrize(
    ("dtype", "bits", "columns", "form"),
    [
        (*KINDS[0], "gated with norm"),
        (*KINDS[1], "residual"),
        (*KINDS[1], "gated"),
        (*KINDS[2], "bias"),
        (*KINDS[3], "bare"),
    ],
)
def test_products(dtype: mx.Dtype, bits: int, columns: int, form: str) -> None:
    x, residual = random((1, 16, columns), dtype, 1), random((1, 16, 40), dtype, 2)
    linear = linear_layer(40, columns, dtype, bits, 32, bias=form == "bias")
    up = linear_layer(40, columns, dtype, bits, 32)
    norm = nn.RMSNorm(columns)
    norm.weight = 1 + random((columns,), dtype, 3, 0.3)

    def rows(first: int, stop: int) -> list[mx.array]:
        part = x[:, first:stop]
        if form.startswith("gated"):
            return [gated_matmul(part, norm if "norm" in form else None, linear, up)[0]]
        added = residual[:, first:stop] if form == "residual" else None
        return [rows_matmul(part, linear, residual=added)[0]]

    _assert_rows_keep_their_bits(rows)


@pytest.mark.parametrize(("dtype", "bits", "columns"), KINDS)
def test_fused_taps(dtype: mx.Dtype, bits: int, columns: int) -> None:
    width = columns if columns == 72 else columns // 2
    features = Features([random((1, 16, width), dtype, 20 + i) for i in range(2)])
    fc = linear_layer(33, 2 * width, dtype, bits, 32)

    def rows(first: int, stop: int) -> list[mx.array]:
        fused = fuse_taps(features.rows(first, stop), fc, dtype)
        assert fused.squares is not None
        return [fused.rows[0], fused.squares.T]

    _assert_rows_keep_their_bits(rows)


@pytest.mark.parametrize(
    ("dtype", "bits", "columns", "kind"),
    [(*KINDS[0], "theta"), (*KINDS[1], "partial"), (*KINDS[2], "scaled"), (*KINDS[3], "theta")],
)
def test_context_keys_and_values(dtype: mx.Dtype, bits: int, columns: int, kind: str) -> None:
    layers, kv_heads, dim = 2, 2, 16
    keys, values = (
        linear_layer(layers * kv_heads * dim, columns, dtype, bits, 32, bias=bits == 4)
        for _ in range(2)
    )
    head_norms = 1 + random((layers, dim), dtype, 2, 0.3)
    heads = HeadProjection(keys, values, head_norms, 2e-3, kv_heads)
    x, norm, rope = random((1, 16, columns), dtype, 7), norm_of(heads), rope_of(dim, kind)
    squares = mx.square(x.astype(mx.float32)).sum(axis=-1)

    def rows(first: int, stop: int) -> list[mx.array]:
        fused = Fused(x[:, first:stop], squares[:, first:stop])
        return [context_projection(fused, norm, heads, rope, POSITION + first).swapaxes(0, 3)]

    _assert_rows_keep_their_bits(rows)


@pytest.mark.parametrize(
    ("dtype", "bits", "columns", "normed"),
    [(*KINDS[0], True), (*KINDS[1], True), (*KINDS[2], False), (*KINDS[3], True)],
)
def test_a_blocks_own_projections(dtype: mx.Dtype, bits: int, columns: int, normed: bool) -> None:
    layer = Layer(4, 2, 16, columns, dtype, bits=bits, group=32, bias=bits == 8)
    x, norm, rope = random((1, 16, columns), dtype, 7), nn.RMSNorm(columns), rope_of(16, "theta")
    norm.weight = 1 + random((columns,), dtype, 3, 0.3)

    def rows(first: int, stop: int) -> list[mx.array]:
        part = x[:, first:stop]
        found = block_projection(part, norm if normed else None, layer, rope, POSITION + first)
        return [part[0].swapaxes(0, 1) for part in found]

    _assert_rows_keep_their_bits(rows)


@pytest.mark.parametrize(
    ("dtype", "taps", "hidden"),
    [(mx.float32, 4, 37), (mx.float16, 2, 40), (mx.bfloat16, 3, 300)],
)
def test_convolutions(dtype: mx.Dtype, taps: int, hidden: int) -> None:
    """They look back as far as the anchor, so that blocks differ in their length only."""
    x, residual = (random((1, 16, hidden), dtype, seed) for seed in (1, 2))
    base, dynamic = random((taps, hidden), dtype, 3), random((16, 2, taps, hidden), dtype, 4)[:, 1]
    norm = nn.RMSNorm(hidden)

    def rows(first: int, stop: int) -> list[mx.array]:
        own = Coefficients(base, dynamic[:stop])
        found = block_convolution(x[:, :stop], own, norm=norm, residual=residual[:, :stop])
        return [found[0, first:]]

    _assert_rows_keep_their_bits(rows)
