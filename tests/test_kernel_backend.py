"""kernels.backend: who decides, what a first use checks, and what a failure leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import backend, record
from dflash_mlx.kernels.source import MAX_THREADGROUP_BYTES, MAX_THREADS, Launch

ONES = [mx.ones((4,))]
SMALL = Launch((7, 1, 1), (32, 1, 1), 64)


def run(variant: int, kernel: Any, twin: Any = lambda: ONES, **how: Any) -> Any:
    return backend.run("sums", variant, kernel, twin, **{"launches": [SMALL], **how})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend.choice.cache_clear()
    monkeypatch.setattr(record, "home_dir", lambda: tmp_path)
    monkeypatch.setattr(backend, "_beyond", {})
    monkeypatch.setattr(backend, "_trusted", set())
    monkeypatch.setattr(backend, "_rejected", {})


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choice", lambda: backend.Choice(True, "a test"))
    monkeypatch.setattr(backend, "_on_gpu", lambda: True)


def test_without_metal_operations_answer_and_say_why() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    assert run(0, lambda: pytest.fail("a kernel ran")) is ONES
    assert backend.status() == "MLX's operations: MLX has no Metal device here."


@pytest.mark.parametrize(("value", "reason"), [("ops", "DFLASH_KERNELS=ops"), ("auto", "Metal")])
def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setenv(backend.VARIABLE, value)
    assert backend.choice().metal is (value == "auto")
    assert reason in backend.choice().reason


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "fast")
    with pytest.raises(UsageError, match=r"'fast'.*auto or to ops"):
        backend.choice()


@pytest.mark.usefixtures("active")
def test_a_variant_is_checked_once() -> None:
    twins: list[int] = []

    def twin() -> list[mx.array]:
        twins.append(1)
        return ONES

    for variant in (0, 0, 1, 0, 1):
        result = run(variant, lambda: [ONES[0] * (1 + 1e-5)], twin)
        assert result[0][0].item() != 1
    assert len(twins) == 2
    assert backend.status() == "Metal kernels: sums"
    assert backend.rejections() == []


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_differs_is_given_up_with_one_warning(wrong: float) -> None:
    with pytest.warns(RuntimeWarning, match="sums is not used: it differs") as caught:
        assert run(0, lambda: [ONES[0] * wrong]) is ONES
    assert len(caught) == 1
    assert run(1, lambda: pytest.fail("it ran again")) is ONES
    assert "sums not used, it differs" in backend.status()
    assert len(backend.rejections()) == 1
    assert backend.is_active("others")


@pytest.mark.usefixtures("active")
def test_a_kernel_that_does_not_run_is_given_up() -> None:
    def broken() -> list[mx.array]:
        raise ValueError("threadgroup of 2048 threads")

    with pytest.warns(RuntimeWarning, match="does not run here: threadgroup of 2048"):
        assert run(0, broken) is ONES


@pytest.mark.usefixtures("active")
def test_sixteen_bit_kernels_may_round_otherwise() -> None:
    half = [ONES[0].astype(mx.bfloat16)]
    assert run(0, lambda: [half[0] * 1.02], lambda: half)[0] is not half[0]
    assert backend.rejections() == []


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    ("launch", "fault"),
    [
        (Launch((1, 1, 1), (MAX_THREADS, 2, 1), 0), "2048 threads, and a GPU takes 1024"),
        (Launch((1, 1, 1), (32, 1, 1), MAX_THREADGROUP_BYTES + 4), "32772 bytes of memory"),
    ],
)
def test_a_launch_that_no_gpu_grants_goes_to_the_twin(launch: Launch, fault: str) -> None:
    def kernel() -> mx.array:
        pytest.fail("a kernel ran")

    for _ in range(2):
        assert run(0, kernel, launches=[SMALL, launch]) is ONES
    (said,) = backend.rejections()
    assert "sums is not used for some sizes: its threadgroups" in said
    assert fault in said
    assert backend.status().startswith("Metal kernels: none used yet; sums not used for some sizes")
    (kept,), _ = record.kept()
    assert (kept.operation, kept.variant, kept.reason) == ("sums", "0", launch.fault)
    with pytest.raises(UsageError, match=f"sums: .*{fault}"):
        run(0, kernel, launches=[SMALL, launch], exact=True)
    largest = Launch((9, 9, 9), (MAX_THREADS, 1, 1), MAX_THREADGROUP_BYTES)
    assert run(0, lambda: ONES, launches=[largest]) is ONES


@pytest.mark.usefixtures("active")
def test_what_a_kernel_records_beside_the_twins_arrays_is_kept() -> None:
    record = mx.zeros((2,))
    for _ in range(2):
        assert run(0, lambda: [ONES[0], record])[1] is record
    with pytest.warns(RuntimeWarning):
        assert run(1, lambda: [ONES[0] * 2, record]) is ONES
