"""Prompts of the benchmark: the samples that come with the package, or a file of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import UsageError
from dflash_mlx.paths import assets_dir
from dflash_mlx.prompt import Message
from dflash_mlx.train.prompts import Prompt
from dflash_mlx.train.prompts import read_prompts as read_all

#: suites of which samples come with the package; their sources and licences stand beside them
SUITES = ("gsm8k", "humaneval", "mbpp", "mt-bench")


@dataclass(frozen=True)
class Question:
    """A prompt up to its first answer, as `Engine.generate` takes it."""

    name: str
    prompt: str | Sequence[Message]


def samples(suite: str, count: int) -> list[Question]:
    """The first `count` prompts of a suite; UsageError for one that is not known."""
    if suite not in SUITES:
        raise UsageError(f"There is no suite {suite!r}. Give some of {', '.join(SUITES)}.")
    return read_prompts(assets_dir() / "prompts" / f"{suite}.jsonl", count)


def read_prompts(file: Path, count: int) -> list[Question]:
    """The first `count` prompts of a file as `dflash-mlx train` reads it; errors name the line."""
    if count < 1:
        raise UsageError(f"--samples is {count}. Give a whole number above 0.")
    return [_question(prompt) for prompt in read_all([file])[:count]]


def _question(prompt: Prompt) -> Question:
    first = prompt.messages[0]
    # Text alone also serves a model without a chat template.
    alone = len(prompt.messages) == 1 and first["role"] == "user"
    return Question(prompt.name, str(first["content"]) if alone else prompt.messages)
