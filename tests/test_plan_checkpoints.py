"""Planned bytes of checkpoints on disk against bytes really held, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import packagings
import pytest
from checkpoints import write_folder
from mlx.utils import tree_flatten
from tiny import tiny_config
from tiny_drafter import VOCAB, BorrowedTarget, drafter_config, write_drafter

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.plan import find_model, mac_memory, part_bytes

MAC = mac_memory(64)
WIDE_DRAFTER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def held(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def converted(folder: Path, bits: int | None = None) -> Path:
    """A target's folder that records a drafter, which is still to be put there."""
    record = {"drafter": {"folder": "drafter", "bits": bits}}
    return write_folder(folder, tiny_config("llama", vocab_size=VOCAB, conversion=record))


def write_official(folder: Path) -> None:
    write_drafter(folder, drafter_config("mixed"))


def write_speculators(folder: Path) -> None:
    weights = packagings.official_weights() | packagings.own_tables()
    packagings.save(folder, packagings.speculators_config(), weights)


def write_meta(folder: Path) -> None:
    packagings.save(folder, packagings.meta_config(), packagings.meta_weights())


@pytest.mark.parametrize("write", [write_official, write_speculators, write_meta])
def test_a_bundled_drafter_of_every_packaging_is_counted(tmp_path: Path, write: Any) -> None:
    folder = converted(tmp_path / "m")
    write(folder / "drafter")
    drafter = open_drafter(folder / "drafter", BorrowedTarget(), dtype=mx.bfloat16)
    model = find_model(str(folder))
    assert model.draft is not None
    assert (model.taps, model.block) == (len(drafter.taps), drafter.block_size)
    windows = [layer.window for layer in model.draft.layers]
    assert sorted(windows, key=str) == sorted(drafter.config.windows, key=str)
    assert part_bytes(model, MAC, 100, None)["drafter"] == held(drafter.model)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("variant", ["full", "second"])
def test_recorded_bits_of_a_bundled_drafter_count(tmp_path: Path, bits: int, variant: str) -> None:
    folder = converted(tmp_path / "m", bits)
    config = drafter_config(variant, **WIDE_DRAFTER)
    write_drafter(folder / "drafter", config)
    target = BorrowedTarget(hidden=64)
    drafter = open_drafter(folder / "drafter", target, dtype=mx.bfloat16, bits=bits)
    planned = part_bytes(find_model(str(folder)), MAC, 100, None)["drafter"]
    assert planned == pytest.approx(held(drafter.model), rel=0.001)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config("llama"), "given as drafter is a target model"),
        ({**packagings.speculators_config(), "aux_hidden_state_layer_ids": None}, "has no aux_"),
    ],
)
def test_a_bundled_drafter_that_is_none(tmp_path: Path, config: Any, message: str) -> None:
    folder = converted(tmp_path / "m")
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        find_model(str(folder))
