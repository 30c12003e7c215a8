"""Prompts to train on, read from JSONL files: single questions, conversations, messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError
from dflash_mlx.prompt import Message
from dflash_mlx.train.corpus import read_jsonl, set_of

_KINDS = ("prompt", "turns", "messages")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """Messages up to the first answer, and the user's messages behind each answer.

    limit: most tokens of an answer, where the file says so. source: the file's set.
    """

    name: str
    messages: tuple[Message, ...]
    further: tuple[str, ...] = ()
    limit: int | None = None
    source: str | None = field(default=None, compare=False)

    @property
    def answer_names(self) -> list[str]:
        """A name for every answer: the prompt's own, then with the number of the turn."""
        more = [f"{self.name}/turn-{i}" for i in range(2, len(self.further) + 2)]
        return [self.name, *more]


def read_prompts(files: Iterable[Path], *, repeats: bool = False) -> list[Prompt]:
    """Prompts of JSONL files (.gz or not), in order; equal ones once, or with `repeats` as often
    as they occur, numbered.

    A line has one of "prompt" (a string), "turns" (the user's messages, answered one by one) and
    "messages" (role and content; a final assistant message is dropped), and may have "id" and
    "max", the most tokens of an answer. Without an id the name comes from the content.
    UsageError names file and line of what is malformed, and a file without prompts.
    """
    prompts: list[Prompt] = []
    seen: dict[str, list[Prompt]] = {}  # by content
    taken: dict[str, str] = {}  # an answer's name -> where it stands
    for file in files:
        count = 0
        for number, row in read_jsonl(file):
            count += 1
            where = f"{file} line {number}"
            messages, further = _conversation(row, where)
            content = sha256(dumps([messages, further]).encode()).hexdigest()
            if equal := seen.get(content):
                if repeats:
                    name = f"{equal[0].name} ({len(equal) + 1})"
                    equal.append(replace(equal[0], name=name))
                    prompts.append(equal[-1])
                continue
            name = _name(row, where) or f"sha-{content[:16]}"
            limit = _limit(row, where)
            prompt = Prompt(name, tuple(messages), tuple(further), limit, set_of(file))
            for answer in prompt.answer_names:
                if answer in taken:
                    raise UsageError(
                        f"{where} has the id {answer!r} of {taken[answer]}, which is another "
                        "prompt. Give every prompt its own id."
                    )
                taken[answer] = where
            seen[content] = [prompt]
            prompts.append(prompt)
        if not count:
            raise UsageError(f"{file} has no prompts. Give a JSONL file with one a line.")
    return prompts


def _conversation(row: Mapping[str, Any], where: str) -> tuple[list[Message], list[str]]:
    given = [key for key in _KINDS if key in row]
    if len(given) != 1:
        raise UsageError(
            f"{where} has {' and '.join(given) or 'no prompt'}. "
            f"Give one of {', '.join(_KINDS)} a line."
        )
    if given == ["messages"]:
        return _messages(row["messages"], where), []
    turns = [row["prompt"]] if given == ["prompt"] else row["turns"]
    if not isinstance(turns, list) or not turns or not all(is_text(t) for t in turns):
        raise UsageError(
            f"{where} has {given[0]} that is {_shown(row[given[0]])}. "
            "Give text, a list of it for turns, and none of it empty."
        )
    return [{"role": "user", "content": turns[0]}], turns[1:]


def _messages(given: Any, where: str) -> list[Message]:
    good = isinstance(given, list) and all(
        isinstance(m, Mapping)
        and m.keys() == {"role", "content"}
        and m["role"] in _ROLES
        and isinstance(m["content"], str)
        for m in given
    )
    if not good:
        raise UsageError(
            f"{where} has messages that are {_shown(given)}. Give a list of messages with a role "
            f"({', '.join(_ROLES)}) and content as text, and nothing else."
        )
    messages = [dict(m) for m in given]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user" or not is_text(messages[-1]["content"]):
        raise UsageError(
            f"{where} has no message of the user to answer at its end. "
            "End with one, or with the answer to one."
        )
    return messages


def is_text(value: Any) -> bool:
    """Whether it is a string with something in it that can be encoded."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, written as an escape
        return False
    return True


def _name(row: Mapping[str, Any], where: str) -> str | None:
    name = row.get("id")
    if name is None or is_text(name):
        return name
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    raise UsageError(f"{where} has the id {_shown(name)}. Give text or a whole number.")


def _limit(row: Mapping[str, Any], where: str) -> int | None:
    limit = row.get("max")
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is None or (whole and limit >= 1):
        return limit
    raise UsageError(f"{where} has max {_shown(limit)}. Give a whole number of tokens above 0.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
