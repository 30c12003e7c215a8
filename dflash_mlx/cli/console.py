"""What the commands show of an answer: streamed text, reasoning, warnings, statistics.

The answer alone goes to standard output; everything said about it goes to standard error.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from dflash_mlx.engine import Chunk

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model must not be able to steer the terminal: control characters other than tab and newline.
_CONTROLS = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"
)


def option(text: str, *names: str, metavar: str | None = None) -> Any:
    """A command's option; a default that is not None is shown behind the text."""
    return typer.Option(*names, help=text, metavar=metavar)


class AnswerWriter:
    """Writes chunks as they come; on a terminal reasoning is dimmed, in a pipe it is kept out.

    Reasoning goes to standard error when standard output is no terminal.
    """

    def __init__(self, out: TextIO | None = None, aside: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._aside = aside or sys.stderr
        self._terminal = self._out.isatty()
        self._reasoning = False  # the last thing written was reasoning
        self._line_open = False

    def write(self, chunk: Chunk) -> None:
        if chunk.reasoning:
            self._write_reasoning(chunk.reasoning)
        if chunk.text:
            self._close_reasoning()
            self._out.write(chunk.text.translate(_CONTROLS) if self._terminal else chunk.text)
            self._out.flush()
            self._line_open = not chunk.text.endswith("\n")

    def end(self) -> None:
        """Finish the last line."""
        self._close_reasoning()
        if self._line_open:
            print(file=self._out, flush=True)
            self._line_open = False

    def _write_reasoning(self, text: str) -> None:
        self._reasoning = True
        if self._terminal:
            print(f"{DIM}{text.translate(_CONTROLS)}{PLAIN}", end="", file=self._out, flush=True)
        else:
            print(text, end="", file=self._aside, flush=True)

    def _close_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            print("\n", file=self._out if self._terminal else self._aside, flush=True)


class Warnings:
    """Shows every warning of an engine once, on standard error."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            if sentence not in self._shown:
                self._shown.add(sentence)
                say(f"warning: {sentence}")


def say(text: str) -> None:
    """A remark for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _rate(value: float | None) -> str:
    return f"{value:.1f} tok/s" if value is not None else "no rate"


def stats_rows(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """The statistics of one generation (`GenerationStats.to_json()`) as label and text."""
    engine = stats["engine"] + (f" ({stats['engine_reason']})" if stats["engine_reason"] else "")
    cached = f", {stats['cached_tokens']} of them kept" if stats["cached_tokens"] else ""
    rows = [
        ("model", stats["model"]),
        ("engine", engine),
        ("prompt", f"{stats['prompt_tokens']} tokens{cached}"),
        ("prefill", f"{stats['prefill_seconds']:.2f} s, {_rate(stats['prefill_tps'])}"),
        ("generated", f"{stats['generation_tokens']} tokens ({stats['finish_reason']})"),
        ("generation", f"{stats['generation_seconds']:.2f} s, {_rate(stats['generation_tps'])}"),
        ("total", f"{stats['total_seconds']:.2f} s including prefill"),
    ]
    if stats["drafter"]:
        rows.insert(1, ("drafter", stats["drafter"]))
    if stats["cycles"]:
        rows += [
            ("tokens per cycle", f"{stats['tokens_per_cycle']:.2f} over {stats['cycles']} cycles"),
            ("accepted", f"{stats['accepted']} of {stats['drafted']} drafted tokens"),
        ]
    if stats["reduced_cycles"]:
        rows.append(("draft head", f"reduced in {stats['reduced_cycles']} of these cycles"))
    if stats["block_policy"]:
        named = f", calibration {stats['calibration']}" if stats["calibration"] else ""
        rows.append(("block", stats["block_policy"] + named))
    rows += [("peak memory", f"{stats['peak_memory_gb']:.2f} GB"), ("BLAS", stats["blas"])]
    return [*rows, ("kernels", stats["kernels"])]


def show_stats(stats: dict[str, Any]) -> None:
    """The block of statistics, on standard error."""
    show_rows(stats_rows(stats), sys.stderr)


def show_rows(rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Lines of aligned columns; the first column is dimmed on a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before, after = (DIM, PLAIN) if file.isatty() else ("", "")
    for first, *others in rows:
        rest = "  ".join(cell.ljust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"{before}{first.ljust(widths[0])}{after}  {rest}".rstrip(), file=file)


def width(file: TextIO) -> int:
    """Characters of a line: the terminal's; in a pipe there is no limit."""
    return shutil.get_terminal_size().columns if file.isatty() else sys.maxsize


def brief_stats(stats: dict[str, Any]) -> str:
    """One line for a turn of a session."""
    cycles = f", {stats['tokens_per_cycle']:.2f} tokens per cycle" if stats["cycles"] else ""
    return (
        f"[{stats['engine']}: {stats['generation_tokens']} tokens, "
        f"{_rate(stats['generation_tps'])}{cycles}, {stats['total_seconds']:.1f} s]"
    )
