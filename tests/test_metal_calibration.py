"""The Metal harness on kernels of others: MLX's documentation, mlx-lm's gated delta and KL loss."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import SCHEDULES, CpuKernel, Fault, Mode, metal_on_cpu

pytestmark = pytest.mark.metal_cpu


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that ask for a GPU before they make a kernel find one."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


# Places of the elements, and the relative rounding of each type.
EXP = {
    "rows one behind another": "elem",
    "strided": "elem_to_loc(elem, inp_shape, inp_strides, inp_ndim)",
}
ROUNDING = {mx.float32: 1e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", EXP)
def test_exp_of_each_element(kind: str, dtype: mx.Dtype) -> None:
    kernel = CpuKernel(
        name="exponential",
        input_names=["inp"],
        output_names=["out"],
        source=f"""
            const uint elem = thread_position_in_grid.x;
            out[elem] = metal::exp(inp[{EXP[kind]}]);
        """,
        ensure_row_contiguous=kind != "strided",
    )
    x = mx.random.normal((2, 4, 34), key=mx.random.key(1)).astype(dtype)[:, ::2, 1:30]
    out = kernel(
        inputs=[x.transpose(2, 0, 1)],
        grid=(x.size, 1, 1),
        threadgroup=(17, 1, 1),
        output_shapes=[(29, 2, 2)],
        output_dtypes=[dtype],
    )[0]
    want = np.exp(np.array(x.astype(mx.float32)).astype(np.float64)).transpose(2, 0, 1)
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), want, rtol=ROUNDING[dtype])


@pytest.mark.usefixtures("pretended_gpu")
def test_gated_delta_of_mlx_lm_is_right_and_clean() -> None:
    from mlx_lm.models import gated_delta

    rng = np.random.default_rng(0)
    shapes = [(1, 3, 1, 64), (1, 3, 1, 64), (1, 3, 2, 8)]
    q, k, v = (mx.array(rng.standard_normal(s, dtype=np.float32)) for s in shapes)
    k = k / 8
    g, beta = (mx.array(rng.random((1, 3, 2), dtype=np.float32)) for _ in range(2))
    state = mx.array(rng.standard_normal((1, 2, 8, 64), dtype=np.float32))
    with metal_on_cpu() as made:
        kernel = gated_delta._make_gated_delta_kernel()
        assert made == [kernel]
    out, end = kernel(
        inputs=[q, k, v, g, beta, state, 3],
        template=[
            *[("InT", mx.float32), ("StT", mx.float32)],
            *[("Dk", 64), ("Dv", 8), ("Hk", 1), ("Hv", 2)],
        ],
        grid=(32, 8, 2),
        threadgroup=(32, 4, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[mx.float32] * 2,
    )
    want, want_end = mx.fast.gated_delta_update(q, k, v, g, beta, initial_state=state)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(end, want_end, atol=2e-5)


@pytest.fixture
def losses(pretended_gpu: None) -> Iterator[CpuKernel]:
    """The forward kernel of mlx-lm's KL loss."""
    from mlx_lm.tuner import losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "can_run_metal", lambda: True)
        with metal_on_cpu() as made:
            losses._make_kl_forward_kernel()
        yield made[0]


def _kl(kernel: CpuKernel, q: mx.array, p: mx.array) -> float:
    out = kernel(
        inputs=[q, p],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        template=[("T", mx.float32), ("V", q.shape[-1])],
        grid=(1024, 1, 1),
        threadgroup=(1024, 1, 1),
    )[0]
    return out.item()


def test_the_race_in_mlx_lm_kl_loss_is_found_and_changes_its_value(losses: CpuKernel) -> None:
    rng = np.random.default_rng(0)
    q, p = (mx.array(rng.standard_normal((1, 700), dtype=np.float32)) for _ in range(2))
    want = (mx.softmax(p) * (p - mx.logsumexp(p) - q + mx.logsumexp(q))).sum().item()
    with pytest.raises(Fault, match="race: shared"):
        _kl(losses, q, p)
    losses.mode = Mode.FAST
    values = []
    for losses.schedule in SCHEDULES:
        values.append(_kl(losses, q, p))
    assert max(abs(value - want) for value in values) > 1e-3
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    source = losses._made["source"]
    fixed = source.replace("mem_none", "mem_threadgroup")
    fixed = fixed.replace("if (simd_lane_id == 0) {", barrier + " if (simd_lane_id == 0) {")
    mended = CpuKernel(**{**losses._made, "source": fixed})
    assert fixed != source
    assert _kl(mended, q, p) == pytest.approx(want, rel=1e-5)
