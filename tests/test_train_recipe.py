"""The recipe in action: its defaults, rate and clipping, masters, what is kept, what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny_training import own_texts, read_json, write_answers, write_target

import dflash_mlx
from dflash_mlx.cli import main
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import UsageError
from dflash_mlx.train import run, step, trainer
from dflash_mlx.train.checkpoint import load_state, save_state
from dflash_mlx.train.loss import dpace_weights, given_weights
from dflash_mlx.train.naming import hash_of
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.replay import Replay
from dflash_mlx.train.run import train
from dflash_mlx.train.shape import Shape
from dflash_mlx.train.start import random_start
from dflash_mlx.train.step import clipped
from dflash_mlx.train.trainer import Trainer, learning_rate

pytestmark = pytest.mark.usefixtures("no_picture")

RECIPE = Recipe(block_size=4, steps=3, step_blocks=8, pass_blocks=8, held_out=1, negatives=8)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    target = write_target(folder / "target", "llama")
    texts = own_texts(dflash_mlx.load(str(target), draft=None), 8, 8)
    return str(target), texts, write_answers(folder / "answers.jsonl", texts)


@pytest.fixture
def order(given, tmp_path):
    return Order(given[0], tmp_path / "out", RECIPE, Shape(layers=1, taps=2), answers=[given[2]])


def test_a_bare_command_asks_for_the_papers_recipe_with_dpace_weights(
    monkeypatch, tmp_path, capsys
):
    asked = []
    monkeypatch.setattr(run, "train", lambda order, voice: asked.append(order) or {})
    with pytest.raises(SystemExit):
        main(["train", "target", "--out", str(tmp_path), "--answers", "a.jsonl", "--json"])
    for recipe in (asked[0].recipe, Recipe()):
        assert recipe.learning_rate == 6e-4
        assert recipe.warmup == 0.04
        assert recipe.clip == 1.0
        assert recipe.epochs == 6
        assert recipe.anchors == 512
        assert recipe.dtype == "float32"
        assert recipe.steps is None
        assert recipe.block_size == 16
        assert [replace(recipe, block_size=size).decay for size in (16, 10, 8)] == [7, 5, 4]
        assert (recipe.weight_decay, recipe.soft) == (0, 0)
        assert recipe.weights == "dpace"


@pytest.mark.parametrize(("given", "decay"), [("paper", 7), ("2.5", 2.5)])
def test_the_papers_weights_are_there_for_the_asking(given, decay, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(run, "train", lambda order, voice: asked.append(order) or {})
    with pytest.raises(SystemExit):
        main(["train", "target", "--out", str(tmp_path), "--answers", "a", "--gamma", given])
    assert (asked[0].recipe.weights, asked[0].recipe.decay) == ("decay", decay)


def test_a_gamma_that_is_no_number_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "target", "--out", str(tmp_path), "--answers", "a", "--gamma", "auto"])
    assert end.value.code
    assert "--gamma auto is no number. Give one, or paper." in capsys.readouterr().err


def test_a_run_with_decaying_weights_says_so_and_goes_on_as_one(order):
    """States of before there were others name no weights, and had these."""
    decaying = replace(order, recipe=replace(RECIPE, weights="decay", gamma=3.0))
    result = train(decaying)
    assert read_json(order.out / "run.json")["gamma"] == 3.0
    assert "row weights exp(-(k-1)/3)" in (order.out / "README.md").read_text()
    parameters, optimizer, progress, stored = load_state(order.out)
    del stored["recipe"]["weights"]
    save_state(order.out, parameters, optimizer, progress, stored)
    assert train(decaying)["tau"] == result["tau"]
    with pytest.raises(UsageError, match=r"weights: decay -> dpace \(--gamma paper is decay"):
        train(replace(order, recipe=RECIPE))


@pytest.mark.parametrize("weights", ["dpace", "decay"])
def test_the_loss_has_the_weights_of_the_recipe(weights, order, monkeypatch):
    given, real = [], step.cross_entropy

    def watched(logits, labels, soft, reweighed):
        given.append(reweighed)
        return real(logits, labels, soft, reweighed)

    monkeypatch.setattr(step, "cross_entropy", watched)
    train(replace(order, recipe=replace(RECIPE, steps=1, weights=weights)))
    assert set(given) == {dpace_weights if weights == "dpace" else given_weights}
    assert given_weights(None, given) is given


def test_gradients_become_those_of_the_mean_and_are_clipped_by_their_norm():
    grads = {"a": mx.array([30.0, 0.0]), "b": {"c": mx.array([40.0])}}
    (small,), (large,) = (
        [np.array([*g["a"], *g["b"]["c"]])] for g in (clipped(grads, w, 1.0) for w in (100.0, 10.0))
    )
    assert np.allclose(small, [0.3, 0, 0.4], rtol=1e-6)  # a norm of 0.5 stays
    assert np.allclose(large, [0.6, 0, 0.8], rtol=1e-5)  # one of 5 becomes 1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", mx.float32), ("float16", mx.bfloat16), ("bfloat16", mx.bfloat16)],
)
def test_the_drafter_is_replayed_in_the_type_it_has_in_generation(
    dtype, expected, order, monkeypatch
):
    seen, real = [], trainer.as_drafter

    def watched(config, parameters, target, dtype):
        seen.append(dtype)
        return real(config, parameters, target, dtype)

    monkeypatch.setattr(trainer, "as_drafter", watched)
    train(replace(order, dtype=dtype, recipe=replace(RECIPE, steps=1)))
    assert set(seen) == {expected}
    engine = dflash_mlx.load(order.target, draft=str(order.out), dtype=dtype)
    assert engine.drafter.model.norm.weight.dtype == expected


def test_run_json_keeps_what_earlier_parts_of_the_run_ran_on(order):
    train(order)
    file = order.out / "run.json"
    now = read_json(file)
    assert now["earlier"] == []
    other = {"versions": {"mlx": "0.0"}, "machine": "m", "blas": "b", "device": "d"}
    blocks = {"pass_blocks": now["recipe"]["pass_blocks"], "online": False}
    said = []
    for known in ({**now, **other}, None):
        if known:
            file.write_text(json.dumps(known))
        train(order, run.Voice(say=said.append))
        assert read_json(file)["earlier"] == [other | blocks]
        assert read_json(file)["versions"] == now["versions"]
    assert sum("ran elsewhere" in sentence for sentence in said) == 2


def expected_rates(steps: int) -> np.ndarray:
    """6e-4 reached on the last step of the first 4%, then half a cosine that ends at 0."""
    warm = round(0.04 * steps)
    rest = np.cos(np.pi * np.arange(steps - warm) / (steps - warm))
    return 6e-4 * np.concatenate([np.arange(1, warm + 1) / warm, (1 + rest) / 2])


def test_the_rate_warms_up_and_follows_a_cosine_to_the_end():
    for steps in (100, 1000):
        rates = [learning_rate(Recipe(), at, steps) for at in range(steps)]
        assert np.allclose(rates, expected_rates(steps), rtol=1e-9, atol=0)
    assert rates[39] == 6e-4
    assert rates[520] == pytest.approx(3e-4)
    assert 0 < rates[-1] < 6e-4 * 1e-5


def test_every_step_has_its_rate_and_clipped_gradients(order, monkeypatch):
    """And the compiled update is that of MLX's AdamW, step by step."""
    seen, plain = [], optim.AdamW(0.0, weight_decay=0.0, bias_correction=True)
    apply = Trainer._apply

    def watched(self, grads):
        plain.learning_rate = expected_rates(25)[len(seen)]
        expected = plain.apply_gradients(grads, self.parameters)
        apply(self, grads)
        norm = sum(float((g**2).sum()) for _, g in tree_flatten(grads)) ** 0.5
        seen.append((float(self.optimizer.learning_rate), norm))
        for (name, ours), (_, theirs) in zip(
            tree_flatten(self.parameters), tree_flatten(expected), strict=True
        ):
            assert mx.array_equal(ours, theirs), name

    monkeypatch.setattr(Trainer, "_apply", watched)
    recipe = replace(RECIPE, steps=25, step_blocks=2, clip=1e-3, measure_every=1000)
    train(replace(order, recipe=recipe))
    rates, norms = zip(*seen, strict=True)
    assert np.allclose(rates, expected_rates(25), rtol=1e-6)
    assert np.allclose(norms, 1e-3, rtol=1e-3)


def test_a_forward_pass_in_bfloat16_trains_float32_masters(order, monkeypatch):
    dtypes = []
    logits = step.draft_logits

    def watched(config, rows, head):
        dtypes.append((rows.dtype, head.dtype))
        return logits(config, rows, head)

    monkeypatch.setattr(step, "draft_logits", watched)
    recipe = replace(RECIPE, dtype="bfloat16", steps=2, learning_rate=1e-5)
    train(replace(order, init="random", recipe=recipe))
    assert set(dtypes) == {(mx.bfloat16, mx.bfloat16)}
    parameters, optimizer, _, _ = load_state(order.out)
    moments = {n: a for n, a in tree_flatten(optimizer) if n.endswith((".m", ".v"))}
    assert moments
    assert {a.dtype for _, a in [*tree_flatten(parameters), *moments.items()]} == {mx.float32}
    # Changes that bfloat16 would have lost beside 1.
    moved = np.abs(np.array(parameters["norm"]["weight"]) - 1)
    assert 0 < moved.max() < 1e-4
    assert (moved > 0).mean() > 0.9


def test_the_drafter_kept_is_that_of_the_best_measurement(order, monkeypatch):
    """Held-out τ is 2, 4, 3, 4 behind the steps: the second is the best one, also later."""
    taus, weights = iter([2, 4, 3, 4]), {}

    def replayed(self):
        weights[self.progress.step] = dict(tree_flatten(self.parameters))
        return {"texts": Replay([1], next(taus))}

    monkeypatch.setattr(Trainer, "_replayed", replayed)
    recipe = replace(RECIPE, steps=4, step_blocks=4, measure_every=1, learning_rate=1e-2)
    result = train(replace(order, recipe=recipe))
    assert (result["best_step"], result["tau"]) == (2, 4)
    kept = mx.load(str(order.out / "model.safetensors"))
    same = [
        at
        for at, known in weights.items()
        if all(mx.array_equal(kept[n], known[n].astype(mx.bfloat16)) for n in kept)
    ]
    assert same == [2]


def test_accept_lengths_of_a_dflash_2_drafter_are_those_of_generation(given, order, monkeypatch):
    replays, cycles = [], []
    count, joined = GenerationStats.count_cycle, trainer.joined

    def counted(self, drafted, accepted, emitted, *more):
        cycles.append(min(accepted, emitted))
        count(self, drafted, accepted, emitted, *more)

    def kept(sets):
        replays.append(joined(sets))
        return replays[-1]

    monkeypatch.setattr(GenerationStats, "count_cycle", counted)
    monkeypatch.setattr(trainer, "joined", kept)
    monkeypatch.setattr(run, "split", lambda texts, held_out: (texts, texts))
    learning = {"epochs": 12, "steps": None, "step_blocks": 1000, "pass_blocks": 1000}
    recipe = replace(RECIPE, **learning, learning_rate=2e-2, measure_every=1000)
    shape = Shape(layers=1, taps=2, selector_rank=8)
    train(replace(order, shape=shape, recipe=recipe))
    engine = dflash_mlx.load(order.target, draft=str(order.out), block_size=None)
    cycles.clear()
    for text in given[1]:
        done = engine.generate(list(text.prompt_ids), max_tokens=len(text.answer_ids))
        assert tuple(done.token_ids) == text.answer_ids
    assert cycles == replays[-1].accepts
    assert {0, 2} <= set(cycles)


def test_a_random_start_from_the_command_line_to_a_drafter(given, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["train", given[0], "--out", str(out), "--answers", str(given[2]), "--json"]
    arguments += ["--init", "random", "--layers", "1", "--taps", "2", "--block-size", "4"]
    # So slow that what comes out still is what it started from.
    arguments += ["--steps", "2", "--held-out", "1", "--lr", "1e-12", "--seed", "5"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    said, told = capsys.readouterr()
    assert json.loads(said.strip().splitlines()[-1])["steps"] == 2
    assert "; 0 of " in told
    config = parse_config(read_json(out / "config.json"))
    made = mx.load(str(out / "model.safetensors"))
    start = random_start(config, 5).weights
    assert made.keys() == start.keys()
    for name, array in start.items():
        assert np.allclose(made[name].astype(mx.float32), array, atol=1e-3), name
    assert read_json(out / "run.json")["init"] == "random"
    assert dflash_mlx.load(given[0], draft=str(out)).generate([1, 2], max_tokens=4).token_ids


def test_the_numbers_of_a_stopped_run_are_there(order, monkeypatch):
    whole = Trainer._count

    def counting(self, result):
        whole(self, result)
        if self.progress.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_count", counting)
    with pytest.raises(KeyboardInterrupt):
        train(replace(order, recipe=replace(RECIPE, steps=4, step_blocks=4, measure_every=1)))
    curve = read_json(order.out / "curve.json")
    assert [entry["step"] for entry in curve] == [1, 2]
    assert curve == load_state(order.out)[2].history


def test_run_json_says_what_the_drafter_is_and_what_it_started_from(order):
    shape = Shape(layers=2, taps=(2, 0), windows=(8, None), selector_rank=8, mask_token_id=7)
    short = replace(RECIPE, steps=1)
    first = replace(order, shape=shape, recipe=short)
    train(first)
    told = read_json(first.out / "run.json")
    assert told["drafter"] == {
        "layers": 2,
        "block_size": 4,
        "taps": [2, 0],
        "windows": [8, None],
        "causal": [False, False],
        "selector_rank": 8,
        "mask_token_id": 7,
    }
    assert told["target_revision"] is None
    assert told["init_content"] is None
    further = replace(order, init=str(first.out), shape=Shape(), recipe=short)
    hashes = []
    for name in ("a", "b"):
        known = hash_of(Path(further.init))
        train(replace(further, out=order.out / name))
        told = read_json(order.out / name / "run.json")
        assert told["init_content"] == known
        assert told["drafter"]["taps"] == [2, 0]
        hashes.append(known)
        weights = dict(mx.load(str(first.out / "model.safetensors")))
        mx.eval(weights)
        weights["norm.weight"] = weights["norm.weight"] * 2
        mx.save_safetensors(str(first.out / "model.safetensors"), weights)
    assert hashes[0] != hashes[1]


def test_run_json_says_which_revision_was_asked_for(order, monkeypatch):
    load = run.engines.load
    monkeypatch.setattr(run.engines, "load", lambda *given, revision, **more: load(*given, **more))
    train(replace(order, revision="v2", recipe=replace(RECIPE, steps=1)))
    assert read_json(order.out / "run.json")["target_revision"] == "v2"
