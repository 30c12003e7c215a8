"""The Metal harness on atomic addition: bilinear sampling, its gradients, and planted faults."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import SCHEDULES, CpuKernel, Fault, Mode

pytestmark = pytest.mark.metal_cpu

# x [B, H, W, C] at the points of grid [B, N, M, 2], of which -1 and 1 are the outer edges; zero
# outside. Around a point lie four pixels: `top` and `left` are those of the first.
_POINT = """
    const int height = x_shape[1], width = x_shape[2], channels = x_shape[3];
    const int point = int(thread_position_in_grid.x) / LANES;
    const int channel = int(thread_position_in_grid.x) % LANES;
    const int image = point / (grid_shape[1] * grid_shape[2]);
    const float column = ((grid[2 * point] + 1) * width - 1) / 2;
    const float row = ((grid[2 * point + 1] + 1) * height - 1) / 2;
    const int left = int(metal::floor(column)), top = int(metal::floor(row));
"""
_PIXELS = """
    for (int corner = 0; corner < 4; corner++) {
        const int r = top + corner / 2, c = left + corner % 2;
        const float down = 1 - metal::abs(row - r), across = 1 - metal::abs(column - c);
        const bool inside = r >= 0 && r < height && c >= 0 && c < width;
        const int place = ((image * height + r) * width + c) * channels + channel;
"""
_FORWARD = f"""{_POINT}
    float sum = 0;
    {_PIXELS}
        if (inside) sum += down * across * x[place];
    }}
    out[thread_position_in_grid.x] = T(sum);
"""
# A simdgroup takes 32 channels of one point; the last of them may have none.
_BACKWARD = f"""{_POINT}
    float by_column = 0, by_row = 0;
    if (channel < channels) {{
        const float above = float(gradient[point * channels + channel]);
        {_PIXELS}
            if (!inside) continue;
            atomic_fetch_add_explicit(&x_grad[place], down * across * above, memory_order_relaxed);
            by_column += (corner % 2 ? 1 : -1) * down * x[place] * above;
            by_row += (corner / 2 ? 1 : -1) * across * x[place] * above;
        }}
    }}
    by_column = simd_sum(by_column) * width / 2;
    by_row = simd_sum(by_row) * height / 2;
    if (thread_index_in_simdgroup == 0) {{
        atomic_fetch_add_explicit(&grid_grad[2 * point], by_column, memory_order_relaxed);
        atomic_fetch_add_explicit(&grid_grad[2 * point + 1], by_row, memory_order_relaxed);
    }}
"""


def _forward(x: mx.array, grid: mx.array, source: str = _FORWARD) -> mx.array:
    kernel = CpuKernel(
        name="sample", input_names=["x", "grid"], output_names=["out"], source=source
    )
    shape = (*grid.shape[:-1], x.shape[-1])
    return kernel(
        inputs=[x, grid],
        template=[("T", x.dtype), ("LANES", x.shape[-1])],
        output_shapes=[shape],
        output_dtypes=[x.dtype],
        grid=(int(np.prod(shape)), 1, 1),
        threadgroup=(64, 1, 1),
    )[0]


def _backward(
    x: mx.array, grid: mx.array, gradient: mx.array, source: str = _BACKWARD, **how: object
) -> list[mx.array]:
    kernel = CpuKernel(
        name="sample_gradient",
        input_names=["x", "grid", "gradient"],
        output_names=["x_grad", "grid_grad"],
        source=source,
        atomic_outputs=True,
        **how,
    )
    lanes = -(-x.shape[-1] // 32) * 32
    return kernel(
        inputs=[x, grid, gradient],
        template=[("LANES", lanes)],
        output_shapes=[x.shape, grid.shape],
        output_dtypes=[mx.float32] * 2,
        grid=(int(np.prod(grid.shape[:-1])) * lanes, 1, 1),
        threadgroup=(64, 1, 1),
        init_value=0,
    )


def _reference(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """By every pixel's tent over every point, in float64."""
    height, width = x.shape[1:3]
    row = ((grid[..., 1] + 1) * height - 1) / 2
    column = ((grid[..., 0] + 1) * width - 1) / 2
    down = np.maximum(0, 1 - np.abs(row[..., None] - np.arange(height)))
    across = np.maximum(0, 1 - np.abs(column[..., None] - np.arange(width)))
    return np.einsum("bnmh,bnmw,bhwc->bnmc", down, across, x)


def _inputs() -> tuple[np.ndarray, np.ndarray]:
    """37 channels fill no SIMD group; points inside, across the edges and far outside."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 4, 37)).astype(np.float32)
    return x, rng.uniform(-1.4, 1.4, (2, 3, 5, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)]
)
def test_sampling(dtype: mx.Dtype, rounding: float) -> None:
    x, grid = _inputs()
    given = mx.array(x).astype(dtype)
    found = _forward(given, mx.array(grid))
    want = _reference(np.array(given.astype(mx.float32)).astype(np.float64), grid)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), want, atol=rounding)


def test_pixels_outside_that_only_count_for_nothing_are_out_of_bounds() -> None:
    x, grid = map(mx.array, _inputs())
    early = _FORWARD.replace("if (inside) sum += down", "sum += float(inside) * down")
    assert early != _FORWARD
    with pytest.raises(Fault, match="out of bounds: read of x"):
        _forward(x, grid, early)


@pytest.mark.parametrize("mode", Mode)
def test_gradients_of_sampling_through_mlx(mode: Mode) -> None:
    """mx.grad of a custom function, against differences of the reference in float64."""

    @mx.custom_function
    def sample(x: mx.array, grid: mx.array) -> mx.array:
        return _forward(x, grid)

    @sample.vjp
    def gradients(primals, cotangent, _):
        return tuple(_backward(*primals, cotangent, mode=mode))

    x, grid = _inputs()
    weights = np.random.default_rng(4).standard_normal((2, 3, 5, 37)).astype(np.float32)

    def loss(*given: mx.array) -> mx.array:
        return (sample(*given) * mx.array(weights)).sum()

    found = mx.grad(loss, argnums=(0, 1))(mx.array(x), mx.array(grid))
    given = (x.astype(np.float64), grid.astype(np.float64))
    for index, got in enumerate(found):
        want = np.zeros(given[index].shape)
        for place in np.ndindex(*want.shape):
            moved = []
            for step in (1e-6, -1e-6):
                changed = [array.copy() for array in given]
                changed[index][place] += step
                moved.append((_reference(*changed) * weights).sum())
            want[place] = (moved[0] - moved[1]) / 2e-6
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_additions_are_in_no_order_but_none_is_lost() -> None:
    x, grid = map(mx.array, _inputs())
    ones = mx.ones((2, 3, 5, 37))
    sums = []
    for schedule in SCHEDULES:
        x_grad, _ = _backward(x, grid, ones, schedule=schedule)
        sums.append(np.array(x_grad))
    for found in sums:
        np.testing.assert_allclose(found, sums[0], atol=1e-5)


# Sixty-four threads of two threadgroups add to one place of y; `fault` breaks it.
_COUNT = """
    const uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    device float* plain = (device float*)y;
    switch (fault) {
        case 1: plain[0] += x[i]; break;
        case 2: atomic_fetch_add_explicit(&y[0], x[i], memory_order_relaxed); plain[0] = 1; break;
        case 3: if (i == 63) plain[0] = 2; break;
        case 5: atomic_fetch_add_explicit(&y[9], x[i], memory_order_relaxed); break;
        case 7: if (i == 0) plain[0] = 2; break;
    }
    if (fault != 1) atomic_fetch_add_explicit(&y[0], x[i], memory_order_relaxed);
    if (fault == 4) atomic_fetch_add_explicit(&y[1], plain[0], memory_order_relaxed);
    if (fault == 6 && i == 63) {
        for (int n = 0; n < 2; n++)
            atomic_fetch_add_explicit(&y[0], x[i], memory_order_relaxed);
        atomic_fetch_add_explicit(&y[1], plain[0], memory_order_relaxed);
    }
"""
COUNT_FAULTS = {
    1: "race: y",  # plain addition
    2: "race: y",  # a plain write behind
    3: "race: y",  # one plain write among them
    4: "race: y",  # a plain read
    5: "out of bounds: write of y",
    6: "race: y",  # a plain read behind the thread's own
    7: "race: y",  # one plain write before them
}


def _count(fault: int, **how: object) -> np.ndarray:
    kernel = CpuKernel(
        name="count",
        input_names=["x", "fault"],
        output_names=["y"],
        source=_COUNT,
        atomic_outputs=True,
    )
    return np.array(
        kernel(
            inputs=[mx.arange(64).astype(mx.float32), fault],
            output_shapes=[(2,)],
            output_dtypes=[mx.float32],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            **{"init_value": 0, **how},
        )[0]
    )


def test_atomic_additions_are_no_race() -> None:
    np.testing.assert_array_equal(_count(0), [63 * 64 / 2, 0])


@pytest.mark.parametrize("fault", COUNT_FAULTS)
def test_a_fault_beside_atomic_additions_is_named(fault: int) -> None:
    with pytest.raises(Fault) as caught:
        _count(fault)
    assert re.match(COUNT_FAULTS[fault], str(caught.value)), str(caught.value)


def test_what_is_added_to_needs_a_value_first() -> None:
    with pytest.raises(Fault, match="uninitialised: y"):
        _count(0, init_value=None)
