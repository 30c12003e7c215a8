"""A drafter's own kernels on the CPU harness, against float64 and their twins.

kernels.fuse_taps, kernels.block_projection, kernels.block_convolution.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from metal_cpu import Mode
from metal_kernels import (
    assert_near,
    exact,
    kernels_on_cpu,
    launches,
    random,
    single,
    single_layer,
)
from test_kernel_matmul import dense, linear_layer
from test_kernel_projection import GROUPS, TYPES, norm_of, reference, rope_of

from dflash_mlx.features import Features
from dflash_mlx.kernels import (
    Coefficients,
    HeadProjection,
    block_convolution,
    block_projection,
    fuse_taps,
    rows_matmul,
)

pytestmark = pytest.mark.metal_cpu


def _taps(count: int, rows: int, width: int, dtype: mx.Dtype) -> Features:
    """Rows in the middle of longer hidden states, as those that a cycle committed are."""
    parts = [random((1, rows + 3, width), dtype, 20 + i) for i in range(count)]
    return Features(parts).rows(1, 1 + rows)


def _check_taps(
    features: Features, outputs: int, dtype: mx.Dtype, bits: int = 0, group: int = 32
) -> None:
    _, rows, columns = features.shape
    fc = linear_layer(outputs, columns, dtype, bits, group)
    wide = Features([single(part) for part in features.parts])
    twin = fuse_taps(wide, single_layer(fc), mx.float32)
    assert twin.squares is None
    with kernels_on_cpu() as made:
        fused = fuse_taps(features, fc, dtype)
    assert launches(made) == {"fuse_taps": 1}
    x, weights = np.concatenate([exact(part[0]) for part in features.parts], axis=1), dense(fc)
    want, size = x @ weights.T, np.abs(x) @ np.abs(weights).T
    assert fused.rows.dtype == mx.float32
    assert_near(fused.rows[0], want, size)
    assert_near(twin.rows[0], want, size)
    assert fused.squares is not None
    assert fused.squares.shape[1] == rows
    # A square is off by twice its number's error times the number.
    assert_near(
        fused.squares.sum(axis=0), (want**2).sum(axis=1), (2 * np.abs(want) * size).sum(axis=1)
    )


@pytest.mark.parametrize(("dtype", "bits"), TYPES)
def test_taps_of_each_type(dtype: mx.Dtype, bits: int) -> None:
    _check_taps(_taps(3, 5, 64, dtype), 24, dtype, bits)


# One to eight taps; a part that ends inside a step of 64 columns; a whole array as one part.
@pytest.mark.parametrize(
    ("taps", "rows", "width", "outputs"), [(1, 1, 8, 1), (8, 16, 40, 13), (5, 9, 72, 33)]
)
def test_any_number_of_taps(taps: int, rows: int, width: int, outputs: int) -> None:
    _check_taps(_taps(taps, rows, width, mx.float32), outputs, mx.float32)


# Five taps of Qwen3-8B and of gpt-oss-20b, few outputs.
@pytest.mark.parametrize(("width", "bits"), [(4096, 4), (2880, 0)])
def test_the_long_sums_of_real_drafters(width: int, bits: int) -> None:
    _check_taps(_taps(5, 16, width, mx.bfloat16), 16, mx.bfloat16, bits)


def test_taps_the_kernel_does_not_take_go_to_the_twin() -> None:
    for features in (
        _taps(9, 2, 8, mx.float32),
        _taps(2, 17, 8, mx.float32),
        Features([mx.ones((1, 2, 16)), mx.ones((1, 2, 8))]),
    ):
        fc = linear_layer(8, features.shape[2], mx.float32)
        with kernels_on_cpu() as made:
            fused = fuse_taps(features, fc, mx.float32)
        assert made == []
        assert mx.array_equal(fused.rows, fc(features.joined))


def test_fused_rows_have_the_same_bits_in_any_company() -> None:
    features, fc = _taps(3, 16, 72, mx.float32), linear_layer(24, 216, mx.float32)
    with kernels_on_cpu(Mode.FAST):
        whole = fuse_taps(features, fc, mx.float32)
        assert whole.squares is not None
        for first, last in ((0, 1), (3, 8), (5, 16), (15, 16)):
            part = fuse_taps(features.rows(first, last), fc, mx.float32)
            assert mx.array_equal(part.rows, whole.rows[:, first:last])
            assert mx.array_equal(part.squares, whole.squares[:, first:last])


class Layer:
    """Projections of a block's attention layer, as drafters have them."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, hidden: int, dtype: mx.Dtype, **how: Any
    ) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = linear_layer(heads * dim, hidden, dtype, **how)
        self.k_proj = linear_layer(kv_heads * dim, hidden, dtype, **how)
        # Rows of one table, as in a drafter, whose layers' weights are views of a joined matrix.
        self.v_proj = linear_layer(2 * kv_heads * dim, hidden, dtype, **how)
        for name in ("weight", "scales", "biases", "bias"):
            if name in self.v_proj:
                self.v_proj[name] = self.v_proj[name][kv_heads * dim :]
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=2e-3), nn.RMSNorm(dim, eps=2e-3)
        self.q_norm.weight = 1 + random((dim,), dtype, 11, 0.3)
        self.k_norm.weight = 1 + random((dim,), dtype, 12, 0.3)


def _as_context(
    first: nn.Module, second: nn.Module, norm: nn.RMSNorm, heads: int
) -> HeadProjection:
    """Two projections as the keys and values of a context, for its reference."""
    return HeadProjection(first, second, norm.weight[None], norm.eps, heads)


def single_heads(layer: Layer) -> Layer:
    """The same layer with its numbers in float32."""
    wide = copy.copy(layer)
    for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
        setattr(wide, name, single_layer(getattr(layer, name)))
    return wide


def _check_block(
    layer: Layer, rows: int, kind: str, dtype: mx.Dtype = mx.float32, *, normed: bool = True
) -> None:
    dim = layer.k_norm.weight.shape[0]
    rope = rope_of(dim, kind)
    queries = _as_context(layer.q_proj, layer.q_proj, layer.q_norm, layer.heads)
    keys = _as_context(layer.k_proj, layer.v_proj, layer.k_norm, layer.kv_heads)
    norm = norm_of(queries) if normed else None
    x = random((1, rows, dense(layer.q_proj).shape[1]), dtype, 7)
    wide = None if norm is None else single_layer(norm)
    twin = block_projection(single(x), wide, single_heads(layer), rope, 40)
    with kernels_on_cpu() as made:
        found = block_projection(x, norm, layer, rope, 40)
    assert launches(made) == {"head_projection": 1}
    (q, _), (q_size, _) = reference(x, queries, rope, 40, normed=normed)
    (k, v), sizes = reference(x, keys, rope, 40, normed=normed)
    for got, same, want, size in zip(found, twin, (q, k, v), (q_size, *sizes), strict=True):
        assert_near(got, want, size)
        assert_near(same, want, size)


@pytest.mark.parametrize(("dtype", "bits", "group"), GROUPS)
def test_blocks_and_taps_of_each_group_size(dtype: mx.Dtype, bits: int, group: int) -> None:
    _check_block(Layer(2, 1, 32, 128, dtype, bits=bits, group=group), 3, "theta", dtype)
    _check_taps(_taps(2, 3, 128, dtype), 12, dtype, bits, group)


def test_taps_of_another_type_than_the_weights() -> None:
    _check_taps(_taps(2, 5, 64, mx.float16), 12, mx.bfloat16)
    _check_taps(_taps(2, 5, 64, mx.bfloat16), 12, mx.float32)


@pytest.mark.parametrize(("dtype", "bits"), TYPES)
def test_blocks_of_each_type(dtype: mx.Dtype, bits: int) -> None:
    layer = Layer(4, 2, 16, 64, dtype, bits=bits, group=32, bias=bits == 8)
    _check_block(layer, 5, "theta", dtype)


# Head sizes of real drafters, odd ones, and each rope.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "hidden", "rows", "kind"),
    [
        (2, 1, 128, 1032, 16, "theta"),
        (1, 1, 256, 64, 9, "partial"),
        (2, 2, 96, 40, 1, "scaled"),
        (3, 1, 8, 24, 7, "theta"),
    ],
)
def test_blocks_of_each_size(
    heads: int, kv_heads: int, dim: int, hidden: int, rows: int, kind: str
) -> None:
    _check_block(Layer(heads, kv_heads, dim, hidden, mx.float32), rows, kind)


@pytest.mark.parametrize(("dtype", "bits"), TYPES)
def test_a_block_without_a_norm_is_projected_as_it_is(dtype: mx.Dtype, bits: int) -> None:
    layer = Layer(2, 1, 16, 64, dtype, bits=bits, group=32)
    _check_block(layer, 6, "theta", dtype, normed=False)


def test_projections_of_two_kinds_go_to_the_twin() -> None:
    layer, rope = Layer(2, 1, 16, 64, mx.float32), rope_of(16, "theta")
    layer.k_proj = nn.QuantizedLinear.from_linear(layer.k_proj, 32, 4)
    with kernels_on_cpu() as made:
        block_projection(random((1, 6, 64), mx.float32, 8), None, layer, rope, 3)
    assert made == []


@pytest.mark.parametrize(
    ("dtype", "bits", "rows"), [(mx.float32, 0, 5), (mx.float16, 4, 9), (mx.bfloat16, 8, 16)]
)
def test_products_of_normed_rows(dtype: mx.Dtype, bits: int, rows: int) -> None:
    linear = linear_layer(20, 192, dtype, bits, 32)
    x, norm = random((1, rows, 192), dtype, 3), nn.RMSNorm(192, eps=1e-2)
    norm.weight = 1 + random((192,), dtype, 5, 0.3)
    twin = rows_matmul(single(x), single_layer(linear), norm=single_layer(norm))
    with kernels_on_cpu() as made:
        found = rows_matmul(x, linear, norm=norm)
    assert launches(made) == {"rows_matmul": 1}
    plain = exact(x[0])
    plain = plain / np.sqrt((plain**2).mean(axis=-1, keepdims=True) + norm.eps) * exact(norm.weight)
    want, size = plain @ dense(linear).T, np.abs(plain) @ np.abs(dense(linear)).T
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


# One row, fewer rows than taps, primes, more channels than a threadgroup has threads and no
# multiple of them, a channel a group, SmolLM2's drafter.
@pytest.mark.parametrize(
    ("dtype", "rows", "taps", "hidden", "groups"),
    [
        (mx.float32, 1, 2, 1, 1),
        (mx.float32, 2, 4, 37, 37),
        (mx.float32, 6, 4, 576, 9),
        (mx.float16, 5, 2, 40, 5),
        (mx.bfloat16, 16, 3, 300, 6),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_convolutions(
    dtype: mx.Dtype, rows: int, taps: int, hidden: int, groups: int, normed: bool
) -> None:
    x, residual = (random((1, rows, hidden), dtype, seed) for seed in (1, 2))
    base = random((taps, hidden), dtype, 3)
    coefficients = Coefficients(base, random((rows, 2, taps, groups), dtype, 4)[:, 1])
    added, norm = residual if rows != 2 else None, None
    if normed:
        norm = nn.RMSNorm(hidden, eps=1e-2)
        norm.weight = 1 + random((hidden,), dtype, 5, 0.3)
    twin = block_convolution(
        single(x),
        Coefficients(*map(single, coefficients)),
        norm=None if norm is None else single_layer(norm),
        residual=None if added is None else single(added),
    )
    with kernels_on_cpu() as made:
        found = block_convolution(x, coefficients, norm=norm, residual=added)
    assert launches(made) == {"block_convolution": 1}
    rows_in = exact(x[0])
    if norm is not None:
        rms = np.sqrt((rows_in**2).mean(axis=-1, keepdims=True) + norm.eps)
        rows_in = rows_in / rms * exact(norm.weight)
    padded = np.concatenate([np.zeros((taps - 1, hidden)), rows_in])
    lags = np.stack([padded[taps - 1 - k : taps - 1 - k + rows] for k in range(taps)], axis=1)
    dynamic = np.repeat(exact(coefficients.dynamic), hidden // groups, axis=2)
    terms, sizes = (
        lags * (exact(base) + dynamic),
        np.abs(lags) * (np.abs(exact(base)) + np.abs(dynamic)),
    )
    more = exact(added[0]) if added is not None else np.zeros((rows, hidden))
    want, size = terms.sum(axis=1) + more, sizes.sum(axis=1) + np.abs(more)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)
