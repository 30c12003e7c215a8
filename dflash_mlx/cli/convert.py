"""`dflash-mlx convert`: options in, a progress bar, and what was made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.console import option

if TYPE_CHECKING:
    from dflash_mlx.convert import Report

_SOURCE = "A name of `dflash-mlx models`, a hub id, a folder or a GGUF file."
_DESTINATION = "The folder to make; without it one here, named by model and recipe."
_DRAFTER = "Put this drafter beside the target; a name of `models` brings its own."
_DRAFT_BITS = "Hold the drafter in so many bits when it is loaded; on disk it is bfloat16."


Source = Annotated[str, typer.Argument(metavar="SRC", help=_SOURCE)]
Destination = Annotated[
    Path | None, typer.Argument(metavar="DST", help=_DESTINATION, show_default=False)
]
Bits = Annotated[
    int | None, option("Bits of a weight; 4 without it.", "--bits", metavar="2|3|4|5|6|8")
]
GroupSize = Annotated[
    int | None,
    option("Weights that share a scale; 64 without it.", "--group-size", metavar="32|64|128"),
]
Mode = Annotated[
    str | None,
    option("The number format; affine without it.", "--mode", metavar="affine|mxfp4|mxfp8|nvfp4"),
]
Mixed = Annotated[
    str | None,
    option(
        "Two numbers of bits, more where it matters, as mlx-lm mixes them.",
        "--recipe",
        metavar="mixed_2_6|3_4|3_6|4_6",
    ),
]
DrafterName = Annotated[str | None, option(_DRAFTER, "--drafter", metavar="REPO_OR_FOLDER")]
DraftBits = Annotated[int | None, option(_DRAFT_BITS, "--draft-bits", metavar="4|8")]
Dtype = Annotated[
    str | None,
    option(
        "Float type of what is not quantized; the checkpoint's own without it.",
        "--dtype",
        metavar="bfloat16|float16|float32",
    ),
]
Revision = Annotated[
    str | None, option("Commit, tag or branch of the model's hub repo.", "--revision")
]
DryRun = Annotated[bool, option("Check and count everything, write nothing.", "--dry-run")]
Json = Annotated[bool, option("Print one JSON document.", "--json")]


def convert(
    source: Source,
    destination: Destination = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    mode: Mode = None,
    recipe: Mixed = None,
    drafter: DrafterName = None,
    draft_bits: DraftBits = None,
    dtype: Dtype = None,
    revision: Revision = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make a quantized MLX folder of SRC, its drafter inside."""
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # the next line imports MLX
    from dflash_mlx.convert import Order, Recipe
    from dflash_mlx.convert import convert as carry_out

    order = Order(
        source=source,
        destination=destination,
        recipe=Recipe(bits, group_size, mode, recipe, dtype),
        drafter=drafter,
        draft_bits=draft_bits,
        revision=revision,
        dry_run=dry_run,
    )
    try:
        with _bar() as progress:
            report = carry_out(order, progress)
    except KeyboardInterrupt:
        console.say("Stopped. The same command goes on from here; to give up, delete the folder.")
        raise
    if report.self_check and not report.self_check["as_expected"]:
        console.say(f"The self-check found {report.self_check['verdict']}.")
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        console.show_rows(_rows(report), sys.stdout)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with bytes and the time left; nothing when that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not terminal) as bar:
        task = bar.add_task("writing", total=None, visible=False)

        def show(done: int, total: int) -> None:
            whole = done >= total
            text = "checking" if whole else "writing"
            bar.update(task, completed=done, total=total, visible=True, description=text)

        yield show


def _rows(report: Report) -> list[tuple[str, str]]:
    """What a person wants to know of a conversion, as label and text."""
    recipe = report.recipe
    how = recipe["mixed"] or f"{recipe['mode']}, {recipe['bits']} bits"
    rows = [
        ("would write" if report.dry_run else "written", report.destination),
        ("from", report.source),
        ("recipe", f"{how}, groups of {recipe['group_size']}"),
        ("weights", _sizes(report)),
    ]
    if report.download_bytes:
        rows.append(("to fetch first", console.gigabytes(report.download_bytes)))
    if report.modules_quantized is not None:
        kept = f", {report.modules_kept} kept as they were" if report.modules_kept else ""
        rows.append(("quantized", f"{report.modules_quantized} modules{kept}"))
    if report.drafter:
        rows.append(("drafter", report.drafter))
    if report.resumed_bytes:
        rows.append(("taken up", f"{console.gigabytes(report.resumed_bytes)} of an earlier run"))
    if report.self_check:
        worst = report.self_check["worst"]
        rows.append(
            ("self-check", f"largest relative error {worst['error']:.3g}, at {worst['where']}")
        )
        rows.append(("verdict", report.self_check["verdict"]))
    rows += [("remark", remark) for remark in report.remarks]
    if report.seconds is not None:
        rows.append(("seconds", f"{report.seconds:.1f}"))
    return rows


def _sizes(report: Report) -> str:
    result = console.gigabytes(report.result_bytes)
    about = "about " if report.download_bytes else ""
    if report.source_bytes is None:
        return f"{about}{result}"
    return f"{about}{result}, from {console.gigabytes(report.source_bytes)}"
