"""kernel_cost and bench_kernels: the stated launches are the real ones, the counts are by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu

from dflash_mlx.kernels import Sight, backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_kernels
import kernel_cases
import kernel_cost

SMALL = [
    ("rows_matmul", lambda: kernel_cases.matmul_case("a", 5, 40, 128, 4)),
    ("context_projection", lambda: kernel_cases.projection_case("b", 9, 64, 2, 1, 128, 0)),
    ("block_attention", lambda: kernel_cases.attention_case("c", 4, 2, 64, 16, 300, Sight(True))),
    ("block_attention", lambda: kernel_cases.attention_case("d", 2, 2, 64, 3, 90, Sight(False))),
    ("gated_delta_advance", lambda: kernel_cases.recurrence_case("e", 1, 2, 32, 3)),
]


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's 16-bit sums on the CPU are too coarse to compare with."""
    monkeypatch.setattr(kernel_cases, "DTYPE", mx.float32)


@pytest.mark.metal_cpu
@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(("operation", "made"), SMALL)
def test_a_case_states_its_launches_and_agrees_with_its_twin(operation: str, made) -> None:
    case = made()
    assert case.operation == operation
    with kernels_on_cpu(Mode.FAST, trusted=False) as kernels:
        row = bench_kernels.measure(case, repetitions=1, calls=1)
        launched = [call for kernel in kernels for call in kernel._captures.values()]
    assert row["fault"] is None
    assert row["difference"] < 1e-4
    assert row["ratio"] > 0
    stated = [(one.threadgroups, one.threads) for one in case.launches]
    found = []
    for call in launched:
        sizes = zip(call.grid, call.threadgroup, strict=True)
        groups, threads = 1, 1
        for grid, size in sizes:
            groups, threads = groups * -(-grid // size), threads * size
        found.append((groups, threads))
    assert found == stated


@pytest.mark.metal_cpu
@pytest.mark.usefixtures("single")
def test_a_fault_is_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.TOLERANCE, mx.float32, -1.0)
    with kernels_on_cpu(Mode.FAST, trusted=False), pytest.warns(RuntimeWarning):
        row = bench_kernels.measure(SMALL[0][1](), repetitions=1, calls=1)
    assert row["kernel_us"] is None
    assert "differs" in row["fault"]


def test_bytes_and_flops_of_a_case_by_hand() -> None:
    case = kernel_cases.matmul_case("fc", 2, 32, 128, 4)
    assert case.bytes == 32 * 128 // 2 + 2 * 2 * (32 * 2) + 2 * 2 * (128 + 32)
    assert case.flops == 2 * 2 * 32 * 128


def test_every_case_fits_a_threadgroup() -> None:
    for case in kernel_cases.cases():
        for launch in case.launches:
            assert launch.threads <= 1024
            assert launch.threadgroup_bytes <= 32768


def test_without_metal_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main() == 2
    assert "Run this on a Mac" in capsys.readouterr().err


def test_dispatches_of_a_cycle() -> None:
    before, after = (kernel_cost.count_cycle(kernels) for kernels in (False, True))
    layers = kernel_cost.LAYERS
    # fc, K and V of all layers, and one write for each of them.
    assert after["inject"].total() == 4
    # fc, joined projection, two norms with weights apart, rope, and two writes a layer.
    assert before["inject"].total() == 6 + 2 * layers
    assert before["draft"]["attention"] == after["draft"]["block_attention"] * 2 == 2 * layers
    assert after["draft"]["attention_combine"] == layers
    # A draft layer without kernels: 4 norms, 7 matrices, 2 ropes, 2 writes, attention, swiglu,
    # 2 additions.
    assert before["draft"].total() // layers >= 4 + 7 + 2 + 2 + 2 + 1 + 2
    assert after["draft"].total() == before["draft"].total() - 2 * layers
