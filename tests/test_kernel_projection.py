"""kernels.context_projection: the kernel on the CPU harness, against float64 and its twin."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from metal_cpu import SCHEDULES, Mode
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

from dflash_mlx.draft.dflash import rows_of
from dflash_mlx.kernels import (
    Fused,
    HeadProjection,
    context_projection,
)
from dflash_mlx.layers.rope import Rope

pytestmark = pytest.mark.metal_cpu


def _heads(
    layers: int,
    kv_heads: int,
    dim: int,
    hidden: int,
    dtype: mx.Dtype,
    *,
    bits: int = 0,
    group: int = 32,
    bias: bool = False,
) -> HeadProjection:
    heads = layers * kv_heads * dim
    # Rows of one table: as where layers with a window are projected apart from the others.
    joined = linear_layer(2 * heads, hidden, dtype, bits, group, bias)
    keys, values = (rows_of(joined, rows) for rows in (slice(heads), slice(heads, 2 * heads)))
    head_norms = 1 + random((layers, dim), dtype, 2, 0.3)
    return HeadProjection(keys, values, head_norms, 2e-3, kv_heads)


def norm_of(heads: HeadProjection) -> nn.RMSNorm:
    """A norm of the fused features that fits the projection."""
    hidden = dense(heads.keys).shape[1]
    norm = nn.RMSNorm(hidden, eps=1e-3)
    norm.weight = 1 + random((hidden,), heads.head_norms.dtype, 1, 0.3)
    return norm


def _project(
    fused: mx.array, heads: HeadProjection, rope: Rope, position: int, *, parts: int = 0
) -> mx.array:
    """With the squares of the rows in that many parts, if any."""
    squares = None
    if parts:
        pieces = mx.square(fused[0].astype(mx.float32)).reshape(fused.shape[1], parts, -1)
        squares = pieces.sum(axis=-1).T
    return context_projection(Fused(fused, squares), norm_of(heads), heads, rope, position)


def rope_of(dim: int, kind: str) -> Rope:
    periods = 1000.0 ** (np.arange(0, dim, 2) / dim)
    if kind == "theta":
        return Rope(periods, theta=1000.0)
    if kind == "partial":
        return Rope(periods[: dim // 4], theta=None)
    return Rope(periods * np.linspace(1, 3, len(periods)), 1.2)


def reference(
    fused: mx.array, heads: HeadProjection, rope: Rope, position: int, *, normed: bool = True
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values in float64 as [layers, Hkv, S, D], and the size of the sums behind them.

    normed: the rows have norm_of(heads) to go through.
    """
    both, norm = (heads.keys, heads.values), norm_of(heads)
    x, weights = exact(fused[0]), np.concatenate([dense(part) for part in both])
    if normed:
        rms = np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps)
        x = x / rms * exact(norm.weight)
    bias = np.zeros(len(weights))
    if "bias" in heads.keys:
        bias = np.concatenate([exact(part.bias) for part in both])
    layers, dim = heads.head_norms.shape
    shape = (len(x), 2, layers, heads.kv_heads, dim)
    sums, sizes = (
        part.reshape(shape).transpose(1, 2, 3, 0, 4)
        for part in (x @ weights.T + bias, np.abs(x) @ np.abs(weights).T + np.abs(bias))
    )
    keys, size = sums[0], sizes[0]
    rms = np.sqrt((keys**2).mean(axis=-1, keepdims=True) + heads.head_eps)
    factor = exact(heads.head_norms)[:, None, None] / rms
    keys, size = keys * factor, size * np.abs(factor)
    half = rope.dims // 2
    inverse = 1000.0 ** (-np.arange(half) / half) if rope.theta else 1 / exact(rope.periods)
    angle = (position + np.arange(len(x)))[:, None] * inverse
    turned, kept = keys[..., : 2 * half] * rope.magnitude, keys[..., 2 * half :]
    a, b = turned[..., :half], turned[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    keys = np.concatenate([a * cos - b * sin, a * sin + b * cos, kept], axis=-1)
    # Rope mixes pairs, the norm all of a head.
    size = np.broadcast_to(size.max(axis=-1, keepdims=True), size.shape) * 3 * rope.magnitude
    return [keys, sums[1]], [size, sizes[1]]


def _check(
    heads: HeadProjection, rows: int, rope: Rope, position: int, dtype: mx.Dtype = mx.float32
) -> None:
    fused = random((1, rows, norm_of(heads).weight.shape[0]), dtype, 7)
    with kernels_on_cpu() as made:
        found = _project(fused, heads, rope, position, parts=4 * (rows % 2))
    assert launches(made) == {"head_projection": 1}
    wide = replace(
        heads,
        keys=single_layer(heads.keys),
        values=single_layer(heads.values),
        head_norms=single(heads.head_norms),
    )
    own = (single_layer(norm_of(heads)), wide, rope, position)
    twin = context_projection(Fused(single(fused), None), *own)
    wanted = reference(fused, heads, rope, position)
    for got, same, want, size in zip(found, twin, *wanted, strict=True):
        assert_near(got, want, size)
        assert_near(same, want, size)


# The product itself is rows_matmul's, whose tests have every pair of these.
TYPES = [(mx.float32, 0), (mx.float16, 4), (mx.bfloat16, 8), (mx.bfloat16, 0)]
# Every pair of a type, a number of bits and a size of groups.
GROUPS = [
    (dtype, bits, group)
    for i, dtype in enumerate([mx.float32, mx.float16, mx.bfloat16])
    for j, bits in enumerate([4, 8])
    for k, group in enumerate([32, 64, 128])
    if (i + j + k) % 2 == 0
]


@pytest.mark.parametrize(("dtype", "bits"), TYPES)
def test_each_type_and_width(dtype: mx.Dtype, bits: int) -> None:
    heads = _heads(2, 1, 64, 96, dtype, bits=bits, bias=bits == 4)
    _check(heads, 5, rope_of(64, "theta"), 40)


@pytest.mark.parametrize(("dtype", "bits", "group"), GROUPS)
def test_each_group_size(dtype: mx.Dtype, bits: int, group: int) -> None:
    _check(_heads(1, 1, 32, 128, dtype, bits=bits, group=group), 3, rope_of(32, "theta"), 7)


def test_rows_of_another_type_than_the_weights() -> None:
    for own, given in ((mx.bfloat16, mx.float16), (mx.float16, mx.float32)):
        _check(_heads(1, 1, 32, 64, own), 5, rope_of(32, "theta"), 7, given)


@pytest.mark.parametrize(
    ("dim", "kind"),
    [(96, "theta"), (96, "scaled"), (128, "partial"), (128, "theta"), (256, "scaled")],
)
def test_each_head_size_and_rope(dim: int, kind: str) -> None:
    _check(_heads(1, 2, dim, 64, mx.float32), 9, rope_of(dim, kind), 13)


# Hidden sizes of Qwen3-8B, Qwen3.5-9B (4096, 128) and gpt-oss-20b (2880, 64) drafters; one head.
@pytest.mark.parametrize(("hidden", "dim", "bits"), [(4096, 128, 4), (2880, 64, 0)])
def test_real_widths(hidden: int, dim: int, bits: int) -> None:
    _check(_heads(1, 1, dim, hidden, mx.bfloat16, bits=bits), 16, rope_of(dim, "scaled"), 100)


@pytest.mark.parametrize(("rows", "hidden", "dim"), [(1, 8, 16), (16, 24, 8), (7, 40, 16)])
def test_odd_sizes(rows: int, hidden: int, dim: int) -> None:
    _check(_heads(3, 1, dim, hidden, mx.float32), rows, rope_of(dim, "theta"), 0)


@pytest.mark.parametrize("kind", ["theta", "scaled"])
def test_the_twin_agrees_far_into_a_sequence(kind: str) -> None:
    heads, rope = _heads(2, 2, 64, 64, mx.float32, bias=True), rope_of(64, kind)
    fused = random((1, 4, 64), mx.float32, 8)
    twin = _project(fused, heads, rope, 5000)
    with kernels_on_cpu() as made:
        found = _project(fused, heads, rope, 5000)
    assert launches(made) == {"head_projection": 1}
    for got, want in zip(found, twin, strict=True):
        # An angle of 5000 has half a thousandth of rounding in float32.
        np.testing.assert_allclose(got, want, atol=2e-3 * float(mx.abs(want).max()))


def test_rows_have_the_same_bits_in_any_company_and_schedule() -> None:
    heads, rope = _heads(1, 2, 64, 72, mx.bfloat16), rope_of(64, "theta")
    fused = random((1, 16, 72), mx.float32, 9)
    with kernels_on_cpu(Mode.FAST):
        whole = _project(fused, heads, rope, 30)
        for first, last in ((0, 1), (3, 8), (5, 16), (15, 16)):
            part = _project(fused[:, first:last], heads, rope, 30 + first)
            for got, want in zip(part, whole, strict=True):
                assert mx.array_equal(got, want[:, :, first:last])
    for schedule in SCHEDULES:
        with kernels_on_cpu(Mode.FAST, schedule):
            for got, want in zip(_project(fused, heads, rope, 30), whole, strict=True):
                assert mx.array_equal(got, want)


def test_a_head_that_fits_no_threadgroup_goes_to_the_twin() -> None:
    heads = _heads(1, 1, 12, 32, mx.float32)
    with kernels_on_cpu() as made:
        _project(random((1, 2, 32), mx.float32, 3), heads, rope_of(12, "theta"), 0)
    assert made == []
