"""`dflash-mlx bench`: plain decoding and DFlash on the same prompts, and what may be said of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.chat import DTYPES, Dtype, Model, parse_block_size
from dflash_mlx.cli.console import option
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.bench.measure import Pair
    from dflash_mlx.bench.play import Settings
    from dflash_mlx.bench.suites import Question
    from dflash_mlx.engine import Engine


def bench(
    model: Model = "SmolLM2-135M",
    suite: Annotated[str, option("Suites, with commas between.", "--suite")] = "gsm8k",
    prompts: Annotated[
        Path | None, option("Prompts of a JSON Lines file.", "--prompts", metavar="FILE")
    ] = None,
    samples: Annotated[int, option("Prompts of each suite.", "--samples")] = 16,
    max_tokens: Annotated[int, option("Most tokens of an answer.", "--max-tokens")] = 128,
    temp: Annotated[float, option("Temperature.", "--temp")] = 0.0,
    repeats: Annotated[int, option("Rounds over the prompts.", "--repeats")] = 1,
    cool_down: Annotated[float, option("Seconds of rest before a run.", "--cool-down")] = 0.0,
    no_prefill: Annotated[
        bool, option("The headline leaves prefill out, and says so.", "--no-prefill")
    ] = False,
    draft: Annotated[
        str | None, option("Draft with this drafter.", "--draft", metavar="REPO_OR_FOLDER")
    ] = None,
    block_size: Annotated[str, option("As of `chat`.", "--block-size")] = "auto",
    against: Annotated[
        str | None, option("Another program on the same weights.", "--against", metavar="mlx-lm")
    ] = None,
    dtype: Dtype = "auto",
    as_json: Annotated[bool, option("Print one JSON document on the last line.", "--json")] = False,
    markdown: Annotated[
        Path | None, option("Write the report to this file.", "--markdown", metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, option("Write a page with plots to this file.", "--html", metavar="FILE")
    ] = None,
) -> None:
    """Measure plain decoding against DFlash, prompt by prompt on one loaded model."""
    block = parse_block_size(block_size)
    _check(samples, max_tokens, temp, repeats, cool_down, dtype)
    if against not in (None, "mlx-lm"):
        raise UsageError(f"--against is {against!r}. The only other program is mlx-lm.")
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # before anything below imports MLX
    from dflash_mlx.bench.suites import read_prompts
    from dflash_mlx.bench.suites import samples as samples_of

    if prompts is not None:
        wanted = {prompts.stem: read_prompts(prompts, samples)}
    else:
        wanted = {name: samples_of(name, samples) for name in suite.split(",")}
    from dflash_mlx import engine as engines
    from dflash_mlx.bench import page, play, report

    engine = engines.load(model, draft=draft or "auto", dtype=dtype, block_size=block)
    settings = play.Settings(max_tokens, temp, repeats=repeats, cool_down=cool_down)
    for file in (markdown, html):
        _check_place(file)
    for questions in wanted.values():
        play.check(engine, questions, settings)
    rival = None
    if against is not None:
        from dflash_mlx.bench.rival import MlxLm
        from dflash_mlx.loader import read_target_config

        assert engine.path is not None
        rival = MlxLm(engine, read_target_config(engine.path))
    pairs, partial = _play(wanted, settings, lambda some: play.play(engine, some, settings, rival))
    head = _head(engine, settings, samples)
    found = _report(head, pairs, engine, partial)
    if markdown is not None:
        markdown.write_text(report.markdown(found, with_prefill=not no_prefill), "utf-8")
    if html is not None:
        html.write_text(page.page(found, with_prefill=not no_prefill), "utf-8")
    console.show_rows(
        report.rows(found, with_prefill=not no_prefill), sys.stderr if as_json else sys.stdout
    )
    for sentence in report.remarks(found):
        console.say(sentence)
    if as_json:
        print(json.dumps(found))
    if partial:
        raise typer.Exit(console.INTERRUPTED)


def _check(
    samples: int, max_tokens: int, temp: float, repeats: int, cool_down: float, dtype: str
) -> None:
    for name, number in (("--samples", samples), ("--repeats", repeats)):
        if number < 1:
            raise UsageError(f"{name} is {number}. Give a whole number above 0.")
    if max_tokens < 2:
        raise UsageError(f"--max-tokens is {max_tokens}. A rate needs at least 2.")
    if not 0 <= temp < float("inf"):
        raise UsageError(f"--temp is {temp}. Give 0 or a number above it.")
    if not 0 <= cool_down < float("inf"):
        raise UsageError(f"--cool-down is {cool_down}. Give seconds, 0 or more.")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")


def _check_place(file: Path | None) -> None:
    """A report that cannot be kept is refused before hours of measuring, not after."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise UsageError(f"{file} cannot be written: no such folder. Name a file in one that is.")


def _play(
    wanted: dict[str, list[Question]],
    settings: Settings,
    play: Callable[[list[Question]], Iterable[Pair]],
) -> tuple[dict[str, list[Pair]], bool]:
    """Pairs by suite, and whether Ctrl-C ended it early."""
    pairs: dict[str, list[Pair]] = {}
    try:
        for name, questions in wanted.items():
            pairs[name] = []
            total = len(questions) * settings.repeats
            for pair in play(questions):
                pairs[name].append(pair)
                console.say(f"{name}: {len(pairs[name])} of {total}")
    except KeyboardInterrupt:
        return pairs, True
    return pairs, False


def _report(
    head: dict[str, Any], pairs: dict[str, list[Pair]], engine: Engine, partial: bool
) -> dict[str, Any]:
    from dflash_mlx.bench import measure, report
    from dflash_mlx.loader import dtype_name

    dtype = dtype_name(engine.target.dtype)
    suites = {name: measure.summarise(found, dtype) for name, found in pairs.items()}
    every = [p for found in pairs.values() for p in found]
    summary = measure.summarise(every, dtype)
    return report.document(head, suites, summary, measure.points(every), partial)


def _head(engine: Engine, settings: Settings, samples: int) -> dict[str, Any]:
    import platform

    from dflash_mlx import machine
    from dflash_mlx.loader import dtype_name

    stats = engine.new_stats()
    policy = f"auto, blocks of {engine.block_size} at most" if engine.automatic else "fixed"
    return {
        "model": engine.model,
        "drafter": engine.drafter_name,
        "machine": {
            "chip": machine.chip(),
            "system": f"{platform.system()} {platform.release()}",
            "back_end": machine.back_end()[0],
            "blas": stats.blas,
            "kernels": stats.kernels,
            "versions": stats.versions,
        },
        "settings": {
            **asdict(settings),
            "samples": samples,
            "block_policy": policy,
            "block_size": engine.block_size,
            "dtype": dtype_name(engine.target.dtype),
            "model_revision": engine.revisions[0],
            "drafter_revision": engine.revisions[1],
        },
    }
