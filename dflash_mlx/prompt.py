"""What a caller may give as a prompt, and the prompt as the target sees it.

Everything that cannot be honoured is refused by name; nothing is dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import UsageError

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target sees it. text is None for a prompt given as tokens."""

    ids: list[int]
    text: str | None
    thinking: bool = False  # the template left a think block open, or a message's header


def refuse_empty(text: str) -> None:
    """UsageError for a message of nothing but white space."""
    if not text.strip():
        raise UsageError("The prompt is empty. Give some text to answer.")
    refuse_broken(text)


def refuse_broken(text: str) -> None:
    """UsageError for text that is no valid Unicode, such as arguments that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The text is not valid Unicode (character {error.start}). Give it as UTF-8."
        ) from None


def as_items(given: Any) -> list[Any]:
    """The messages or token ids of a prompt that is not one string, as a list."""
    # Bytes would pass for token ids.
    if isinstance(given, Mapping | bytes | bytearray | memoryview) or not hasattr(
        given, "__iter__"
    ):
        raise UsageError(
            f"The prompt is a {type(given).__name__}. "
            "Give a string, a list of messages or a list of token ids."
        )
    items = given.tolist() if hasattr(given, "tolist") else list(given)
    if not items:
        raise UsageError("The conversation is empty. Give at least one message.")
    return items


def checked_messages(items: Sequence[Any], system: str | None) -> list[Message]:
    """Messages as dictionaries, the system message in front."""
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise UsageError(
                f"Message {index} of the conversation is {item!r}. "
                'A message is a mapping with "role" and "content".'
            )
    messages = [dict(item) for item in items]
    for text in (system, *(m.get("content") for m in messages)):
        if isinstance(text, str):
            refuse_broken(text)
    if system is None:
        return messages
    if messages[0].get("role") == "system":
        raise UsageError("A system message is given twice. Drop one of the two.")
    return [{"role": "system", "content": system}, *messages]


def checked_ids(items: Sequence[Any], vocab_size: int, model: str) -> list[int]:
    """Token ids as Python numbers, each within the vocabulary."""
    ids = []
    for index, item in enumerate(items):
        try:
            token = -1 if isinstance(item, bool) else operator.index(item)
        except TypeError:
            token = -1
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"Token {index} of the prompt is {item!r}. "
                f"Token ids of {model} are whole numbers from 0 to {vocab_size - 1}."
            )
        ids.append(token)
    return ids


def checked_stops(stop: Any) -> list[str]:
    """Stop strings as a list; UsageError for a bare string, an empty one, or no string."""
    if isinstance(stop, str) or not hasattr(stop, "__iter__"):
        raise UsageError(f"stop is a {type(stop).__name__}. Give a list of strings.")
    stops = list(stop)
    for item in stops:
        if not isinstance(item, str) or not item:
            raise UsageError(f"{item!r} is no stop string. Give strings of at least one character.")
    return stops
