"""kernels.rows_matmul: the kernel, run on the CPU harness, against float64 and against its twin."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from metal_cpu import SCHEDULES, Mode
from metal_kernels import assert_near, exact, kernels_on_cpu, launches, random

from dflash_mlx.kernels import matmul, rows_matmul

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


def _check(linear: nn.Module, rows: int, dtype: mx.Dtype, out: mx.Dtype | None = None) -> None:
    weights = dense(linear)
    x = random((1, rows, weights.shape[1]), dtype, 3)
    with kernels_on_cpu() as made:
        found = rows_matmul(x, linear, out)
    assert launches(made) == {"rows_matmul": 1}
    assert found.dtype == (out or dtype)
    bias = exact(linear.bias) if "bias" in linear else np.zeros(len(weights))
    want = exact(x[0]) @ weights.T + bias
    assert_near(found[0], want, np.abs(exact(x[0])) @ np.abs(weights).T + np.abs(bias))


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_each_type_and_width(dtype: mx.Dtype, bits: int) -> None:
    _check(linear_layer(40, 192, dtype, bits, bias=bits != 8), 11, dtype, mx.float32)


@pytest.mark.parametrize("group", [32, 128])
def test_each_group_size(group: int) -> None:
    _check(linear_layer(16, 256, mx.bfloat16, 4, group), 3, mx.bfloat16)


# Primes, one, not a multiple of any tile; K of a multiple of 8 only.
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 1, 8), (5, 13, 72), (16, 17, 1032)])
def test_odd_sizes(rows: int, outputs: int, columns: int) -> None:
    _check(linear_layer(outputs, columns, mx.float32), rows, mx.float32)


# fc of Qwen3-8B's drafter (K = 5 · 4096) and of gpt-oss-20b's (K = 5 · 2880), few outputs.
@pytest.mark.parametrize(("columns", "bits"), [(20480, 4), (14400, 0)])
def test_the_long_sums_of_real_drafters(columns: int, bits: int) -> None:
    _check(linear_layer(16, columns, mx.bfloat16, bits), 16, mx.bfloat16, mx.float32)


def test_a_row_has_the_same_bits_in_any_company_and_schedule() -> None:
    linear = linear_layer(24, 320, mx.bfloat16, 4)
    x = random((1, 16, 320), mx.bfloat16, 5)
    with kernels_on_cpu(Mode.FAST):
        whole = rows_matmul(x, linear, mx.float32)
        for rows in range(1, 17):
            for start in {0, 16 - rows}:
                part = rows_matmul(x[:, start : start + rows], linear, mx.float32)
                assert mx.array_equal(part, whole[:, start : start + rows])
    for schedule in SCHEDULES:
        with kernels_on_cpu(Mode.FAST, schedule):
            assert mx.array_equal(rows_matmul(x, linear, mx.float32), whole)


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
