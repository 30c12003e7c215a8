"""`dflash-mlx bench`: plain decoding and DFlash on the same prompts, and what may be said of it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.chat import DTYPES, Dtype, Exact, Model, parse_block_size
from dflash_mlx.cli.console import option
from dflash_mlx.cli.options import Thinking, check_place
from dflash_mlx.errors import DFlashError, UsageError

if TYPE_CHECKING:
    from dflash_mlx.bench.job import Group
    from dflash_mlx.bench.questions import Loaded
    from dflash_mlx.bench.rival import MlxLm
    from dflash_mlx.engine import Engine

_SUITES = (
    "gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca, gpqa, longbench"
)
DEFAULT_SUITE = "gsm8k"
_LONGEST_REST = 86400  # seconds

Suite = Annotated[
    str | None,
    option(
        f"Suites, with commas between: {_SUITES}. Without it {DEFAULT_SUITE}.",
        "--suite",
        metavar="LIST",
    ),
]
Prompts = Annotated[
    Path | None, option("Prompts of a JSON Lines file instead.", "--prompts", metavar="FILE")
]
Data = Annotated[
    str | None,
    option(
        "Where suites come from: the hub, or a folder. Without it the package's 16 samples where "
        "they suffice, else the hub.",
        "--data",
        metavar="hub|FOLDER",
    ),
]
Samples = Annotated[
    int | None, option("Prompts of each suite: 16, and all of a file, without it.", "--samples")
]
MaxTokens = Annotated[int, option("Most tokens of an answer.", "--max-tokens")]
Temps = Annotated[str, option("Temperatures, with commas between.", "--temp", metavar="LIST")]
Context = Annotated[
    str | None,
    option(
        "Bring prompts to these lengths in tokens: documents are cut, others get text in front.",
        "--context",
        metavar="LIST",
    ),
]
Repeats = Annotated[int, option("Rounds over the prompts.", "--repeats")]
CoolDown = Annotated[float, option("Seconds of rest before a run.", "--cool-down")]
NoPrefill = Annotated[bool, option("The headline leaves prefill out, and says so.", "--no-prefill")]
Draft = Annotated[
    str | None, option("Draft with this drafter.", "--draft", metavar="REPO_OR_FOLDER")
]
BlockSize = Annotated[str, option("As of `chat`.", "--block-size")]
Against = Annotated[
    str | None, option("Another program on the same weights.", "--against", metavar="mlx-lm")
]
Json = Annotated[bool, option("Print one JSON document on the last line.", "--json")]
Markdown = Annotated[
    Path | None, option("Write the report to this file.", "--markdown", metavar="FILE")
]
Html = Annotated[
    Path | None, option("Write a page with plots to this file.", "--html", metavar="FILE")
]


def bench(
    model: Model = "SmolLM2-135M",
    suite: Suite = None,
    prompts: Prompts = None,
    data: Data = None,
    samples: Samples = None,
    max_tokens: MaxTokens = 128,
    temp: Temps = "0",
    thinking: Thinking = None,
    context: Context = None,
    repeats: Repeats = 1,
    cool_down: CoolDown = 0.0,
    no_prefill: NoPrefill = False,
    draft: Draft = None,
    block_size: BlockSize = "auto",
    against: Against = None,
    exact: Exact = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
    markdown: Markdown = None,
    html: Html = None,
) -> None:
    """Measure plain decoding against DFlash, prompt by prompt on one loaded model."""
    block = parse_block_size(block_size)
    _check(samples, max_tokens, repeats, cool_down, dtype)
    _check_against(against, exact)
    _check_sources(suite, prompts, data)
    temperatures = _temperatures(temp)
    reports = {"--markdown": markdown, "--html": html}
    for name, file in reports.items():
        check_place(name, file)
    _check_distinct(reports, {"--prompts": prompts})
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # before anything below imports MLX
    from dflash_mlx.bench import contexts, job, play
    from dflash_mlx.decode.sampling import SamplingParams

    for temperature in temperatures:
        SamplingParams(temperature)  # refused now, not behind the first group
    settings = play.Settings(max_tokens, repeats=repeats, cool_down=cool_down, thinking=thinking)
    lengths = tuple(contexts.lengths(context))
    loaded, wanted = _load(suite, prompts, data, samples)
    if data not in (None, "hub"):
        _check_distinct(reports, {f"--data for {n}": Path(s.source) for n, s in loaded.items()})
    from dflash_mlx import engine as engines

    engine = engines.load(model, draft=draft or "auto", dtype=dtype, block_size=block, exact=exact)
    plan = job.Plan(settings, temperatures, lengths, wanted)
    groups = job.groups(engine, loaded, plan)
    notes = job.shortfalls(groups, plan) + job.first_turns(loaded)
    notes += job.beyond_costs(engine, groups, plan)
    for sentence in notes:
        console.say(sentence)
    player = play.Player(engine, _rival(engine) if against else None)
    failure = _follow(job.run(player, groups))
    found = job.document(engine, plan, loaded, groups, notes, failure is not None)
    _show(found, as_json, not no_prefill, markdown, html)
    if isinstance(failure, DFlashError):
        raise failure
    if failure is not None:
        raise typer.Exit(console.INTERRUPTED)


def _check(
    samples: int | None,
    max_tokens: int,
    repeats: int,
    cool_down: float,
    dtype: str,
) -> None:
    for name, number in (("--samples", samples), ("--repeats", repeats)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}. Give a whole number above 0.")
    if max_tokens < 2:
        raise UsageError(f"--max-tokens is {max_tokens}. A rate needs at least 2.")
    if not 0 <= cool_down <= _LONGEST_REST:
        raise UsageError(f"--cool-down is {cool_down}. Give seconds, from 0 to {_LONGEST_REST}.")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")


def _check_against(against: str | None, exact: bool) -> None:
    if against not in (None, "mlx-lm"):
        raise UsageError(f"--against is {against!r}. The only other program is mlx-lm.")
    if against is not None and exact:
        raise UsageError(
            "--against and --exact contradict each other: mlx-lm has ordinary operations only. "
            "Leave one out."
        )


def _check_sources(suite: str | None, prompts: Path | None, data: str | None) -> None:
    for name, given in (("--suite", suite), ("--data", data)):
        if prompts is not None and given is not None:
            raise UsageError(
                f"{name} and --prompts contradict each other: a file is no suite. Leave one out."
            )


def _temperatures(given: str) -> tuple[float, ...]:
    found = []
    for item in given.split(","):
        try:
            value = float(item)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise UsageError(f"--temp has {item!r}. Give numbers from 0, such as 0,1.")
        found.append(value)
    if len(set(found)) < len(found):
        raise UsageError(f"--temp {given} names a temperature twice. Name each once.")
    return tuple(found)


def _check_distinct(reports: dict[str, Path | None], read: dict[str, Path | None]) -> None:
    """A report may replace neither the other one nor what the prompts are read from."""
    seen: dict[str, str] = {}
    for name, file in [*read.items(), *reports.items()]:
        if file is None:
            continue
        other = seen.setdefault(os.path.realpath(file), name)
        if other != name and name in reports:
            raise UsageError(f"{name} would replace {file}, the file of {other}. Name another one.")


def _load(
    suite: str | None, prompts: Path | None, data: str | None, samples: int | None
) -> tuple[dict[str, Loaded], int | None]:
    """Prompts by suite, and how many of each are wanted; None for all."""
    from dflash_mlx.bench import questions
    from dflash_mlx.bench.suites import suite_names

    if prompts is not None:
        return {prompts.stem: questions.from_file(prompts)}, samples
    names = suite_names(suite or DEFAULT_SUITE)
    wanted = samples or questions.SAMPLES
    return {name: questions.load(name, wanted, data) for name in names}, wanted


def _rival(engine: Engine) -> MlxLm:
    from dflash_mlx.bench.rival import MlxLm
    from dflash_mlx.loader import read_target_config

    assert engine.path is not None
    return MlxLm(engine, read_target_config(engine.path))


def _follow(running: Iterable[Group]) -> BaseException | None:
    """Run, telling each pair; what ended it early, so that the pairs before it are shown."""
    try:
        for group in running:
            console.say(f"{group.label}: {len(group.pairs)} of {group.total}")
    except (KeyboardInterrupt, DFlashError) as failure:
        return failure
    return None


def _show(
    found: dict[str, Any],
    as_json: bool,
    with_prefill: bool,
    markdown: Path | None,
    html: Path | None,
) -> None:
    from dflash_mlx.bench import page, report

    out = sys.stderr if as_json else sys.stdout
    for table in report.tables(found, with_prefill=with_prefill, width=console.width(out)):
        console.show_rows(table, out)
    for sentence in report.remarks(found):
        console.say(sentence)
    if as_json:  # before the files, which a full disk may refuse
        print(json.dumps(found), flush=True)
    if not found["suites"] and (markdown or html):
        console.say("Nothing was measured, so no report is written.")
        return
    for file, make in ((markdown, report.markdown), (html, page.page)):
        if file is None:
            continue
        try:
            file.write_text(make(found, with_prefill=with_prefill), "utf-8")
        except OSError as error:
            raise UsageError(
                f"{file} cannot be written ({error.strerror}). The numbers are those shown above."
            ) from None
