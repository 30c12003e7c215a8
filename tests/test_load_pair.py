"""What `load` says about a pair: a drafter unlike the registry's facts, a fine-tune's stock one."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_folder
from tiny import tiny_config
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx import load, registry
from dflash_mlx.registry import Pair, Registry

NESTED = {"target_layer_ids": [0, 2], "mask_token_id": 5, "block_size": 4}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = tiny_config("llama", vocab_size=VOCAB, hidden_size=32)
    return write_tokenizer(write_folder(tmp_path / "Tiny-ft", config))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    config = drafter_config(vocab_size=VOCAB, num_target_layers=4, dflash_config=NESTED)
    return write_drafter(tmp_path / "drafter", config)


def use_pair(monkeypatch: pytest.MonkeyPatch, target: object, drafter: object, **facts) -> None:
    pair = Pair("Tiny", (), str(target), str(drafter), "llama", "reference", "", **facts)
    monkeypatch.setattr(registry, "load_registry", lambda: Registry((pair,)))


def test_a_drafter_as_expected_is_used_silently(target, drafter, monkeypatch) -> None:
    use_pair(monkeypatch, target, drafter, taps=(0, 2), block_size=4)
    engine = load("Tiny")
    assert (engine.warnings, engine.block_size, engine.model) == ([], 4, "Tiny")


def test_another_drafter_than_expected_is_used_and_told(target, drafter, monkeypatch) -> None:
    use_pair(monkeypatch, target, drafter, taps=(0, 1), block_size=8)
    engine = load("Tiny")
    assert engine.drafter is not None
    assert engine.drafter.taps == (0, 2)
    assert engine.block_size == 4
    taps, block = engine.warnings
    assert "target_layer_ids (0, 2), models.toml expects (0, 1) for Tiny" in taps
    assert "block_size 4, models.toml expects 8" in block


def test_a_fine_tune_decodes_plainly_and_is_offered_the_drafter(
    target, drafter, monkeypatch
) -> None:
    use_pair(monkeypatch, "org/Tiny", "org/Tiny-DFlash")
    engine = load(str(target))
    assert engine.drafter is None
    offer = "org/Tiny-DFlash was trained for Tiny, try --draft org/Tiny-DFlash"
    assert engine.reason == f"no drafter is known for {target}; {offer}"
    assert engine.warnings == [f"Decoding plainly: {engine.reason}."]
    assert load(str(target), draft=str(drafter)).warnings == []


def test_the_card_of_a_fine_tune_names_its_base(target, monkeypatch) -> None:
    use_pair(monkeypatch, "org/Tiny", "org/Tiny-DFlash")
    other = target.rename(target.parent / "thing")
    assert load(str(other)).warnings == []
    (other / "README.md").write_text("---\nbase_model: org/Tiny\n---\n")
    assert "org/Tiny-DFlash was trained for Tiny" in load(str(other)).warnings[0]
