"""A whole run: exact resume, what it leaves behind, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from tiny_training import answered_target, read_json

import dflash_mlx
from dflash_mlx.cli import main
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.loader import load_target
from dflash_mlx.train.checkpoint import load_state
from dflash_mlx.train.corpus import read_answers, split
from dflash_mlx.train.export import as_drafter
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import Voice, train
from dflash_mlx.train.shape import Shape, second_parts
from dflash_mlx.train.start import drafter_start
from dflash_mlx.train.trainer import Trainer

RECIPE = Recipe(
    block_size=4,
    steps=8,
    step_blocks=24,
    pass_blocks=8,
    learning_rate=4e-3,
    negatives=8,
    held_out=2,
    measure_every=3,
    soft=0.5,
)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return answered_target(tmp_path_factory.mktemp("given"), 9)


@pytest.fixture
def order(given, tmp_path, no_picture):
    shape = Shape(layers=1, taps=2)
    return Order(given[0], tmp_path / "out", RECIPE, shape, answers=[given[1]])


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    made = Order(given[0], out, RECIPE, Shape(layers=1, taps=2), answers=[given[1]])
    return made, train(made)


def state_of(order):
    parameters, optimizer, progress, _ = load_state(order.out)
    return dict(tree_flatten([parameters, optimizer])), progress


@pytest.mark.parametrize("killed", [1, 3, 7])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    order, finished, killed, monkeypatch
):
    whole = Trainer._count

    def counting(self, result):
        whole(self, result)
        if self.progress.step == killed:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_count", counting)
        with pytest.raises(KeyboardInterrupt):
            train(order)
    stopped = state_of(order)[1].seconds
    result = train(order)
    ours, theirs = state_of(order), state_of(finished[0])
    assert ours[0].keys() == theirs[0].keys()
    for name, array in theirs[0].items():
        assert mx.array_equal(ours[0][name], array), name
    assert ours[1] == theirs[1]
    assert ours[1].seconds > stopped > 0
    assert result["tau"] == finished[1]["tau"]
    weights = [mx.load(str(o.out / "model.safetensors")) for o in (order, finished[0])]
    assert all(mx.array_equal(weights[0][n], weights[1][n]) for n in weights[1])


def test_streams_do_not_change_a_bit(order, finished):
    train(replace(order, streams=3))
    ours, theirs = (state_of(o)[0] for o in (order, finished[0]))
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)


def test_online_features_train_alike(order, finished):
    offline = replace(order, cache_dtype="float32", out=order.out / "offline")
    online = replace(offline, out=order.out / "online", online=True)
    assert train(offline)["steps"] == train(online)["steps"]
    ours, theirs = state_of(online)[0], state_of(offline)[0]
    for name, array in theirs.items():
        assert np.allclose(ours[name], array, atol=1e-3), name
    assert not (online.out / "work" / "features").exists()


def test_prompts_are_answered_and_trained_on(order, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"Question {i}?", "max": 9} for i in range(9)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = replace(order, answers=[], prompts=[prompts], slots=4)
    told: list[str] = []
    result = train(asked, Voice(told.append))
    assert result["trained_texts"] == 7
    assert re.search(r"9 answers of \d+ tokens, [\d.]+ tokens/s, 4 at a time at most\.", str(told))
    made = [json.loads(line) for line in (order.out / "work" / "answers.jsonl").open()]
    texts = {row["id"]: row for row in made if "id" in row}
    engine = dflash_mlx.load(order.target, draft=None)
    alone = engine.generate("Question 3?", max_tokens=9)
    assert texts["p3"]["answer_ids"] == alone.token_ids
    assert texts["p3"]["prompt_ids"] == engine.prompt("Question 3?", None, None).ids


def test_the_card_says_what_drawn_answers_are(order, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}?", "max": 9}}\n' for i in range(9)))
    recipe = replace(RECIPE, steps=1)
    asked = replace(order, answers=[], prompts=[prompts], temperature=0.7, recipe=recipe)
    train(asked)
    card = (asked.out / "README.md").read_text()
    assert "tokens, drawn at temperature 0.7; drafts are greedy), at step 1" in card


def test_a_finished_run_is_left_as_it_is(finished):
    order, result = finished
    before = (order.out / "model.safetensors").read_bytes()
    assert train(order)["tau"] == result["tau"]
    assert (order.out / "model.safetensors").read_bytes() == before


def test_what_a_run_leaves_behind(finished):
    order, result = finished
    trained = {text.name for text in split(read_answers(order.answers, 288), 2)[0]}
    run = read_json(order.out / "run.json")
    assert run["recipe"]["learning_rate"] == RECIPE.learning_rate
    assert run["gamma"] is None
    assert "D-PACE weights" in (order.out / "README.md").read_text()
    assert {"mlx", "dflash-mlx"} <= run["versions"].keys()
    assert len(run["trained"]["sha256"]) == 64
    [file] = run["answers"]["files"]
    assert file["sha256"] == hashlib.sha256(order.answers[0].read_bytes()).hexdigest()
    assert run["answers"]["slots"] == order.slots
    curve = read_json(order.out / "curve.json")
    assert [entry["step"] for entry in curve] == [3, 6, 8]
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert max(entry["tau"] for entry in curve) == result["tau"]
    assert (order.out / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    card = (order.out / "README.md").read_text()
    assert f"{result['tau']:.2f} tokens a cycle on 2 held-out texts" in card
    best = next(entry for entry in curve if entry["step"] == result["best_step"])
    assert best["tau_by_set"].keys() == {"text"}
    assert f"- text: {best['tau_by_set']['text']:.2f}" in card
    assert 1 + sum(best["acceptance"]) >= best["tau"]
    assert not list(order.out.glob("partial-*"))
    counts = Counter(
        token
        for row in map(json.loads, order.answers[0].open())
        if row["id"] in trained
        for token in row["prompt_ids"] + row["answer_ids"]
    )
    frequent = read_json(order.out / "token_order.json")["order"]
    assert [counts[token] for token in frequent] == sorted(counts.values(), reverse=True)


def test_the_format_is_the_official_one(finished):
    order, _ = finished
    stored = read_json(order.out / "config.json")
    assert stored["architectures"] == ["DFlashDraftModel"]
    assert stored["dflash_config"].keys() == {"target_layer_ids", "mask_token_id", "block_size"}
    config = parse_config(stored)
    weights = mx.load(str(order.out / "model.safetensors"))
    assert {a.dtype for a in weights.values()} == {mx.bfloat16}
    layer = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm"
    layer += " self_attn.k_norm mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm"
    layer += " post_attention_layernorm"
    names = {f"layers.0.{part}.weight" for part in layer.split()}
    assert weights.keys() == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert weights["fc.weight"].shape == (config.hidden_size, config.feature_size)


def test_a_drafter_can_be_trained_further(order, finished):
    further = replace(order, init=str(finished[0].out), shape=Shape())
    assert train(further)["steps"] == RECIPE.steps
    with pytest.raises(UsageError, match="takes its taps"):
        train(replace(order, init=str(finished[0].out), out=order.out / "b"))
    larger = replace(further, block_size=6, out=order.out / "c")
    train(replace(larger, recipe=replace(RECIPE, steps=2)))
    stored = read_json(larger.out / "config.json")
    assert stored["block_size"] == stored["dflash_config"]["block_size"] == 6
    assert dflash_mlx.load(order.target, draft=str(larger.out)).drafter.block_size == 6
    two = replace(order, shape=Shape(layers=2, taps=2), recipe=replace(RECIPE, steps=1))
    two = replace(two, out=order.out / "two")
    train(two)
    with pytest.raises(UsageError, match="has 2 layers"):
        train(replace(further, init=str(two.out), shape=Shape(layers=1), out=order.out / "d"))


def test_a_refused_run_leaves_the_folder_as_it_is(finished, tmp_path):
    order, _ = finished
    lines = order.answers[0].read_text().splitlines(keepends=True)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(lines[1:]))
    names = [path.name for path in order.out.iterdir() if path.is_file()]
    before = [(order.out / name).read_bytes() for name in names]
    assert {"run.json", "token_order.json"} <= set(names)
    with pytest.raises(UsageError, match="other settings"):
        train(replace(order, answers=[fewer]))
    assert [(order.out / name).read_bytes() for name in names] == before


def test_without_held_out_texts_the_last_weights_are_kept(order):
    none = replace(order, recipe=replace(RECIPE, held_out=0))
    train(none)
    kept = mx.load(str(order.out / "model.safetensors"))
    parameters = dict(tree_flatten(load_state(order.out)[0]))
    for name, array in kept.items():
        assert mx.array_equal(array, parameters[name].astype(mx.bfloat16)), name


@pytest.mark.parametrize(("blocks", "knob"), [(8, "--pass-blocks (now 8)"), (1, "--max-length")])
def test_running_out_of_memory_names_what_to_lower(order, monkeypatch, blocks, knob):
    def full(*_: object) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 123 bytes.")

    monkeypatch.setattr("dflash_mlx.train.trainer.gradients", full)
    with pytest.raises(UsageError, match=f"Lower {re.escape(knob)}"):
        train(replace(order, recipe=replace(RECIPE, pass_blocks=blocks)))


def test_windows_may_differ_by_layer(order):
    shape = Shape(layers=2, taps=2, windows=(8, None))
    train(replace(order, shape=shape, recipe=replace(RECIPE, steps=1)))
    stored = read_json(order.out / "config.json")
    assert stored["layer_types"] == ["sliding_attention", "full_attention"]
    assert stored["sliding_window"] == 8
    assert dflash_mlx.load(order.target, draft=str(order.out)).generate([1, 2], max_tokens=4)


def test_a_drafter_that_grows_drafts_the_same_at_first(order, finished):
    target = load_target(Path(order.target))
    small = finished[0].out
    parts = second_parts(Shape(selector_rank=8), target.hidden_size)
    stored, start = drafter_start(small, target, 0, 3, parts)
    grown = parse_config(stored)
    assert grown.num_hidden_layers == 3
    assert grown.parts is not None
    features = mx.random.normal((1, 9, grown.feature_size), key=mx.random.key(0))
    drafts = []
    for drafter in (
        open_drafter(small, target, dtype=mx.float32),
        as_drafter(grown, tree_unflatten(list(start.weights.items())), target, mx.float32),
    ):
        cache = drafter.make_cache()
        drafter.observe(features, cache)
        drafts.append(drafter.draft_logits(mx.array([7]), 3, cache))
    assert np.allclose(*drafts, atol=1e-5)


def test_dflash_2_is_trained_and_loads(order):
    shape = Shape(layers=1, taps=2, selector_rank=8)
    result = train(replace(order, shape=shape))
    stored = read_json(order.out / "config.json")
    assert stored["architectures"] == ["DFlash2DraftModel"]
    engine = dflash_mlx.load(order.target, draft=str(order.out), block_size=None)
    done = engine.generate([1, 2, 3], max_tokens=12)
    assert done.stats.cycles > 0
    assert result["tau"] >= 1
    start = mx.load(str(order.out / "model.safetensors"))
    assert mx.abs(start["candidate_selector.successor_codebook"]).max() > 0


def test_other_settings_are_refused_by_name(finished):
    order, _ = finished
    with pytest.raises(UsageError, match=r"--lr: 0\.004 -> 0\.005"):
        train(replace(order, recipe=replace(RECIPE, learning_rate=5e-3)))
    with pytest.raises(UsageError, match="--init: target -> random"):
        train(replace(order, init="random"))


def test_damaged_features_are_named(order):
    work = order.out / "work"
    short = replace(order, recipe=replace(RECIPE, steps=2), work=work)
    train(short)
    for shard in (work / "features").rglob("features-*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cached features"):
        train(replace(short, out=order.out / "other"))


def test_features_of_another_text_are_named(order):
    work = order.out / "work"
    short = replace(order, recipe=replace(RECIPE, steps=2), work=work)
    train(short)
    for shard in (work / "features").rglob("features-*.safetensors"):
        arrays = {name: mx.array(array[:3]) for name, array in mx.load(str(shard)).items()}
        mx.eval(arrays)
        mx.save_safetensors(str(shard), arrays)
    with pytest.raises(CheckpointError, match="other shapes than its text"):
        train(replace(short, out=order.out / "other"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"answers": []}, "Nothing to train on"),
        ({"memory_gb": 1e-4}, "A pass over one block takes"),
        ({"cache_limit_gb": 1e-6}, "more than the limit"),
        ({"shape": Shape(taps=(1, 9))}, "do not fit a target"),
        ({"shape": Shape(taps=9)}, "9 taps"),
        ({"shape": Shape(mask_token_id=9999)}, "mask token 9999"),
        ({"shape": Shape(layers=2, windows=(8, 9))}, "one window for all"),
        ({"shape": Shape(layers=1, windows=(8, None))}, "2 windows for 1 layer;"),
    ],
)
def test_refusals(order, changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        train(replace(order, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"memory_gb": 0.0},
        {"cache_limit_gb": -1.0},
        {"cache_dtype": "foo"},
        {"block_size": 1},
        {"streams": 0},
    ],
)
def test_impossible_orders_are_refused(order, changes):
    with pytest.raises(UsageError):
        replace(order, **changes)


@pytest.mark.parametrize(
    "values", [{"layers": 0}, {"windows": 0}, {"windows": 2**31}, {"selector_rank": 0}]
)
def test_impossible_shapes_are_refused(values):
    with pytest.raises(UsageError):
        Shape(**values)


def test_a_file_in_the_place_of_the_folder_is_named(order):
    order.out.write_text("")
    with pytest.raises(UsageError, match="cannot be a folder"):
        train(order)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"prompt_ids": [1]}', '{"prompt_ids": [1], "answer_ids": [99999]}'],
)
def test_a_bad_line_of_answers_is_named(order, tmp_path, line):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "prompt_ids": [1], "answer_ids": [2, 3]}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl line 2"):
        train(replace(order, answers=[bad]))


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 1}, {"soft": 2}, {"learning_rate": 0}, {"gamma": float("nan")}, {"dtype": "x"}],
)
def test_impossible_recipes_are_refused(changes):
    with pytest.raises(UsageError):
        replace(RECIPE, **changes)


def test_the_command_line(given, tmp_path, capsys):
    arguments = ["train", given[0], "--out", str(tmp_path / "out"), "--answers", str(given[1])]
    arguments += ["--layers", "1", "--taps", "1,2", "--block-size", "4", "--steps", "3"]
    arguments += ["--held-out", "2", "--step-blocks", "16", "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    result = json.loads(out.strip().splitlines()[-1])
    assert result["steps"] == 3
    parts = "step 3/3", "loss N", "rows N N N", r"τ N \(best N\)", "N tokens/s", "0:00:00 left"
    assert re.search("  ".join(parts).replace("N", r"\d+(\.\d+)?"), err)
    assert "will take" in err
