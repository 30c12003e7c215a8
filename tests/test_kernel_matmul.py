"""kernels.rows_matmul: the kernel, run on the CPU harness, against float64 and against its twin."""

from __future__ import annotations

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

from dflash_mlx.kernels import backend, gated_matmul, matmul, rows_matmul

pytestmark = pytest.mark.metal_cpu


def linear_layer(
    outputs: int, columns: int, dtype: mx.Dtype, bits: int = 0, group: int = 64, bias: bool = False
) -> nn.Module:
    plain = nn.Linear(columns, outputs, bias=bias)
    plain.weight = random((outputs, columns), dtype, 1)
    if bias:
        plain.bias = random((outputs,), dtype, 2)
    return nn.QuantizedLinear.from_linear(plain, group, bits) if bits else plain


def dense(linear: nn.Module) -> np.ndarray:
    """The layer's weights in float64, codes opened by hand."""
    if not isinstance(linear, nn.QuantizedLinear):
        return exact(linear.weight)
    words = np.array(linear.weight)
    steps = np.arange(0, 32, linear.bits)
    codes = (words[:, :, None] >> steps & (2**linear.bits - 1)).reshape(len(words), -1)
    scales, biases = (
        np.repeat(exact(part), linear.group_size, axis=1) for part in (linear.scales, linear.biases)
    )
    return codes * scales + biases


def check(linear: nn.Module, rows: int, dtype: mx.Dtype, *, residual: bool = False) -> None:
    """Kernel and twin against float64, the twin with the same numbers in float32."""
    weights = dense(linear)
    x = random((1, rows, weights.shape[1]), dtype, 3)
    added = random((1, rows, len(weights)), dtype, 4) if residual else None
    again = None if added is None else single(added)
    twin = rows_matmul(single(x), single_layer(linear), residual=again)
    with kernels_on_cpu() as made:
        found = rows_matmul(x, linear, residual=added)
    assert launches(made) == {"rows_matmul": 1}
    assert found.dtype == dtype
    bias = exact(linear.bias) if "bias" in linear else np.zeros(len(weights))
    bias = bias if added is None else bias + exact(added[0])
    want = exact(x[0]) @ weights.T + bias
    size = np.abs(exact(x[0])) @ np.abs(weights).T + np.abs(bias)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_each_type_and_width(dtype: mx.Dtype, bits: int) -> None:
    linear = linear_layer(40, 192, dtype, bits, bias=bits != 8)
    check(linear, 11, dtype, residual=bits != 4)


@pytest.mark.parametrize("group", [32, 128])
def test_each_group_size(group: int) -> None:
    check(linear_layer(16, 256, mx.bfloat16, 4, group), 3, mx.bfloat16)


# Primes, one, not a multiple of any tile; K of a multiple of 8 only.
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 1, 8), (5, 13, 72), (16, 17, 1032)])
def test_odd_sizes(rows: int, outputs: int, columns: int) -> None:
    check(linear_layer(outputs, columns, mx.float32), rows, mx.float32)


# fc of Qwen3-8B's drafter (K = 5 · 4096) and of gpt-oss-20b's (K = 5 · 2880), few outputs.
@pytest.mark.parametrize(("columns", "bits"), [(20480, 4), (14400, 0)])
def test_the_long_sums_of_real_drafters(columns: int, bits: int) -> None:
    check(linear_layer(16, columns, mx.bfloat16, bits), 16, mx.bfloat16)


# SmolLM2's hidden size, one that the simdgroups share unevenly, and outputs that fill no tile.
@pytest.mark.parametrize(("outputs", "columns"), [(24, 576), (24, 320), (13, 96)])
def test_a_row_has_the_same_bits_in_any_company_and_schedule(outputs: int, columns: int) -> None:
    linear = linear_layer(outputs, columns, mx.float32, 4, 32)
    x = random((1, 16, columns), mx.float32, 5)
    with kernels_on_cpu(Mode.FAST):
        whole = rows_matmul(x, linear)
        for rows in range(1, 17):
            for start in {0, 16 - rows}:
                part = rows_matmul(x[:, start : start + rows], linear)
                assert mx.array_equal(part, whole[:, start : start + rows])
    for schedule in SCHEDULES if columns == 320 else ():
        with kernels_on_cpu(Mode.FAST, schedule):
            assert mx.array_equal(rows_matmul(x, linear), whole)


def _gated(
    x: mx.array, norm: nn.RMSNorm | None, gate: nn.Module, up: nn.Module
) -> tuple[np.ndarray, np.ndarray]:
    """swiglu of two products in float64, and the size of what its errors come from."""
    rows, size = exact(x[0]), np.abs(exact(x[0]))
    if norm is not None:
        factor = exact(norm.weight) / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.eps)
        rows, size = rows * factor, size * np.abs(factor)
    (a, wide), (b, high) = (
        (rows @ dense(part).T, size @ np.abs(dense(part)).T) for part in (gate, up)
    )
    # silu is at most its argument, with a slope of at most 1.1.
    return a / (1 + np.exp(-a)) * b, 1.1 * wide * np.abs(b) + np.abs(a) * high


@pytest.mark.parametrize(
    ("dtype", "bits"), [(mx.float32, 0), (mx.float16, 4), (mx.bfloat16, 8), (mx.bfloat16, 0)]
)
def test_gated_products_of_each_type(dtype: mx.Dtype, bits: int) -> None:
    check_gated(5, 40, 128, dtype, bits, normed=bits != 8)


# One, primes, not a multiple of any tile; a slice of Qwen3-8B's drafter.
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "normed"),
    [(1, 1, 8, True), (9, 13, 72, True), (16, 17, 1032, False), (16, 16, 4096, True)],
)
def test_gated_products_of_odd_and_real_sizes(
    rows: int, outputs: int, columns: int, normed: bool
) -> None:
    check_gated(rows, outputs, columns, mx.float32, 0, normed=normed)


def check_gated(
    rows: int,
    outputs: int,
    columns: int,
    dtype: mx.Dtype,
    bits: int,
    *,
    normed: bool,
    group: int = 64,
) -> None:
    """As `check`."""
    gate, plain = (linear_layer(outputs, columns, dtype) for _ in range(2))
    plain.weight = random((outputs, columns), dtype, 6)
    gate, up = (
        nn.QuantizedLinear.from_linear(part, group, bits) if bits else part
        for part in (gate, plain)
    )
    norm = nn.RMSNorm(columns, eps=1e-3) if normed else None
    if norm is not None:
        norm.weight = 1 + random((columns,), dtype, 7, 0.3)
    x = random((1, rows, columns), dtype, 8, 0.3)
    layers = (norm and single_layer(norm), single_layer(gate), single_layer(up))
    twin = gated_matmul(single(x), *layers)
    with kernels_on_cpu() as made:
        found = gated_matmul(x, norm, gate, up)
    assert launches(made) == {"rows_matmul": 1}
    want, size = _gated(x, norm, gate, up)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


def test_a_gated_row_has_the_same_bits_in_any_company() -> None:
    gate, up = linear_layer(16, 200, mx.float32), linear_layer(16, 200, mx.float32)
    norm, x = nn.RMSNorm(200), random((1, 16, 200), mx.float32, 9)
    with kernels_on_cpu(Mode.FAST):
        whole = gated_matmul(x, norm, gate, up)
        for first, last in ((0, 1), (3, 8), (5, 16), (15, 16)):
            part = gated_matmul(x[:, first:last], norm, gate, up)
            assert mx.array_equal(part, whole[:, first:last])


def test_gates_with_a_bias_or_of_two_kinds_go_to_the_twin() -> None:
    biased, plain = linear_layer(16, 64, mx.float32, bias=True), linear_layer(16, 64, mx.float32)
    x = random((1, 2, 64), mx.float32, 9)
    with kernels_on_cpu() as made:
        gated_matmul(x, None, biased, plain)
        gated_matmul(x, None, plain, nn.QuantizedLinear.from_linear(plain, 32, 4))
    assert made == []


@pytest.mark.parametrize(
    "linear",
    [
        nn.Linear(20, 8),
        nn.QuantizedLinear.from_linear(nn.Linear(64, 8), 32, 6),
        nn.QuantizedLinear.from_linear(nn.Linear(64, 8), 32, 4, mode="mxfp4"),
    ],
)
def test_layers_the_kernel_cannot_read_go_to_the_twin(linear: nn.Module) -> None:
    columns = 20 if isinstance(linear, nn.QuantizedLinear) is False else 64
    x = random((1, 3, columns), mx.float32, 7)
    with kernels_on_cpu() as made:
        assert mx.array_equal(rows_matmul(x, linear), linear(x))
    assert made == []


def test_many_rows_go_to_the_twin() -> None:
    linear = linear_layer(8, 64, mx.float32)
    with kernels_on_cpu() as made:
        rows_matmul(random((1, matmul.MAX_ROWS + 1, 64), mx.float32, 8), linear)
    assert made == []


def test_layers_with_a_few_scales_go_to_the_twin() -> None:
    """MLX would hand such an array over in constant memory."""
    x = random((1, 3, 64), mx.float32, 8)
    for outputs, launched in ((7, False), (8, True)):
        with kernels_on_cpu() as made:
            rows_matmul(x, linear_layer(outputs, 64, mx.float32, 4, 64))
        assert bool(made) == launched


def test_each_size_of_weights_is_checked_at_its_first_use() -> None:
    x = random((1, 3, 64), mx.float32, 8)
    with kernels_on_cpu(Mode.FAST, trusted=False):
        for outputs in (8, 24, 8):
            rows_matmul(x, linear_layer(outputs, 64, mx.float32))
        assert len(backend._trusted) == 2
