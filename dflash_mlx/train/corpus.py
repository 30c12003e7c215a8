"""The texts a drafter is trained on: token ids of prompts with the answers the target gave."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError

#: what reading and unpacking a damaged file raises; RuntimeError: an encrypted archive, a method
#: that is not known, JSON nested too deeply
UNREADABLE = (
    OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
)  # fmt: skip

#: the end of the name of an answer within a conversation
_LATER_TURN = re.compile(r"(/turn-\d+)+$")
#: behind the number of a prompt in its set
_WORDING = re.compile(r"(?<=/)([^/+]+)\+[^/]*$")
#: the end of a name that joined_texts gave
_GIVEN = re.compile(r"\+given-\d+$")


@dataclass(frozen=True)
class Text:
    """One prompt with its answer. Only tokens of the answer are trained on.

    source: the set it belongs to where its name says none; no part of what is trained on.
    """

    name: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    source: str | None = field(default=None, compare=False)

    @property
    def set_name(self) -> str:
        """What a name like set/number begins with, else the source, else "texts"."""
        beginning, slash, _ = _LATER_TURN.sub("", self.name).partition("/")
        return beginning if beginning and slash else self.source or "texts"

    @property
    def prompt_name(self) -> str:
        """What it shares with the other turns of its conversation, and with its other wordings.

        Wordings of one prompt are told apart by what stands behind a +, as in set/12+short.
        """
        return _WORDING.sub(r"\1", _LATER_TURN.sub("", _GIVEN.sub("", self.name)))

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    def cut(self, max_length: int) -> Text:
        """The text without the tokens behind `max_length`."""
        room = max_length - len(self.prompt_ids)
        return replace(self, answer_ids=self.answer_ids[: max(0, room)])

    def as_json(self) -> str:
        fields = {"id": self.name, "prompt_ids": self.prompt_ids, "answer_ids": self.answer_ids}
        return json.dumps(fields, separators=(",", ":"))


def read_answers(files: Iterable[Path], vocab_size: int) -> list[Text]:
    """Texts of JSONL files with `prompt_ids` and `answer_ids` (and `id`) a line, .gz or not.

    UsageError names file and line of what is malformed, or of another text by a name that was there
    before; the same text is taken once.
    """
    texts: dict[str, Text] = {}
    for file in files:
        for number, row in read_jsonl(file):
            text = Text(
                str(row.get("id", f"{file.name}:{number}")),
                _ids(row, "prompt_ids", vocab_size, file, number),
                _ids(row, "answer_ids", vocab_size, file, number),
                set_of(file),
            )
            known = texts.setdefault(text.name, text)
            if "id" not in row and known != text:  # of a file of that name elsewhere
                text = replace(text, name=f"{text.name} ({digest([text])[:8]})")
                known = texts.setdefault(text.name, text)
            if (known.prompt_ids, known.answer_ids) != (text.prompt_ids, text.answer_ids):
                raise UsageError(
                    f"{file}:{number}: the id {text.name} is another text's before; give each text "
                    "an id of its own, or none."
                )
    return list(texts.values())


def set_of(file: Path) -> str:
    """The set that the texts of a JSONL file (.gz or not) are: its name without the endings."""
    return Path(file.name.removesuffix(".gz")).stem


def read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank, of a UTF-8 file, .gz or not.

    UsageError names the file that cannot be read, or the line that is no object.
    """
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = json_fault(error)
            raise UsageError(f"{file} line {number} is no JSON ({why}). Correct it.") from None
        if not isinstance(row, dict):
            raise UsageError(f"{file} line {number} is no JSON object. Correct it.")
        yield number, row


def json_fault(error: Exception) -> str:
    """What is wrong with a text that json.loads refused."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, character {error.pos + 1}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).partition(";")[0]  # a number of thousands of digits, then advice for Python


def _lines(file: Path) -> list[str]:
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
        return text.split("\n")  # not at U+2028 and its like, which JSON strings may hold
    except UNREADABLE as error:
        raise UsageError(f"{file} cannot be read ({error}). Give a JSONL file.") from None


def _ids(
    row: dict[str, Any], key: str, vocab_size: int, file: Path, number: int
) -> tuple[int, ...]:
    ids = row.get(key)
    good = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids
    )
    if not good or not ids:
        raise UsageError(
            f"{file} line {number} has no list of token ids of this target under {key!r} "
            f"(whole numbers from 0 to {vocab_size - 1}). Answers of another target cannot be used."
        )
    assert isinstance(ids, list)
    return tuple(ids)


def joined_texts(given: Sequence[Text], answered: Sequence[Text]) -> list[Text]:
    """Answers given, behind them those to prompts; what is in both is taken once.

    Other answers to the same prompt, and other prompts under its name, are further wordings of it.
    """
    asked = {text.prompt_ids: text for text in answered}
    same = {(text.prompt_ids, text.answer_ids) for text in answered}
    taken = {text.name for text in answered}
    rest = []
    for text in given:
        if (text.prompt_ids, text.answer_ids) in same:
            continue
        first = asked.get(text.prompt_ids, text)
        if first is not text or text.name in taken:
            text = replace(text, name=f"{first.name}+given-{len(rest)}")
        rest.append(text)
    return [*rest, *answered]


def digest(texts: Sequence[Text]) -> str:
    """SHA-256 over names and ids, in order: what a run was trained on."""
    sum_ = hashlib.sha256()
    for text in texts:
        sum_.update(text.as_json().encode())
    return sum_.hexdigest()


def usable(texts: Sequence[Text], max_length: int) -> tuple[list[Text], int]:
    """Texts cut to `max_length` that hold at least one block, and how many do not.

    A block needs a clean token and one to predict, both of the answer.
    """
    cut = [text.cut(max_length) for text in texts]
    kept = [text for text in cut if len(text.answer_ids) >= 2]
    return kept, len(cut) - len(kept)


def split(texts: Sequence[Text], held_out: int) -> tuple[list[Text], list[Text]]:
    """(trained, held out): the choice depends on the names, not on their order.

    At most `held_out` texts and a quarter of all are held out. Turns, wordings and further answers
    of one prompt stay together: what was trained on says much about them. Where that leaves none,
    the smallest prompt is held out, if it is a quarter of all at most.
    """
    room = min(held_out, len(texts) // 4)
    prompt_of = _prompts(texts)
    prompts = Counter(prompt_of)
    chosen = set()
    for name in sorted(prompts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if prompts[name] <= room:
            chosen.add(name)
            room -= prompts[name]
    smallest = min(sorted(prompts), key=prompts.__getitem__, default="")
    if not chosen and held_out and prompts[smallest] <= len(texts) // 4:
        chosen = {smallest}
    kept = [prompt in chosen for prompt in prompt_of]
    return (
        [text for text, held in zip(texts, kept, strict=True) if not held],
        [text for text, held in zip(texts, kept, strict=True) if held],
    )


def _prompts(texts: Sequence[Text]) -> list[str]:
    """Of every text the first name of its prompt: one name, or the same tokens, is one prompt."""
    first: dict[str, str] = {}  # of a name: another one of its prompt, in the end the first
    asked: dict[tuple[int, ...], str] = {}

    def root(name: str) -> str:
        while (above := first.setdefault(name, name)) != name:
            first[name] = name = first[above]  # half of the way, for the next one who asks
        return name

    for text in texts:
        one = root(text.prompt_name)
        other = root(asked.setdefault(text.prompt_ids, one))
        # The first in order, whatever the order of the texts.
        first[max(one, other)] = min(one, other)
    return [root(text.prompt_name) for text in texts]
