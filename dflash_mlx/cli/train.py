"""`dflash-mlx train`: options in, progress on standard error, and a drafter in a folder."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.console import option
from dflash_mlx.cli.options import ReasoningLevel, Thinking, reasoning_of
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.train.order import Order
    from dflash_mlx.train.trainer import Report


Target = Annotated[str, typer.Argument(metavar="TARGET", help="A name that `chat` takes.")]
# Folders as text: Path("") would be the current folder.
Out = Annotated[
    str, option("The folder of the drafter and of the run's state.", "--out", metavar="PATH")
]
Prompts = Annotated[
    list[Path] | None,
    option("JSONL of prompts that the target answers first; several times.", "--prompts"),
]
Answers = Annotated[
    list[Path] | None,
    option("JSONL with prompt_ids and answer_ids of this target; several times.", "--answers"),
]
Init = Annotated[
    str,
    option(
        "First weights: the target's last layers, chance, or a drafter's.",
        "--init",
        metavar="target|random|DRAFTER",
    ),
]
Work = Annotated[
    str | None,
    option(
        "Where answers and features are kept; below --out without it.", "--work", metavar="PATH"
    ),
]
Online = Annotated[
    bool, option("Compute features while training instead of storing them.", "--online")
]
CacheLimit = Annotated[
    float | None, option("Most disk space for features.", "--cache-limit", metavar="GB")
]
CacheDtype = Annotated[
    str, option("Of stored features.", "--cache-dtype", metavar="bfloat16|float16|float32")
]
Temperature = Annotated[float, option("Of the answers to --prompts; 0 is greedy.", "--temp")]
MaxAnswer = Annotated[int, option("Longest answer, in tokens.", "--max-answer")]
Slots = Annotated[int, option("Answers generated at a time.", "--slots")]
Layers = Annotated[int | None, option("Layers of the drafter; 5 without it.", "--layers")]
BlockSize = Annotated[
    int | None,
    option("Anchor and drafts; 16 without it, or those of the drafter begun with.", "--block-size"),
]
Taps = Annotated[
    str | None,
    option("How many target layers are read, or which, as 1,8,15.", "--taps", metavar="N|LIST"),
]
Windows = Annotated[
    str | None,
    option(
        "Positions that layers of the drafter see: a number, all, or a list, as 512,512,all.",
        "--windows",
        metavar="N|LIST",
    ),
]
Causal = Annotated[
    bool | None, option("Rows of a block see earlier ones only.", "--causal/--bidirectional")
]
Selector = Annotated[
    int | None,
    option("Train DFlash 2 with a candidate selector of this rank.", "--selector-rank"),
]
MaskToken = Annotated[int | None, option("The id that stands for a mask.", "--mask-token")]
MaxLength = Annotated[int, option("Longest text, prompt included.", "--max-length")]
Gamma = Annotated[
    str | None,
    option(
        "Row k weighs exp(-(k-1)/N), paper takes N by block size; D-PACE weights without it.",
        "--gamma",
        metavar="N|paper",
    ),
]
Anchors = Annotated[int, option("Blocks a text and epoch.", "--anchors")]
StepBlocks = Annotated[int, option("Blocks of one step.", "--step-blocks")]
PassBlocks = Annotated[int, option("Blocks of one pass: less memory with fewer.", "--pass-blocks")]
Epochs = Annotated[int, option("Passes over the texts.", "--epochs")]
Steps = Annotated[int | None, option("Stop the schedule at so many steps.", "--steps")]
Rate = Annotated[float, option("Peak learning rate.", "--lr")]
Soft = Annotated[
    float,
    option("Share of the target's 32 likeliest tokens in the labels, 0 to 1.", "--soft"),
]
HeldOut = Annotated[int, option("Texts that only measure.", "--held-out")]
Every = Annotated[int, option("Steps between measurements.", "--measure-every")]
Memory = Annotated[
    float | None,
    option("Most memory; three quarters of the machine's without it.", "--memory", metavar="GB"),
]
Seed = Annotated[int, option("Of data order, answers and first weights.", "--seed")]
Dtype = Annotated[str, option("Of the target.", "--dtype", metavar="auto|bfloat16|float16|float32")]
TrainDtype = Annotated[
    str | None,
    option(
        "Of the drafter's passes; float32 without it.", "--train-dtype", metavar="float32|bfloat16"
    ),
]
Revision = Annotated[
    str | None, option("Commit, tag or branch of the target's hub repo.", "--revision")
]
Until = Annotated[
    str | None,
    option(
        "End behind this stage; the run goes on without it.", "--until", metavar="answers|features"
    ),
]
Json = Annotated[bool, option("Print one JSON document as the last line.", "--json")]


def train(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    answers: Answers = None,
    init: Init = "target",
    work: Work = None,
    online: Online = False,
    cache_limit: CacheLimit = None,
    cache_dtype: CacheDtype = "bfloat16",
    temp: Temperature = 0.0,
    max_answer: MaxAnswer = 512,
    slots: Slots = 32,
    thinking: Thinking = None,
    reasoning: ReasoningLevel = None,
    layers: Layers = None,
    block_size: BlockSize = None,
    taps: Taps = None,
    windows: Windows = None,
    causal: Causal = None,
    selector_rank: Selector = None,
    mask_token: MaskToken = None,
    max_length: MaxLength = 2048,
    gamma: Gamma = None,
    anchors: Anchors = 512,
    step_blocks: StepBlocks = 256,
    pass_blocks: PassBlocks = 64,
    epochs: Epochs = 6,
    steps: Steps = None,
    lr: Rate = 6e-4,
    soft: Soft = 0.0,
    held_out: HeldOut = 48,
    measure_every: Every = 200,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    train_dtype: TrainDtype = None,
    memory: Memory = None,
    revision: Revision = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Train a drafter for TARGET; the same command goes on where it was stopped."""
    options = dict(locals())
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # the next lines import MLX
    from dflash_mlx.train.interrupt import exit_code, stopped_by_signals
    from dflash_mlx.train.run import Voice
    from dflash_mlx.train.run import train as carry_out

    try:
        with stopped_by_signals():
            result = carry_out(_order(options), Voice(console.say, _Stages().show, _show))
    except KeyboardInterrupt as stopped:
        with suppress(OSError):  # the terminal may be what went away
            console.say("Stopped. The same command goes on from what has been stored.")
        raise typer.Exit(exit_code(stopped)) from None
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        rows = [(name.replace("_", " "), str(value)) for name, value in result.items()]
        console.show_rows(rows, sys.stdout)


def _order(given: dict[str, Any]) -> Order:
    """The options as the trainer takes them; UsageError for values that mean nothing."""
    from dflash_mlx.train.order import Order
    from dflash_mlx.train.recipe import Recipe
    from dflash_mlx.train.shape import Shape

    shape = {name: given[name] for name in ("layers", "causal", "selector_rank")}
    settings = {**given, "learning_rate": given["lr"], "dtype": given["train_dtype"] or "float32"}
    if given["block_size"] is None:
        del settings["block_size"]  # the recipe's own
    if given["gamma"] is not None:
        settings |= {"weights": "decay", "gamma": _gamma(given["gamma"])}
    return Order(
        target=given["target"],
        out=_folder("--out", given["out"]),
        recipe=Recipe(**{f.name: settings[f.name] for f in fields(Recipe) if f.name in settings}),
        shape=Shape(
            **shape,
            taps=_taps(given["taps"]),
            windows=_windows(given["windows"]),
            mask_token_id=given["mask_token"],
        ),
        prompts=given["prompts"] or (),
        answers=given["answers"] or (),
        init=given["init"],
        work=None if given["work"] is None else _folder("--work", given["work"]),
        online=given["online"],
        cache_limit_gb=given["cache_limit"],
        cache_dtype=given["cache_dtype"],
        temperature=given["temp"],
        max_answer=given["max_answer"],
        slots=given["slots"],
        thinking=reasoning_of(given["thinking"], given["reasoning"]),
        block_size=given["block_size"],
        dtype=given["dtype"],
        revision=given["revision"],
        memory_gb=given["memory"],
        until=given["until"],
    )


def _folder(option_name: str, given: str) -> Path:
    if not given.strip():
        raise UsageError(f"{option_name} is empty. Give a folder.")
    return Path(given)


def _taps(given: str | None) -> int | tuple[int, ...] | None:
    if given is None:
        return None
    try:
        numbers = [int(part) for part in given.split(",")]
    except ValueError:
        raise UsageError(
            f"--taps {given} is no number and no list of layers. Give 5, or 1,8,15."
        ) from None
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _gamma(given: str) -> float | None:
    if given == "paper":
        return None
    try:
        return float(given)
    except ValueError:
        raise UsageError(f"--gamma {given} is no number. Give one, or paper.") from None


def _windows(given: str | None) -> int | tuple[int | None, ...] | None:
    if given is None:
        return None
    try:
        windows = tuple(None if part == "all" else int(part) for part in given.split(","))
    except ValueError:
        raise UsageError(
            f"--windows {given} is no number and no list of them. Give 512, or 512,512,all."
        ) from None
    # "all" alone takes the windows of a drafter begun with away; None would leave them.
    return windows[0] if len(windows) == 1 and windows[0] is not None else windows


#: seconds without a line at which a person begins to wonder
_SILENCE = 120


class _Stages:
    """A line for each tenth of a stage and every two minutes, with the time left."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, float]] = {}  # tenth, when
        self._done: dict[str, int] = {}
        self._began: dict[str, tuple[float, int]] = {}

    def show(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < self._done.get(name, 0):  # its next part, as of features of texts held out
            del self._began[name], self._shown[name]
        self._done[name] = done
        began, first = self._began.setdefault(name, (now, done))
        tenth = 10 * done // max(1, total)
        before, when = self._shown.get(name, (-1, now))
        if before != tenth or now - when >= _SILENCE:
            self._shown[name] = tenth, now
            known = first < done < total
            left = (now - began) * (total - done) / (done - first) if known else 0
            console.say(f"{name}: {done} of {total}" + (f", {_clock(left)} left" if known else ""))


def _show(report: Report) -> None:
    if report.step == 0:
        console.say(f"the drafter begun with: τ {report.tau:.3f}")
        return
    rows = " ".join(f"{share:.2f}" for share in report.accuracy)
    measured = "" if report.tau is None else f"  τ {report.tau:.3f} (best {report.best_tau:.3f})"
    console.say(
        f"step {report.step}/{report.steps}  loss {report.loss:.3f}  rows {rows}{measured}  "
        f"{report.positions_a_second:.0f} tokens/s  {_clock(report.seconds_left)} left"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
