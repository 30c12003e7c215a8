"""scripts/ablate: it compares every axis it promises, and a variant runs from start to τ."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import tiny_config, tiny_target

from dflash_mlx.train.blocks import block_rows
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import FeatureSpec
from dflash_mlx.train.loss import Labels
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.shape import Shape, drafter_config
from dflash_mlx.train.sources import Online
from dflash_mlx.train.start import random_start, target_start
from dflash_mlx.train.trainer import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import ablate
import ablate_table

TAPS = (0, 1, 2, 3, 4)
BLOCK = 8
RECIPE = Recipe(
    steps=2, block_size=BLOCK, step_blocks=8, pass_blocks=8, negatives=8, weights="decay"
)


def compared() -> list[ablate.Variant]:
    return ablate.variants(TAPS)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", num_hidden_layers=5)


def texts(count: int) -> list[Text]:
    ids = np.random.default_rng(0).integers(0, 96, (count, 26)).tolist()
    return [Text(f"t/{i}", tuple(row[:6]), tuple(row[6:])) for i, row in enumerate(ids)]


def trainer_of(variant: ablate.Variant, target, folder: Path) -> ablate.VariantTrainer:
    known = tiny_config("llama", num_hidden_layers=5)
    base = drafter_config(target, known, Shape(layers=2, taps=TAPS), BLOCK, 3)
    recipe = ablate.recipe_of(variant, RECIPE)
    config = ablate.config_of(variant, base, recipe)
    features = [Online(target, FeatureSpec("t", TAPS, 4, "float32")) for _ in range(2)]
    if variant.taps:
        features = [ablate.Chosen(each, TAPS, variant.taps) for each in features]
    start = ablate.start_of(variant, config, target, 0)
    task = Task(target, {0}, config, base, texts(3), texts(4)[3:], *features, {})
    return ablate.VariantTrainer(variant, task, recipe, start.weights, folder)


def test_every_axis_of_the_paper_is_compared():
    found = compared()
    assert len({variant.name for variant in found}) == len(found)
    base = found[0]
    plain = ablate.Variant(base.name)
    assert base == plain
    # One thing at a time: none of the variants is the base, or another one, under a new name.
    assert len({str(replace(v, name="")) for v in found}) == len(found)
    assert any(v.rows is ablate.lone_rows for v in found)
    assert any(v.rows is ablate.fused_rows for v in found)
    assert any(v.uniform for v in found)
    assert any(v.recipe.get("gamma", 0) > 1e3 for v in found)
    assert [v.recipe["weights"] for v in found if "weights" in v.recipe] == ["dpace"]
    assert {len(v.taps) if v.taps else len(TAPS) for v in found} == {3, 5}
    assert {v.shape.get("layers", 2) for v in found} == {1, 2, 3}
    assert any(v.random for v in found)
    blocks = {
        (trained, v.verified or trained)
        for v in found
        for trained in [v.recipe.get("block_size", BLOCK)]
    }
    assert {(8, 8), (16, 16), (16, 8), (8, 16)} <= blocks


@pytest.mark.parametrize("variant", compared(), ids=lambda v: v.name[:24])
def test_every_variant_has_the_same_budget_of_rows(variant):
    recipe = ablate.recipe_of(variant, replace(RECIPE, step_blocks=32))
    assert recipe.step_blocks * recipe.block_size == 32 * BLOCK


def test_the_random_start_has_nothing_of_the_target(target, tmp_path):
    [variant] = [v for v in compared() if v.random]
    trainer = trainer_of(variant, target, tmp_path)
    made, config = dict(tree_flatten(trainer.parameters)), trainer.task.config
    random, taken = random_start(config, 0), target_start(config, target, 0)
    assert not random.taken
    assert len(taken.taken) > 10
    assert all(mx.array_equal(made[name], random.weights[name]) for name in random.weights)


def test_half_of_the_rows_count_twice():
    weights = mx.arange(1, 2801, dtype=mx.float32).reshape(400, 7)
    none = mx.zeros((400, 7, 0))
    labels = [Labels(mx.full((400, 7), n, mx.int32), weights, none, none) for n in (3, 4)]
    halves = [np.array(ablate.half_of_the_rows(none, each).weights) for each in labels]
    for half in halves:
        assert set(np.unique(half / np.array(weights))) == {0.0, 2.0}
        assert 0.45 < np.mean(half > 0) < 0.55
    assert not np.array_equal(*halves)  # another half in every pass
    again = ablate.half_of_the_rows(none, labels[0]).weights
    assert np.array_equal(halves[0], again)


@pytest.mark.parametrize("variant", compared(), ids=lambda v: v.name[:24])
def test_a_variant_trains_and_is_measured(variant, target, tmp_path):
    trainer = trainer_of(variant, target, tmp_path)
    before = mx.array(trainer.parameters["norm"]["weight"])
    trainer.run()
    assert not mx.array_equal(before, trainer.parameters["norm"]["weight"])
    tau, right = trainer.measured(20)
    assert 1 <= tau <= (variant.verified or BLOCK)
    assert 0 <= right <= 1


def test_what_differs_in_verified_rows_only_is_trained_once():
    groups = ablate_table.trained_alike(compared())
    assert [v for group in groups for v in group if v.verified] == [
        v for v in sorted(compared(), key=lambda v: v.recipe.get("block_size", 8)) if v.verified
    ]
    rows = [[v.verified or v.recipe.get("block_size", 8) for v in group] for group in groups]
    assert [found for found in rows if len(found) > 1] == [[8, 4, 16], [8, 16]]
    assert len(groups) == len(compared()) - 3


@pytest.mark.parametrize(("trained", "verified"), [(8, 16), (16, 8)])
def test_the_drafts_are_those_of_the_block_that_is_verified(trained, verified, target, tmp_path):
    variant = ablate.Variant("v", recipe={"block_size": trained}, verified=verified)
    trainer = trainer_of(variant, target, tmp_path)
    text = texts(1)[0]
    seen = trainer.task.features.read_all([text])[0]
    drafts = trainer._drafts(text, seen)
    assert {len(row) for row in drafts} == {verified - 1}
    model, config = trainer._model, trainer.task.config
    masks = max(trained, verified) - 1
    for index in (0, 7):
        anchor = len(text.prompt_ids) + index
        ids = mx.array([[text.ids[anchor], *[config.mask_token_id] * masks]])
        group = ablate.BlockGroup(seen.features[:anchor], np.array([anchor]))
        rows = block_rows(model, config, target.embed(ids), [group])[0, 1:verified]
        assert drafts[index] == mx.argmax(target.head(rows), axis=-1).tolist()


def rows_of(variant_rows, target, folder, anchors, features):
    """[N, b, H] of blocks at `anchors` of a text with these features [L, T·H]."""
    trainer = trainer_of(ablate.Variant("v"), target, folder)
    model, config = trainer._model, trainer.task.config
    model.update(trainer.parameters)
    ids = mx.array([[7, *[config.mask_token_id] * (BLOCK - 1)]] * len(anchors))
    group = ablate.BlockGroup(features[: max(anchors)], np.array(anchors))
    return np.array(variant_rows(model, config, target.embed(ids), [group]))


def features_of(target, seed: int) -> mx.array:
    size = (20, len(TAPS) * target.hidden_size)
    return mx.array(np.random.default_rng(seed).normal(size=size).astype(np.float32))


def test_without_features_a_block_is_the_same_wherever_it_stands(target, tmp_path):
    rows = [
        rows_of(ablate.lone_rows, target, tmp_path, [3, 11, 20], features_of(target, seed))
        for seed in (0, 1)
    ]
    assert np.array_equal(*rows)
    assert np.array_equal(rows[0][0], rows[0][1])
    assert np.array_equal(rows[0][0], rows[0][2])


def test_input_fusion_reads_the_position_before_the_anchor_only(target, tmp_path):
    features = features_of(target, 0)
    rows = rows_of(ablate.fused_rows, target, tmp_path, [9], features)
    for place in range(9):
        changed = mx.array(features)
        changed[place] = changed[place] + 1
        others = rows_of(ablate.fused_rows, target, tmp_path, [9], changed)
        assert np.array_equal(rows, others) == (place != 8), place


def test_chosen_taps_are_those_asked_for(target):
    text = texts(1)
    spec = FeatureSpec("t", TAPS, 4, "float32")
    wanted = Online(target, replace(spec, taps=(1, 4))).read_all(text)[0].features
    found = ablate.Chosen(Online(target, spec), TAPS, (1, 4)).read_all(text)[0].features
    assert mx.array_equal(found, wanted)


def test_uniform_blocks_follow_one_another(target, tmp_path):
    """What a block predicts ends where the next one's clean token stands."""
    trainer = trainer_of(ablate.Variant("v", uniform=True), target, tmp_path)
    for epoch in (0, 1):
        works = [work for step in trainer._epoch(epoch) for work in step]
        found = [(work.text.name, anchor) for work in works for anchor in work.anchors.tolist()]
        assert sorted(found) == [(f"t/{i}", anchor) for i in range(3) for anchor in (6, 13, 20)]
