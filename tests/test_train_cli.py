"""Options of `dflash-mlx train` reach the order they stand for, and its end its exit code."""

from __future__ import annotations

import errno
import signal
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from dflash_mlx.cli import app, console, main
from dflash_mlx.cli import train as cli_train
from dflash_mlx.train import run, wording
from dflash_mlx.train.interrupt import Ended
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe


def ordered(monkeypatch, tmp_path: Path, *options: str) -> Order:
    asked: list[Order] = []
    monkeypatch.setattr(run, "train", lambda order, voice: asked.append(order) or {})
    with pytest.raises(SystemExit) as end:
        main(["train", "target", "--out", str(tmp_path), "--answers", "a.jsonl", *options])
    assert not end.value.code
    return asked[0]


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--temp", "0.7"], "temperature", 0.7),
        (["--max-answer", "77"], "max_answer", 77),
        (["--slots", "5"], "slots", 5),
        (["--online"], "online", True),
        (["--cache-limit", "1.5"], "cache_limit_gb", 1.5),
        (["--cache-dtype", "float16"], "cache_dtype", "float16"),
        (["--memory", "3"], "memory_gb", 3.0),
        (["--until", "features", "--prompts", "p.jsonl"], "until", "features"),
        (["--init", "org/drafter"], "init", "org/drafter"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--revision", "v2"], "revision", "v2"),
        (["--answers", "b.jsonl"], "answers", [Path("a.jsonl"), Path("b.jsonl")]),
    ],
)
def test_what_is_asked_for_is_ordered(options, name, value, monkeypatch, tmp_path):
    assert getattr(ordered(monkeypatch, tmp_path, *options), name) == value


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--windows", "512"], "windows", 512),
        (["--windows", "512,all"], "windows", (512, None)),
        (["--windows", "all"], "windows", (None,)),
        (["--taps", "3"], "taps", 3),
        (["--taps", "1,8,15"], "taps", (1, 8, 15)),
        (["--layers", "3"], "layers", 3),
        (["--causal"], "causal", True),
        (["--bidirectional"], "causal", False),
        (["--selector-rank", "32"], "selector_rank", 32),
        (["--mask-token", "9"], "mask_token_id", 9),
    ],
)
def test_the_shape_asked_for_is_ordered(options, name, value, monkeypatch, tmp_path):
    assert getattr(ordered(monkeypatch, tmp_path, *options).shape, name) == value


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--soft", "0.3"], "soft", 0.3),
        (["--lr", "0.002"], "learning_rate", 0.002),
        (["--steps", "12"], "steps", 12),
        (["--epochs", "2"], "epochs", 2),
        (["--anchors", "9"], "anchors", 9),
        (["--step-blocks", "8"], "step_blocks", 8),
        (["--pass-blocks", "4"], "pass_blocks", 4),
        (["--max-length", "99"], "max_length", 99),
        (["--held-out", "7"], "held_out", 7),
        (["--measure-every", "5"], "measure_every", 5),
        (["--seed", "3"], "seed", 3),
        (["--train-dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--block-size", "8"], "block_size", 8),
    ],
)
def test_the_recipe_asked_for_is_ordered(options, name, value, monkeypatch, tmp_path):
    assert getattr(ordered(monkeypatch, tmp_path, *options).recipe, name) == value


def test_a_stage_tells_how_long_it_will_take(monkeypatch):
    said, clock = [], iter(range(0, 1000, 90))
    monkeypatch.setattr(console, "say", said.append)
    monkeypatch.setattr(cli_train.time, "monotonic", lambda: next(clock))
    stages = cli_train._Stages()
    for done in (2, 2, 5, 10):  # two were there before
        stages.show("answers", done, 10)
    assert said == ["answers: 2 of 10", "answers: 5 of 10, 0:05:00 left", "answers: 10 of 10"]
    said.clear()
    # The second part has a clock of its own.
    for done, total in ((0, 10), (10, 10), (0, 4), (1, 4)):
        stages.show("features", done, total)
    assert said[2:] == ["features: 0 of 4", "features: 1 of 4, 0:04:30 left"]
    said.clear()
    for done in (0, 1, 2, 3):  # all within a tenth, which may take an hour
        stages.show("features", done, 1000)
    assert said == ["features: 0 of 1000", "features: 2 of 1000, 24:57:00 left"]


@pytest.mark.parametrize("terminal_gone", [False, True])
@pytest.mark.parametrize(
    ("stopped", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Ended(signal.SIGTERM), 143),
        (Ended(signal.SIGHUP), 129),
    ],
)
def test_a_stopped_run_ends_with_the_code_of_its_signal(
    stopped, code, terminal_gone, monkeypatch, tmp_path, capsys
):
    def gone(text):
        raise OSError(errno.EIO, "Input/output error")

    def ends(order, voice):
        raise stopped

    monkeypatch.setattr(run, "train", ends)
    if terminal_gone:
        monkeypatch.setattr(console, "say", gone)
    with pytest.raises(SystemExit) as end:
        main(["train", "target", "--out", str(tmp_path), "--answers", "a.jsonl"])
    assert end.value.code == code
    told = "The same command goes on from what has been stored." in capsys.readouterr().err
    assert told != terminal_gone


def test_settings_are_named_by_options_that_there_are():
    params = get_command(app).commands["train"].params
    options = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    settings = {*wording._OPTIONS, *wording._NAMED_LIKE_OPTIONS}
    named = {wording.as_option(name) for name in settings}
    assert {name for name in named if name.startswith("--")} <= options
    assert wording._NAMED_LIKE_OPTIONS - {"init"} <= {field.name for field in fields(Recipe)}
