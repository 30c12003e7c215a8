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
from dflash_mlx.train.files import make_folder, unwritable, write_text
from dflash_mlx.train.naming import same_target


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
    other settings, or whose lines are malformed, or that cannot be written.
    """

    def __init__(self, path: Path, settings: AnswerSettings, vocab_size: int) -> None:
        self.path = path
        make_folder(path.parent)
        self._bind(settings)
        try:
            self._lines = path.open("ab", buffering=0)
            _drop_torn_line(path)
        except OSError as error:
            raise unwritable(path, error) from None
        self.texts = {text.name: text for text in read_answers([path], vocab_size)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        if not self.texts:  # nothing that later settings would have to agree with
            self.path.unlink(missing_ok=True)
            self._beside.unlink(missing_ok=True)

    def add(self, text: Text) -> None:
        """Write an answer's line; UsageError when it does not fit on the disk."""
        line = text.as_json().encode() + b"\n"
        size = os.fstat(self._lines.fileno()).st_size
        try:
            written = self._lines.write(line)
            if written < len(line):  # the disk has become full; ask it for its reason
                self._lines.write(line[written:])
        except OSError as error:
            os.truncate(self.path, size)
            raise unwritable(self.path, error) from None
        self.texts[text.name] = text

    @property
    def _beside(self) -> Path:
        return self.path.with_suffix(".settings.json")

    def _bind(self, settings: AnswerSettings) -> None:
        """Compare with the settings beside the file, or write them where there is none yet."""
        beside = self._beside
        ours = asdict(settings)
        if beside.exists():
            try:
                stored = {"thinking": None, **json.loads(beside.read_text(encoding="utf-8"))}
                if same_target(stored["target"], settings.target):
                    stored["target"] = settings.target
                if settings.temp == stored["temp"] == 0:
                    stored["seed"] = settings.seed  # nothing is drawn
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
        write_text(beside, json.dumps(ours, indent=2) + "\n")


def _drop_torn_line(path: Path) -> None:
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)
