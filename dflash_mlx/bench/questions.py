"""The benchmark's prompts: samples of the package, a data set of the hub or of a folder, a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_mlx import hub
from dflash_mlx.bench.rows import ENDINGS, rows
from dflash_mlx.bench.suites import SUITES, Suite
from dflash_mlx.errors import UsageError
from dflash_mlx.paths import assets_dir
from dflash_mlx.prompt import Message
from dflash_mlx.train.prompts import read_prompts

#: prompts of a suite that nobody asked for a number of, and those in the package
SAMPLES = 16
#: DFlash's benchmark shuffles its rows by this
SHUFFLE_SEED = 42


@dataclass(frozen=True)
class Question:
    """A prompt up to its first answer: messages, the last one of the user.

    document: a text in front of the last message, which may be cut to reach a context length.
    """

    name: str
    messages: tuple[Message, ...]
    document: str | None = None

    @property
    def prompt(self) -> str | Sequence[Message]:
        """As `Engine.generate` takes it; text alone also serves a model without a chat template."""
        *before, last = self.messages
        text = last["content"] if self.document is None else f"{self.document}\n\n{last['content']}"
        return text if not before else [*before, {**last, "content": text}]

    def about(self, document: str) -> Question:
        """The same behind another document."""
        return replace(self, document=document)


@dataclass(frozen=True)
class Loaded:
    """Questions in the order in which they are taken, and where they are from.

    revision: the commit of a hub's data set. further: prompts whose turns behind the first one
    are left out.
    """

    questions: list[Question]
    source: str
    revision: str | None = None
    documents: bool = False
    further: int = 0


def from_file(file: Path) -> Loaded:
    """All prompts of a file as `dflash-mlx train` reads it, equal ones too; errors name lines."""
    prompts = read_prompts([file], repeats=True)
    questions = [Question(prompt.name, prompt.messages) for prompt in prompts]
    return Loaded(questions, str(file), further=sum(bool(p.further) for p in prompts))


def load(name: str, wanted: int, data: str | None) -> Loaded:
    """The prompts of a suite, at least `wanted` where there are so many.

    data: "hub", or a folder; None takes the package's samples where they suffice, else the hub.
    Rows of a data set are shuffled as DFlash's benchmark does it.
    """
    suite = SUITES[name]
    if data is None and suite.ships and wanted <= SAMPLES:
        return replace(from_file(assets_dir() / "prompts" / f"{name}.jsonl"), source="package")
    if data in (None, "hub"):
        found = hub.fetch_dataset(suite.repo, suite.file, revision=suite.revision)
        file, source, revision = found.path, f"hub: {suite.repo}", found.revision
    else:
        file, revision = _in_folder(name, suite, Path(str(data))), None
        source = str(file)
    questions = _worded(name, suite, file)
    random.Random(SHUFFLE_SEED).shuffle(questions)
    return Loaded(questions, source, revision, suite.documents)


def _worded(name: str, suite: Suite, file: Path) -> list[Question]:
    questions = []
    for number, (where, row) in enumerate(rows(file, suite.members)):
        try:
            wording = suite.word(row)
        except KeyError as error:
            raise UsageError(
                f"{where} has no text in the column {error}. Give the file {suite.file} of the "
                f"data set {suite.repo}, or prompts of your own with --prompts."
            ) from None
        message = {"role": "user", "content": wording.ask}
        questions.append(Question(f"{name}/{number}", (message,), wording.document))
    if not questions:
        raise UsageError(f"{file} has no rows. Fetch the file again.")
    return questions


def _in_folder(name: str, suite: Suite, folder: Path) -> Path:
    """FOLDER/SUITE.jsonl (or another ending), or FOLDER/SUITE/ with the data set's own layout."""
    if not folder.is_dir():
        raise UsageError(f"--data is {str(folder)!r}. Give a folder, or hub.")
    places = [folder / name / suite.file, *(folder / f"{name}{ending}" for ending in ENDINGS)]
    for place in places:
        if place.is_file():
            return place
    raise UsageError(
        f"{folder} has no {name}: neither {name}{{{','.join(ENDINGS)}}} nor {name}/{suite.file}. "
        f"Put one there, or leave --data out."
    )
