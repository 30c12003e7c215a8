"""Prompts of asked-for lengths: documents are cut in their middle, other prompts get text in front.

Lengths are in tokens of the whole prompt, chat template included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from dflash_mlx.bench.questions import Question
from dflash_mlx.errors import UsageError

#: prompts of documents without an asked-for length, in tokens
SHORTEST, LONGEST = 1024, 32768
#: a fitted prompt may be this much shorter than asked, in tokens
SLACK = 8
_TRIES = 16

Count = Callable[[Question], int]


def lengths(given: str | None) -> list[int]:
    """Tokens of a list such as 1k,4k,16k (1k is 1024). UsageError for what is no length."""
    if given is None:
        return []
    found = []
    for item in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,12})(k?)\s*", item, re.IGNORECASE)
        length = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if length < 1:
            raise UsageError(f"--context has {item!r:.80}. Give lengths such as 1k,4k,16k.")
        found.append(length)
    if len(set(found)) < len(found):
        raise UsageError(f"--context {given} names a length twice. Name each once.")
    return found


def label(length: int) -> str:
    """4096 as 4k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def within(questions: Sequence[Question], most: int, wanted: int, count: Count) -> list[Question]:
    """The first `wanted` questions of 1024 to 32768 tokens, and of no more than `most`."""
    found: list[Question] = []
    for question in questions:
        if len(found) == wanted:
            break
        if SHORTEST <= count(question) <= min(most, LONGEST):
            found.append(question)
    return found


def fitted(questions: Sequence[Question], length: int, wanted: int, count: Count) -> list[Question]:
    """The first `wanted` questions that can be brought to `length` tokens, at most 8 below it.

    A document that is shorter is passed over, as is a question that alone is longer. What stands
    in front of a question without a document is the text of the other questions, in their order.
    """
    found: list[Question] = []
    for index, question in enumerate(questions):
        if len(found) == wanted:
            break
        if (fit := _fit(question, _others(questions, index), length, count)) is not None:
            found.append(replace(fit, name=f"{fit.name} at {label(length)}"))
    return found


def _others(questions: Sequence[Question], index: int) -> str:
    order = [*questions[index + 1 :], *questions[:index]] or [questions[index]]
    return "\n\n".join(q.messages[-1]["content"] for q in order)


def _fit(question: Question, others: str, length: int, count: Count) -> Question | None:
    own = question.document is not None
    text = question.document if question.document is not None else others
    room = length - count(question.about(""))
    if room <= SLACK:
        return question if not own and room >= 0 else None
    while (full := count(question.about(text))) < length - SLACK:
        if own:
            return None
        text = "\n\n".join([text] * (1 + length // full))
    cut = _middle_out if own else _from_start
    return question.about(cut(text, _characters(question, text, length, count, cut)))


def _characters(
    question: Question, text: str, length: int, count: Count, cut: Callable[[str, int], str]
) -> int:
    """How many characters of the text fit, found by straight lines between known lengths."""
    low, high = 0, len(text)
    least, most = count(question.about("")), count(question.about(text))
    if most <= length:
        return high
    for number in range(_TRIES):
        share = (length - least) / (most - least) if number % 3 < 2 else 0.5
        middle = low + max(1, int((high - low) * share))
        if middle >= high:
            break
        tokens = count(question.about(cut(text, middle)))
        if tokens > length:
            high, most = middle, tokens
        else:
            low, least = middle, tokens
        if length - least <= SLACK:
            break
    return low


def _from_start(text: str, characters: int) -> str:
    return text[:characters]


def _middle_out(text: str, characters: int) -> str:
    """Beginning and end of a text: what a document says first and last matters most."""
    tail = characters // 2
    return text[: characters - tail] + (text[-tail:] if tail else "")
