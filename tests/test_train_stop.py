"""Runs that end early, in whatever way, and stages that are made alone: the next run goes on."""

from __future__ import annotations

import os
import pickle
import platform
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_training import answered_target, read_json

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.train import run, trainer
from dflash_mlx.train.checkpoint import STATE, load_state
from dflash_mlx.train.interrupt import exit_code, stopped_by_signals
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.record import blocks_before, earlier_parts
from dflash_mlx.train.run import Voice, train
from dflash_mlx.train.shape import Shape
from dflash_mlx.train.sources import Offline
from dflash_mlx.weights import read_weights

pytestmark = pytest.mark.usefixtures("no_picture")

RECIPE = Recipe(
    block_size=4,
    steps=6,
    step_blocks=12,
    pass_blocks=6,
    learning_rate=4e-3,
    negatives=16,
    held_out=2,
    measure_every=4,
)
#: a program that trains and dies without a word as soon as so many steps are counted
DIES = """
import os, pickle, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_mlx.train import run, trainer
order, steps, often = pickle.loads(sys.stdin.buffer.read())
count = trainer.Trainer._count
trainer.SAVE_SECONDS = 0.0 if often else 1e9
def counting(self, result):
    if self.progress.step == steps:
        os.kill(os.getpid(), 9)
    count(self, result)
trainer.Trainer._count = counting
run.train(order)
"""


#: the same program, alive: each run to its end, the first one from what was left of it
GOES_ON = """
import pickle, sys
from dflash_mlx import fast_blas
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_mlx.train import run
from dflash_mlx.train.checkpoint import load_state
orders = pickle.loads(sys.stdin.buffer.read())
print(load_state(orders[0].out)[2].step, fast_blas.CHOICE.fast)
for order in orders:
    run.train(order)
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return answered_target(tmp_path_factory.mktemp("given"), 9)


@pytest.fixture
def order(given, tmp_path):
    shape = Shape(layers=1, taps=2)
    return Order(given[0], tmp_path / "out", RECIPE, shape, answers=[given[1]])


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """A run that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(Order(given[0], out, RECIPE, Shape(layers=1, taps=2), answers=[given[1]]))
    return out


def state_of(out: Path):
    parameters, optimizer, progress, _ = load_state(out)
    return dict(tree_flatten([parameters, optimizer])), progress


def same(one: Path, other: Path) -> bool:
    ours, theirs = state_of(one), state_of(other)
    arrays = ours[0].keys() == theirs[0].keys() and all(
        mx.array_equal(ours[0][name], array) for name, array in theirs[0].items()
    )
    return arrays and ours[1] == theirs[1]


def killed(order: Order, often: bool, blas: str = "mlx.core") -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {blas}\n{DIES}"],
        input=pickle.dumps((order, 5, often)),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("often", "left"), [(False, 4), (True, 5)])
def test_a_run_that_is_killed_goes_on_bit_for_bit(order, whole, often, left):
    """From its last measurement, or where those are far apart from the state saved in between."""
    killed(order, often)
    assert state_of(order.out)[1].step == left
    train(order)
    assert same(order.out, whole)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one BLAS, which other tests use")
def test_a_killed_run_goes_on_bit_for_bit_with_the_blas_of_the_program(order, tmp_path):
    """Which orders sums by the number of rows. Features and the state are of a killed run."""
    whole = replace(order, out=tmp_path / "whole")
    killed(order, often=True, blas="dflash_mlx.fast_blas")
    done = subprocess.run(
        [sys.executable, "-c", GOES_ON], input=pickle.dumps([order, whole]), check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert done.stdout.decode().split() == ["5", str(platform.machine() == "x86_64")]
    assert same(order.out, whole.out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_program_leaves_a_state(order, whole, number, monkeypatch):
    count = trainer.Trainer._count

    def counting(self, result):
        count(self, result)
        if self.progress.step == 3:
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # nohup, around the suite, has it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "_count", counting)
            with pytest.raises(KeyboardInterrupt) as stopped, stopped_by_signals():
                train(order)
        assert exit_code(stopped.value) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert state_of(order.out)[1].step == 3
    train(order)
    assert same(order.out, whole)


def stopped_behind(step: int, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the run and stop it when so many of its steps are done."""
    count = trainer.Trainer._count

    def counting(self, result):
        count(self, result)
        if self.progress.step == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_count", counting)
        with pytest.raises(KeyboardInterrupt):
            train(order)
    assert state_of(order.out)[1].step == step


@pytest.mark.parametrize("kind", ["DFlash 2", "bfloat16", "soft, online"])
def test_other_kinds_of_runs_go_on_bit_for_bit(kind, order, tmp_path, monkeypatch):
    asked = {
        "DFlash 2": replace(order, shape=Shape(layers=1, taps=2, selector_rank=4)),
        "bfloat16": replace(order, recipe=replace(RECIPE, dtype="bfloat16")),
        "soft, online": replace(order, recipe=replace(RECIPE, soft=0.5), online=True),
    }[kind]
    train(asked)
    stopped = replace(asked, out=tmp_path / "stopped")
    stopped_behind(3, stopped, monkeypatch)
    train(stopped)
    assert same(stopped.out, asked.out)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_whoever_runs_out_of_memory_can_follow_the_advice(order, whole, monkeypatch):
    """Fewer blocks a pass: the same run goes on, and sums differ by rounding only."""
    gradients = trainer.gradients

    def full(objective, parameters, built, streams):
        if max(len(part.anchors) for part in built) > 4 and model.progress.step == 2:
            raise RuntimeError("[malloc] Unable to allocate 100 bytes.")
        return gradients(objective, parameters, built, streams)

    advance = trainer.Trainer._advance
    model = None

    def watched(self):
        nonlocal model
        model = self
        advance(self)

    monkeypatch.setattr(trainer, "gradients", full)
    monkeypatch.setattr(trainer.Trainer, "_advance", watched)
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0.0)
    with pytest.raises(UsageError, match=r"Lower --pass-blocks \(now 6\) and"):
        train(order)
    assert state_of(order.out)[1].step == 2
    train(replace(order, recipe=replace(RECIPE, pass_blocks=4)))
    ours, theirs = state_of(order.out), state_of(whole)
    assert ours[1].step == theirs[1].step
    for name, array in theirs[0].items():
        assert mx.allclose(ours[0][name], array, atol=1e-3), name


@pytest.mark.parametrize(
    ("stage", "place", "online"),
    [
        ("Measuring", "dflash_mlx.train.trainer.replay_sets", False),
        ("Computing features", "dflash_mlx.train.sources.compute", True),
    ],
)
def test_advice_that_makes_another_run_says_so(order, stage, place, online, monkeypatch):
    def full(*_: object) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 123 bytes.")

    monkeypatch.setattr(place, full)
    with pytest.raises(UsageError, match=f"{stage} ran .* --max-length.*, and give another folder"):
        train(replace(order, online=online))


def test_a_run_goes_on_with_the_passes_it_began_with(order, whole, monkeypatch):
    """Its sums are the same where there is more memory now, too. Others may be asked for."""
    fits = run.fitted
    with monkeypatch.context() as patch:
        patch.setattr(run, "fitted", lambda recipe, *rest: replace(recipe, pass_blocks=4))
        stopped_behind(2, order, patch)
    seen = []
    monkeypatch.setattr(
        run, "fitted", lambda recipe, *rest: seen.append(recipe) or fits(recipe, *rest)
    )
    told: list[str] = []
    train(order, Voice(told.append))
    file = order.out / "run.json"
    assert seen.pop().pass_blocks == 4
    assert read_json(file)["earlier"] == []
    train(replace(order, recipe=replace(RECIPE, pass_blocks=5)), Voice(told.append))
    assert seen.pop().pass_blocks == 5
    assert [part["pass_blocks"] for part in read_json(file)["earlier"]] == [4]
    assert sum("with other --pass-blocks" in line for line in told) == 1


def test_passes_of_a_run_that_never_had_a_state_are_forgotten(order, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run, "fitted", lambda recipe, *rest: replace(recipe, pass_blocks=1))
        patch.setattr(trainer.Trainer, "run", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(order)
    assert read_json(order.out / "run.json")["recipe"]["pass_blocks"] == 1
    train(order)
    assert read_json(order.out / "run.json")["recipe"]["pass_blocks"] == RECIPE.pass_blocks


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]", "null", "7", "[" * 200_000, "{",
        '{"pass_blocks_asked": 6, "recipe": {"pass_blocks": true}}',
        '{"pass_blocks_asked": 6, "recipe": {"pass_blocks": -1}}',
        '{"pass_blocks_asked": 6, "recipe": ["pass_blocks"]}',
        '{"pass_blocks_asked": 7, "recipe": {"pass_blocks": 3}, "features": 1}',
    ],
)  # fmt: skip
def test_a_damaged_run_json_says_nothing_of_passes(text, tmp_path):
    file = tmp_path / "run.json"
    assert blocks_before(file, 6) is None
    file.write_text('{"pass_blocks_asked": 6, "recipe": {"pass_blocks": 3}}')
    assert blocks_before(file, 6) == 3
    file.write_text(text)
    assert blocks_before(file, 6) is None
    assert isinstance(earlier_parts(file, {}), list)


def test_a_step_reads_the_features_of_a_text_once(order, monkeypatch):
    """However many passes its blocks come into: fewer blocks a pass must not take more memory."""
    read, asked = Offline.read_all, []

    def watched(self, texts):
        asked.append(list(texts))
        return read(self, texts)

    monkeypatch.setattr(Offline, "read_all", watched)
    train(replace(order, recipe=replace(RECIPE, steps=2, pass_blocks=1, held_out=0)))
    assert len(asked) == 2
    assert all(len(texts) == len({text.name for text in texts}) >= 4 for texts in asked)


def test_a_drafter_of_another_shape_is_refused_by_what_differs(order, whole):
    with pytest.raises(UsageError) as refused:
        train(replace(order, out=whole, shape=Shape(layers=2, taps=2)))
    assert "(--layers: 1 -> 2)" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        train(replace(order, out=whole, recipe=replace(RECIPE, learning_rate=1e-5, block_size=3)))
    assert f"--block-size: {RECIPE.block_size} -> 3; --lr: " in str(refused.value)
    assert str(refused.value).count("--block-size") == 1
    with pytest.raises(UsageError, match=r"--held-out: .*; hash of the texts to train on: "):
        train(replace(order, out=whole, recipe=replace(RECIPE, held_out=0)))
    # Before features are made for it, which may take hours.
    work = order.out.parent / "work"
    with pytest.raises(UsageError, match=r"\(--soft: 0\.0 -> 0\.5\)"):
        train(replace(order, out=whole, work=work, recipe=replace(RECIPE, soft=0.5)))
    assert not list(work.rglob("features-*"))


def test_too_little_memory_is_told_before_features_are_made(order):
    with pytest.raises(UsageError, match="A pass over one block takes"):
        train(replace(order, memory_gb=1e-4))
    assert not list(order.out.parent.rglob("features-*"))


def test_stages_are_made_alone_and_taken_up(order, given, tmp_path, whole):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p", "prompt": "Why?", "max": 5}\n')
    order = replace(order, prompts=[prompts])
    told = []
    voice = Voice(told.append, lambda *at: told.append(str(at)))
    first = train(replace(order, until="answers"), voice)
    assert (first["until"], first["texts"]) == ("answers", 10)
    assert Path(first["made"]).read_text().count("\n") == 1
    assert not (order.out / "work" / "features").exists()
    second = train(replace(order, until="features"), voice)
    [kind, exact] = sorted(Path(second["made"]).glob("*/features.json"))
    assert {read_json(file)["dtype"] for file in (kind, exact)} == {"bfloat16", "float32"}
    assert read_json(kind)["taps"] == read_json(exact)["taps"]
    assert not (order.out / STATE).exists()
    with pytest.raises(UsageError, match="--until answers needs --prompts"):
        replace(order, prompts=(), until="answers")
    told.clear()
    assert train(order, voice)["steps"] == 6
    assert not [line for line in told if re.search(r"will take|'features', 0, [1-9]", line)]


def test_what_serves_the_drafter_finds_its_weights_only(order, whole):
    assert [file.name for file in whole.glob("*.safetensors")] == ["model.safetensors"]
    assert all("optimizer" not in name for name in read_weights(whole))


def test_a_state_where_earlier_versions_put_it_is_gone_on_from(order, whole, monkeypatch):
    stopped_behind(3, order, monkeypatch)
    (order.out / STATE).rename(order.out / "state.safetensors")
    (order.out / STATE).parent.rmdir()
    train(order)
    assert same(order.out, whole)
    assert not (order.out / "state.safetensors").exists()


def test_a_damaged_state_is_named(order):
    train(replace(order, recipe=replace(RECIPE, steps=2)))
    file = order.out / STATE
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="no state of a training run"):
        train(replace(order, recipe=replace(RECIPE, steps=2)))


def test_a_lost_drafter_is_not_passed_over(order):
    finished = replace(order, recipe=replace(RECIPE, steps=2))
    train(finished)
    (order.out / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="not its best drafter"):
        train(finished)
