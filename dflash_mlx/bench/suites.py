"""Prompts of the benchmark: the samples that come with the package, or a file of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import SourceError, UsageError
from dflash_mlx.paths import assets_dir

#: suites of which samples come with the package; their sources and licences stand beside them
SUITES = ("gsm8k", "humaneval", "mbpp", "mt-bench")


@dataclass(frozen=True)
class Question:
    """The first turn of a prompt."""

    name: str
    text: str


def samples(suite: str, count: int) -> list[Question]:
    """The first `count` prompts of a suite; UsageError for one that is not known."""
    if suite not in SUITES:
        raise UsageError(f"There is no suite {suite!r}. Give some of {', '.join(SUITES)}.")
    return read_prompts(assets_dir() / "prompts" / f"{suite}.jsonl", count)


def read_prompts(file: Path, count: int) -> list[Question]:
    """The first `count` prompts of a file: a JSON object a line with `turns`, or with `prompt`.

    Errors name the line.
    """
    if count < 1:
        raise UsageError(f"--samples is {count}. Give a whole number above 0.")
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise SourceError(
            f"The prompts of {file} cannot be read: {error.strerror}. Name a file that exists."
        ) from None
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{file} is not UTF-8 text (byte {error.start}). Convert it first."
        ) from None
    found = [_question(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SourceError(f"{file} has no prompts. Write one JSON object a line.")
    return found[:count]


def _question(line: str, number: int, file: Path) -> Question:
    place = f"{file}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SourceError(
            f"{place} is not JSON ({error}). Write an object with `prompt` or `turns`."
        ) from None
    text = None
    if isinstance(entry, dict):
        turns = entry.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise SourceError(
            f"{place} has no prompt. Write an object with `prompt` (a text) or `turns` (texts)."
        )
    return Question(str(entry.get("id", number)), text)
