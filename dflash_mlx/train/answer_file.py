"""Answers on disk, a line each, and the settings they were made with in a file beside them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dflash_mlx.errors import UsageError
from dflash_mlx.train.corpus import Text, read_answers


@dataclass(frozen=True)
class AnswerSettings:
    """What answers depend on besides their prompts.

    target: its name and revision. temp: 0 is greedy. max_answer: most tokens of an answer.
    thinking: as in a chat: a switch, a reasoning level, or None for the template's own way.
    """

    target: str
    temp: float
    max_answer: int
    seed: int
    thinking: bool | str | None = None

    def __post_init__(self) -> None:
        if self.max_answer < 1:
            raise UsageError(f"max_answer is {self.max_answer}. Give at least 1.")
        if not 0 <= self.temp < float("inf"):
            raise UsageError(f"The temperature is {self.temp}. Give 0 or more.")


class AnswerFile:
    """Complete answers of one run, by name; each is on disk as soon as it is added.

    A torn last line, which a kill leaves, is dropped. UsageError for a file that was made with
    other settings, or whose lines are malformed.
    """

    def __init__(self, path: Path, settings: AnswerSettings, vocab_size: int) -> None:
        self.path = path
        self._bind(settings)
        path.touch()
        _drop_torn_line(path)
        self.texts = {text.name: text for text in read_answers([path], vocab_size)}
        self._lines = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()

    def add(self, text: Text) -> None:
        self._lines.write(text.as_json() + "\n")
        self._lines.flush()
        self.texts[text.name] = text

    def _bind(self, settings: AnswerSettings) -> None:
        """Compare with the settings beside the file, or write them where there is none yet."""
        beside = self.path.with_suffix(".settings.json")
        ours = asdict(settings)
        if beside.exists():
            try:
                stored = {"thinking": None, **json.loads(beside.read_text(encoding="utf-8"))}
                other = [
                    f"{k}: {stored[k]} there, {v} now" for k, v in ours.items() if stored[k] != v
                ]
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{beside} cannot be read ({error!r}). Delete it and the answers beside it."
                ) from None
            if other:
                raise UsageError(
                    f"{self.path} was made with other settings ({'; '.join(other)}). "
                    "Use those, or another file."
                )
            return
        if self.path.exists() and self.path.stat().st_size:
            raise UsageError(
                f"{self.path} has answers, but {beside.name} is not beside it, so what made them "
                "is not known. Use another file."
            )
        beside.parent.mkdir(parents=True, exist_ok=True)
        partial = beside.with_suffix(".partial")
        partial.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, beside)


def _drop_torn_line(path: Path) -> None:
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)
