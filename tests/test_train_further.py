"""Training a drafter further, whatever its packaging: what comes out is the official format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import packagings
import pytest
import tiny_drafter as tiny
from tiny_training import own_texts, read_json, write_answers, write_target

import dflash_mlx
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.config import parse_config
from dflash_mlx.draft.packagings import official_config
from dflash_mlx.errors import UsageError
from dflash_mlx.loader import load_target
from dflash_mlx.train.checkpoint import load_state, save_state
from dflash_mlx.train.corpus import read_answers, split
from dflash_mlx.train.curve import save_curve
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.replay import Replay
from dflash_mlx.train.run import Voice, train
from dflash_mlx.train.shape import WINDOW_KEYS, Shape, with_length, with_windows
from dflash_mlx.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_picture")

RECIPE = Recipe(steps=1, step_blocks=8, pass_blocks=8, held_out=1, measure_every=2, negatives=8)
FITTING = {"vocab_size": 288, "draft_vocab_size": None, "num_target_layers": None}


def top_level() -> dict[str, Any]:
    """All of the drafter's keys at the top level."""
    config = tiny.drafter_config()
    return {**config, **config.pop("dflash_config")}


def speculators() -> dict[str, Any]:
    config = packagings.speculators_config(draft_vocab_size=288)
    config["transformer_layer_config"]["vocab_size"] = 288
    return config


def block_size_outside() -> dict[str, Any]:
    config = tiny.drafter_config()
    return {**config, "block_size": config["dflash_config"].pop("block_size")}


KINDS = {
    "nested": tiny.drafter_config,
    "block size at the top": block_size_outside,
    "top level": top_level,
    "modelopt": lambda: {**tiny.drafter_config(), "use_swa": True, "swa_window_size": 6},
    "speculators": speculators,
    "meta": packagings.meta_config,
}


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    sizes = {"hidden_size": 32, "num_hidden_layers": 7, "intermediate_size": 40}
    target = write_target(folder / "target", "llama", **sizes)
    texts = own_texts(dflash_mlx.load(str(target), draft=None), 5, 8)
    answers = write_answers(folder / "answers.jsonl", texts)
    return Order(str(target), folder / "out", RECIPE, answers=[answers])


def released(folder: Path, kind: str) -> Path:
    """A drafter for that target as `kind` packs it."""
    config = {**KINDS[kind](), **({} if kind == "speculators" else FITTING)}
    if kind == "meta":
        del config["vocab_size"]
    config = {key: value for key, value in config.items() if value is not None}
    weights = packagings.meta_weights if kind == "meta" else packagings.official_weights
    return packagings.save(folder, config, weights())


def drafts(folder: Path, target: Any) -> np.ndarray:
    drafter = open_drafter(folder, target, dtype=mx.float32)
    features = mx.random.normal((1, 9, drafter.config.feature_size), key=mx.random.key(0))
    cache = drafter.make_cache()
    drafter.observe(features, cache)
    return np.array(drafter.draft_logits(mx.array([7]), 4, cache))


@pytest.mark.parametrize("kind", KINDS)
def test_every_packaging_is_trained_to_the_end_and_becomes_the_official_one(kind, order, tmp_path):
    init = released(tmp_path / "released", kind)
    asked = replace(order, init=str(init), out=tmp_path / "out")
    result = train(asked)
    assert result["steps"] == 1
    card = (asked.out / "README.md").read_text()
    assert f"{3} layers for blocks of {tiny.BLOCK}, which reads the target's layers 1, 3, 6" in card
    stored = read_json(asked.out / "config.json")
    assert stored["model_type"] == "qwen3"
    assert stored["architectures"] == ["DFlashDraftModel"]
    assert stored["block_size"] == tiny.BLOCK
    expected = {"target_layer_ids": [1, 3, 6], "mask_token_id": 5, "block_size": tiny.BLOCK}
    assert stored["dflash_config"] == expected
    assert stored["vocab_size"] == 288
    assert stored["num_target_layers"] == 7
    foreign = ("transformer_layer_config", "speculators_model_type", "use_swa", "swa_window_size")
    assert not any(key in stored for key in foreign)
    # The same drafter: what came in drafts as what goes out with the same weights.
    target = load_target(Path(order.target))
    same = packagings.save(tmp_path / "same", stored, packagings.official_weights())
    assert np.allclose(drafts(init, target), drafts(same, target), atol=1e-5)
    known = parse_config(read_json(init / "config.json"))
    ours = parse_config(stored)
    assert (ours.windows, ours.causal) == (known.windows, known.causal)


def test_training_that_makes_a_drafter_worse_leaves_it_as_it_was(order, tmp_path, monkeypatch):
    """The drafter begun with is measured first, and is the best one until a later one is better."""
    taus = iter([3, 2, 1])
    monkeypatch.setattr(Trainer, "_replayed", lambda self: {"s": Replay([1], next(taus))})
    init = released(tmp_path / "released", "nested")
    recipe = replace(order.recipe, steps=2, measure_every=1, learning_rate=0.1)
    asked = replace(order, init=str(init), out=tmp_path / "out", recipe=recipe)
    said: list[str] = []
    result = train(asked, Voice(said.append))
    assert (result["best_step"], result["tau"], result["tau_of_start"]) == (0, 3, 3)
    assert "Training made the drafter begun with worse, which is kept as it was." in said
    kept, begun = (mx.load(str(f / "model.safetensors")) for f in (asked.out, init))
    assert kept.keys() == begun.keys()
    assert all(mx.array_equal(kept[name], begun[name].astype(mx.bfloat16)) for name in kept)
    curve = read_json(asked.out / "curve.json")
    assert [(entry["step"], entry["tau"]) for entry in curve] == [(0, 3), (1, 2), (2, 1)]
    assert [entry["loss"] is None for entry in curve] == [True, False, False]
    card = (asked.out / "README.md").read_text()
    assert "at step 0; 3.00 before training" in card
    save_curve(tmp_path, curve)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    save_curve(tmp_path, curve[:1])


def test_training_that_cannot_be_told_from_the_start_is_kept(order, tmp_path, monkeypatch):
    """Held-out text may be too little, or the drafter too weak, to tell them apart."""
    monkeypatch.setattr(Trainer, "_replayed", lambda self: {"s": Replay([0], 1)})
    init = released(tmp_path / "released", "nested")
    asked = replace(order, init=str(init), out=tmp_path / "out")
    said: list[str] = []
    assert train(asked, Voice(said.append))["best_step"] == 1
    kept, begun = (mx.load(str(f / "model.safetensors")) for f in (asked.out, init))
    assert not all(mx.array_equal(kept[name], begun[name].astype(mx.bfloat16)) for name in kept)
    assert "No draft was right on held-out text: give more texts, or more steps." in said


def test_held_out_answers_without_a_cycle_measure_nothing(order, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_replayed", lambda self: {"s": Replay()})
    init = released(tmp_path / "released", "nested")
    result = train(replace(order, init=str(init), out=tmp_path / "out"))
    assert (result["best_step"], result["tau_of_start"]) == (1, None)


def test_a_run_stopped_behind_the_first_measurement_goes_on(order, tmp_path, monkeypatch):
    init = released(tmp_path / "released", "nested")
    asked = replace(order, init=str(init), out=tmp_path / "out")

    def stopping(self, *given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_gradients", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(asked)
    whole = train(replace(asked, out=tmp_path / "whole"))
    resumed = train(asked)
    assert resumed | {"drafter": "", "seconds": 0} == whole | {"drafter": "", "seconds": 0}
    assert [entry["step"] for entry in read_json(asked.out / "curve.json")] == [0, 1]
    ours, theirs = (mx.load(str(f / "model.safetensors")) for f in (asked.out, tmp_path / "whole"))
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["top level", "speculators", "meta"])
def test_any_packaging_may_grow(kind, order, tmp_path):
    init = released(tmp_path / "released", kind)
    shape = replace(order.shape, layers=4, selector_rank=8)
    asked = replace(order, init=str(init), shape=shape, out=tmp_path / "out", block_size=6)
    train(asked)
    config = parse_config(read_json(asked.out / "config.json"))
    assert config.num_hidden_layers == 4
    assert config.parts is not None
    assert config.block_size == 6


def test_a_state_that_names_the_drafters_own_packaging_goes_on(order, tmp_path):
    init = released(tmp_path / "released", "top level")
    asked = replace(order, init=str(init), out=tmp_path / "out")
    result = train(asked)
    parameters, optimizer, progress, run = load_state(asked.out)
    run["config"] = read_json(init / "config.json")
    save_state(asked.out, parameters, optimizer, progress, run)
    assert train(asked)["tau"] == result["tau"]


def test_what_is_official_stays_as_it_is():
    stored = json.loads(
        (Path(__file__).parent / "goldens" / "train" / "windows.config.json").read_text()
    )
    assert official_config(stored, stored["vocab_size"], stored["num_target_layers"]) == stored


@pytest.mark.parametrize(
    ("kind", "windows", "seen"),
    [
        ("top level", 6, (6, 6, 6)),
        ("top level", (None, 6, None), (None, 6, None)),
        ("meta", (None,), (None, None, None)),
    ],
)
def test_a_drafter_may_see_another_window(kind, windows, seen, order, tmp_path):
    """Everything else stays: weights, and whether a block's rows see later ones."""
    init = released(tmp_path / "released", kind)
    known = official_config(read_json(init / "config.json"), 288, 7)
    before = parse_config(known)
    shape = replace(order.shape, windows=windows)
    asked = replace(order, init=str(init), shape=shape, out=tmp_path / "out")
    asked = replace(asked, recipe=replace(asked.recipe, steps=1))
    train(asked)
    stored = read_json(asked.out / "config.json")
    after = parse_config(stored)
    assert after.windows == seen
    assert after.causal == before.causal
    assert ("sliding_window" in stored) == any(seen)
    other = {*WINDOW_KEYS, "is_causal"}
    assert {k: v for k, v in stored.items() if k not in other} == {
        k: v for k, v in known.items() if k not in other
    }


@pytest.mark.parametrize("known", [6, 300])
def test_a_drafter_for_longer_texts_says_so(known, order, tmp_path):
    config = {**KINDS["nested"](), **FITTING, "max_position_embeddings": known}
    config = {key: value for key, value in config.items() if value is not None}
    init = packagings.save(tmp_path / "init", config, packagings.official_weights())
    train(replace(order, init=str(init), out=tmp_path / "out"))
    trained, _ = split(read_answers(order.answers, 288), RECIPE.held_out)
    longest = max(text.length for text in trained)
    assert 6 < longest < 300
    config = read_json(tmp_path / "out" / "config.json")
    assert config["max_position_embeddings"] == max(known, longest)


SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_stay_when_a_drafter_gets_longer(kind, key):
    """Scalings that do not say what they stretch fall back to max_position_embeddings."""
    scaling = {**SCALINGS[kind], "rope_theta": 10000.0}
    stored = {**tiny.drafter_config(), "max_position_embeddings": 64, key: scaling}
    before = parse_config(stored)
    naive = parse_config({**stored, "max_position_embeddings": 4096})
    assert not mx.array_equal(before.rope.periods, naive.rope.periods)
    made = with_length(stored, 4096)
    assert made["max_position_embeddings"] == 4096
    assert mx.array_equal(before.rope.periods, parse_config(made).rope.periods)
    assert made[key] == {**scaling, "original_max_position_embeddings": 64}
    told = {**stored, key: {**scaling, "original_max_position_embeddings": 32}}
    assert with_length(told, 4096)[key] == told[key]
    assert with_length(stored, 64) == stored


def test_windows_that_would_change_the_order_in_a_block_are_refused():
    """Where nothing is stated, layers that slide are causal: others cannot become so."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    mixed = {**tiny.drafter_config(), "layer_types": kinds, "sliding_window": 6}
    mixed.pop("is_causal", None)
    assert parse_config(mixed).causal == (True, False, False)
    wider = parse_config(with_windows(mixed, Shape(windows=(9, None, None))))
    assert (wider.windows, wider.causal) == ((9, None, None), (True, False, False))
    with pytest.raises(UsageError, match="another order"):
        with_windows(mixed, Shape(windows=9))
