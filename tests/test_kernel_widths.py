"""kernels.rows_matmul and gated_matmul on the widths of real models, against float64 and the twin.

Reduced in the outputs where the sum's length is what counts, and in the columns where many outputs
are: threadgroups and indices of a whole layer. 12288 is the MLP of Qwen3-8B and Qwen3.5-9B.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from test_kernel_matmul import check, check_gated, linear_layer

pytestmark = pytest.mark.metal_cpu


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "rows", "outputs", "columns"),
    [
        (mx.bfloat16, 4, 64, 16, 16, 12288),
        (mx.bfloat16, 8, 64, 3, 16, 12288),
        (mx.float16, 0, 64, 9, 16, 12288),
        # SmolLM2-135M: its projections, its down_proj, its table as output head.
        (mx.float32, 4, 32, 6, 24, 576),
        (mx.float32, 4, 32, 6, 24, 1536),
        (mx.float16, 0, 64, 6, 24, 1536),
        (mx.bfloat16, 8, 32, 1, 48, 576),
    ],
)
def test_long_sums(
    dtype: mx.Dtype, bits: int, group: int, rows: int, outputs: int, columns: int
) -> None:
    check(linear_layer(outputs, columns, dtype, bits, group), rows, dtype, residual=rows == 6)


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "rows", "outputs", "columns"),
    [
        (mx.bfloat16, 4, 64, 2, 12288, 64),
        (mx.float32, 8, 32, 1, 49152, 32),
    ],
)
def test_many_outputs(
    dtype: mx.Dtype, bits: int, group: int, rows: int, outputs: int, columns: int
) -> None:
    check(linear_layer(outputs, columns, dtype, bits, group), rows, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_each_group_size_of_each_width(dtype: mx.Dtype, group: int, bits: int) -> None:
    check(linear_layer(16, 384, dtype, bits, group), 3, dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_wide_groups_in_bfloat16(bits: int) -> None:
    check(linear_layer(24, 640, mx.bfloat16, bits, 128), 11, mx.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "rows", "outputs", "columns"),
    [
        (mx.bfloat16, 4, 64, 16, 8, 4096),
        (mx.bfloat16, 4, 64, 16, 8, 12288),
        (mx.bfloat16, 4, 64, 1, 12288, 64),
        # SmolLM2-135M's drafter, then with its sizes in 4 and 8 bits.
        (mx.float32, 0, 64, 6, 24, 576),
        (mx.float16, 4, 32, 6, 24, 576),
        (mx.float16, 8, 128, 6, 1536, 256),
    ],
)
def test_gated_products(
    dtype: mx.Dtype, bits: int, group: int, rows: int, outputs: int, columns: int
) -> None:
    check_gated(rows, outputs, columns, dtype, bits, normed=True, group=group)
