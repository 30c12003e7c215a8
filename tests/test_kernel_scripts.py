"""kernel_cost and bench_kernels: the stated launches are the real ones, the counts are by hand."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

import mlx.core as mx
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu

from dflash_mlx.kernels import Sight, backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_kernels
import kernel_cases
import kernel_dispatches

SMALL = [
    ("rows_matmul", lambda: kernel_cases.matmul_case("a", 5, 40, 128, 4)),
    ("rows_matmul", lambda: kernel_cases.gated_case("a", 5, 40, 128, 0)),
    ("fuse_taps", lambda: kernel_cases.taps_case("b", 9, 40, 64, 2, 0)),
    ("head_projection", lambda: kernel_cases.context_case("b", 9, 64, 2, 1, 128, 0)),
    ("head_projection", lambda: kernel_cases.block_case("b", 9, 64, 2, 1, 32, 0)),
    ("block_attention", lambda: kernel_cases.attention_case("c", 4, 2, 64, 16, 300, Sight(True))),
    ("block_attention", lambda: kernel_cases.attention_case("d", 2, 2, 64, 3, 90, Sight(False))),
    ("block_convolution", lambda: kernel_cases.convolution_case("e", 3, 40, 2)),
    ("gated_delta_advance", lambda: kernel_cases.advance_case("e", 1, 2, 32, 3)),
    ("gated_delta_replay", lambda: kernel_cases.replay_case("f", 1, 2, 32, 3)),
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
        own = [
            k for k in kernels if case.operation in k._made["name"] or "combine" in k._made["name"]
        ]
        launched = [call for kernel in own for call in kernel._captures.values()]
    assert row["fault"] is None
    assert row["difference"] < 1e-4
    assert row["ratio"] > 0
    stated = [(prod(one.groups), prod(one.threads)) for one in case.launches]
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
    # Codes, scales and biases, then two rows of input, residual and output.
    assert case.bytes == 32 * 128 // 2 + 2 * 2 * (32 * 2) + 2 * 2 * (128 + 32 + 32)
    assert case.flops == 2 * 2 * 32 * 128


def test_every_case_fits_a_threadgroup() -> None:
    cases = kernel_cases.cases()
    assert not [case for case in cases for launch in case.launches if launch.fault]
    operations = {case.operation for case in cases}
    assert operations == {operation for operation, _ in SMALL}


def test_without_metal_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main() == 2
    assert "Run this on a Mac" in capsys.readouterr().err


def test_dispatches_of_a_cycle() -> None:
    layers = 2
    before, after = (kernel_dispatches.count_cycle(kernels, layers) for kernels in (False, True))
    # fc, K and V of all layers, and one write.
    assert after["inject"] == {"fuse_taps": 1, "head_projection": 1, "__setitem__": 1}
    # Two taps joined, three products, two norms with weights apart, rope, keys and values joined,
    # and two writes a layer.
    products = 3 * kernel_dispatches.PRODUCT
    assert before["inject"].total() == 2 + products + 2 + 2 + 1 + 2 + 2 * layers
    assert before["draft"]["scaled_dot_product_attention"] == layers
    assert after["draft"]["block_attention"] == after["draft"]["attention_combine"] == layers
    # Two joined ids and a look-up, the cast of logits, final norm and head, the choice, and whether
    # a logit was NaN.
    rest = 2 + 1 + 1 + 1 + kernel_dispatches.PRODUCT + 1 + 3
    assert after["draft"].total() == 6 * layers + rest


def test_dispatches_of_a_draft_layer() -> None:
    # Four norms, seven products in two parts, two ropes, two writes, attention, swiglu, two sums.
    assert kernel_dispatches.per_layer(False) == 4 + 7 * 2 + 2 + 2 + 1 + 1 + 2
    # Heads, two of attention, its output, and two of the MLP.
    assert kernel_dispatches.per_layer(True) == 6 <= 12
    # DFlash 2 has a projection and two convolutions around each of the two sublayers.
    assert kernel_dispatches.per_layer(True, second=True) == 6 + 2 * (1 + 2) <= 12


def test_an_operation_without_a_count_is_an_error() -> None:
    for unknown in (
        lambda x: mx.erf(x),
        lambda x: x**2,
        lambda x: x.cumsum(),
        lambda x: mx.fast.layer_norm(x, x, x, 1),
    ):
        with (
            kernel_dispatches.recorder(),
            pytest.raises(kernel_dispatches.UncountedError, match="no dispatches"),
        ):
            unknown(mx.zeros((3,)))
    with kernel_dispatches.recorder() as counted:
        mx.softmax(mx.ones((3,)))
    assert counted == {"ones": 1, "softmax": 1}
