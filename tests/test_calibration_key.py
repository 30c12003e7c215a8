"""What a stored calibration is kept by: each thing that changes the costs changes the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import tiny_target
from tiny_drafter import BLOCK, drafter_config, write_drafter

from dflash_mlx import calibration, kernels, machine
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.machine import BlasChoice
from dflash_mlx.models import exact

SHAPE = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 7}
Patch = pytest.MonkeyPatch


def make_target(seed: int = 0, **changes: int):
    return tiny_target("qwen3", seed, **SHAPE | changes)


def make_drafter(folder: Path, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: int):
    written = write_drafter(folder / "drafter", drafter_config("full", **changes), seed)
    return open_drafter(written, make_target(), dtype=dtype)


def quantized(module: nn.Module) -> None:
    """In groups of 32, where there are so many inputs."""

    def fits(_: str, part: nn.Module) -> bool:
        return isinstance(part, nn.Linear) and part.weight.shape[-1] % 32 == 0

    nn.quantize(module, 32, 4, class_predicate=fits)


def made_exact(patch: Patch, target) -> None:
    patch.setattr(exact, "blas_in_use", lambda: BlasChoice("bundled reference BLAS", ""))
    exact.make_exact(target)


AROUND: dict[str, Callable[[Patch], None]] = {
    "method": lambda patch: patch.setattr(calibration, "METHOD", "another"),
    "chip": lambda patch: patch.setattr(machine, "chip", lambda: "another"),
    "back-end": lambda patch: patch.setattr(machine, "back_end", lambda: ("another", "")),
    "BLAS": lambda patch: patch.setattr(machine, "blas_in_use", lambda: BlasChoice("another", "")),
    "threads": lambda patch: patch.setenv("OPENBLAS_NUM_THREADS", "77"),
    "versions": lambda patch: patch.setattr(machine, "versions", lambda: {"mlx": "99.0"}),
    "kernels": lambda patch: patch.setattr(kernels, "kernels_active", lambda: "another"),
}
TARGETS = {
    "dtype": lambda patch, target: target.set_dtype(mx.bfloat16),
    "quantized": lambda patch, target: quantized(target),
    "exact": made_exact,
}
DRAFTERS = {
    "dtype": {"dtype": mx.bfloat16},
    "shape": {"intermediate_size": 96},
}


@pytest.fixture
def kept(tmp_path: Path):
    """The pair of models and the name its costs are kept by."""
    target, drafter = make_target(), make_drafter(tmp_path)
    return target, drafter, calibration.calibration_file(target, drafter, BLOCK)


@pytest.mark.parametrize("what", AROUND)
def test_the_machine_and_versions_are_in_the_key(kept, what: str, monkeypatch: Patch) -> None:
    target, drafter, file = kept
    AROUND[what](monkeypatch)
    assert calibration.calibration_file(target, drafter, BLOCK) != file


@pytest.mark.parametrize("what", TARGETS)
def test_the_targets_types_and_operations_are_in_the_key(
    kept, what: str, monkeypatch: Patch
) -> None:
    _, drafter, file = kept
    target = make_target()
    TARGETS[what](monkeypatch, target)
    assert calibration.calibration_file(target, drafter, BLOCK) != file


def test_layers_and_the_block_are_in_the_key(kept) -> None:
    target, drafter, file = kept
    fewer = make_target(num_hidden_layers=6)
    assert calibration.calibration_file(fewer, drafter, BLOCK) != file
    assert calibration.calibration_file(target, drafter, BLOCK - 1) != file


@pytest.mark.parametrize("what", DRAFTERS)
def test_the_drafters_shapes_and_types_are_in_the_key(kept, what: str, tmp_path: Path) -> None:
    target, _, file = kept
    other = make_drafter(tmp_path, **DRAFTERS[what])
    assert calibration.calibration_file(target, other, BLOCK) != file


def test_a_quantized_drafter_has_costs_of_its_own(kept) -> None:
    target, drafter, file = kept
    quantized(drafter.model)
    assert calibration.calibration_file(target, drafter, BLOCK) != file


def test_other_values_of_the_same_shapes_share_the_costs(kept, tmp_path: Path) -> None:
    """A fine-tune is as fast as what it was made from."""
    *_, file = kept
    target, drafter = make_target(seed=1), make_drafter(tmp_path, seed=1)
    assert calibration.calibration_file(target, drafter, BLOCK) == file
