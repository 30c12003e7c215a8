"""bench_kernels and its cases: the stated launches are the real ones, bytes are by hand."""

from __future__ import annotations

import re
import sys
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu

from dflash_mlx.kernels import Sight, backend
from dflash_mlx.models import build_target
from dflash_mlx.registry import resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_kernels
import kernel_cases

SMALL = [
    ("rows_matmul", lambda: kernel_cases.matmul_case("a", 5, 40, 128, 4, residual=True)),
    ("rows_matmul", lambda: kernel_cases.matmul_case("a", 1, 40, 128, 8)),
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
    case = kernel_cases.matmul_case("fc", 2, 32, 128, 4, residual=True)
    # Codes, scales and biases, then two rows of input, residual and output.
    assert case.bytes == 32 * 128 // 2 + 2 * 2 * (32 * 2) + 2 * 2 * (128 + 32 + 32)
    assert case.flops == 2 * 2 * 32 * 128
    bare = kernel_cases.matmul_case("fc", 2, 32, 128, 4)
    assert case.bytes - bare.bytes == 2 * 2 * 32


def _products(pair: str) -> set[tuple[int, int]]:
    """(outputs, columns) of every linear layer of a pair's target but its head."""
    known = resolve(pair).pair
    assert known is not None
    others = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6}
    target = build_target({**others, **known.config})
    return {
        layer.weight.shape
        for name, layer in target.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    }


def test_verification_is_measured_on_every_product_of_the_two_large_models() -> None:
    shapes = {(outputs, columns) for _, outputs, columns in kernel_cases.VERIFIED}
    assert shapes == _products("Qwen3-8B") | _products("Qwen3.5-9B")
    names = [case.shape for case in kernel_cases.verification_cases()]
    assert len(set(names)) == len(names)
    for outputs, columns in shapes:
        found = [
            re.fullmatch(rf".*, (\d+) rows, {columns} -> {outputs}, (\d+) bits", name)
            for name in names
        ]
        wanted = {(str(rows), str(bits)) for rows in (1, 2, 4, 8, 16) for bits in (4, 8)}
        assert wanted <= {match.groups() for match in found if match}
    heads = [name for name in names if "4096 -> 151936" in name]
    assert ["1 rows" in name for name in heads] == [True, False]
    assert sum("16 bits" in name for name in names) == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_drawn_as_codes_are_like_those_of_a_model(bits: int) -> None:
    made = kernel_cases._linear(64, 1024, bits)
    weights = mx.dequantize(made.weight, made.scales, made.biases, 64, bits).astype(mx.float32)
    assert mx.std(weights).item() == pytest.approx(1024**-0.5, rel=0.1)
    assert abs(mx.mean(weights).item()) < 0.05 * 1024**-0.5
    bits_set = [((made.weight >> bit) & 1).astype(mx.float32).mean().item() for bit in range(32)]
    assert bits_set == pytest.approx([0.5] * 32, abs=0.05)


def test_a_case_that_was_measured_leaves_no_array() -> None:
    before = mx.get_active_memory()
    bench_kernels.measure(kernel_cases.matmul_case("a", 1, 64, 4096, 4), repetitions=1, calls=1)
    assert mx.get_active_memory() <= before


def test_every_case_fits_a_threadgroup() -> None:
    cases = kernel_cases.cases()
    assert not [case for case in cases for launch in case.launches if launch.fault]
    operations = {case.operation for case in cases}
    assert operations == {operation for operation, _ in SMALL}


def test_without_metal_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main() == 2
    assert "Run this on a Mac" in capsys.readouterr().err
