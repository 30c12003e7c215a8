"""Stop strings never leak and reasoning is split alike, however the text is cut into pieces."""

from __future__ import annotations

import random

import pytest

from dflash_mlx.text import Channels, Reasoning, StopStrings


def cuts(text: str, rng: random.Random) -> list[str]:
    out = []
    while text:
        n = rng.randint(1, 4)
        out.append(text[:n])
        text = text[n:]
    return out


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("ENENDx", ["END"], "EN"),
        ("aab", ["aab"], ""),
        ("aaab", ["aab"], "a"),
        ("x STOP y END", ["END", "STOP"], "x "),
        ("abc", ["bc", "abc"], ""),  # the one that begins first, not the one named first
        ("tail EN", ["END"], "tail EN"),
        ("text", [], "text"),
        ("text", [""], "text"),
        ("\n\nUser: hi", ["\nUser:"], "\n"),
    ],
)
def test_stop_strings(text, stops, shown):
    rng = random.Random(0)
    for pieces in [[text], list(text), *(cuts(text, rng) for _ in range(20))]:
        filter_ = StopStrings(stops)
        streamed, seen = [], ""
        for piece in pieces:
            streamed.append(filter_.feed(piece))
            seen = "".join(streamed)
            assert shown.startswith(seen)  # at no time did anything leak
        if not filter_.stopped:
            seen += filter_.finish()
        assert seen == shown
        assert filter_.stopped == (shown != text)
        assert filter_.feed("more") == ("" if filter_.stopped else "more")


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\nwhy not\n\n</think>\n\nso it is", True, "why not", "so it is"),
        ("plain answer", False, "", "plain answer"),
        ("never closed", True, "never closed", ""),
        ("a < b <thin> c", False, "", "a < b <thin> c"),
        ("ends with <th", False, "", "ends with <th"),
        ("x</thi", True, "x</thi", ""),
        ("<think></think>ok ", False, "", "ok "),
        ("  two  words  </think> yes", True, "two  words", "yes"),
    ],
)
def test_reasoning(text, inside, reasoning, answer):
    rng = random.Random(1)
    for pieces in [[text], list(text), *(cuts(text, rng) for _ in range(20))]:
        split = Reasoning(("<think>", "</think>"), inside)
        parts = [split.feed(p) for p in pieces] + [split.finish()]
        assert "".join(r for r, _ in parts) == reasoning
        assert "".join(a for _, a in parts) == answer


def test_without_tags_everything_is_answer():
    split = Reasoning(None, False)
    assert split.feed("<think>x") == ("", "<think>x")
    assert split.finish() == ("", "")


WHY = "<|channel|>analysis<|message|>why"
SO = "<|start|>assistant<|channel|>final<|message|>so"


@pytest.mark.parametrize(
    ("text", "in_header", "reasoning", "answer"),
    [
        (f"{WHY}<|end|>{SO}", True, "why", "so"),
        (f"{WHY}<|end|>{SO}<|end|>", False, "why", "so"),
        (
            f"{WHY}<|end|>{WHY} not<|end|>{SO}<|end|>{SO} there",
            True,
            "why\n\nwhy not",
            "so\n\nso there",
        ),
        ("<|message|>no channel", True, "", "no channel"),
        ("<|channel|>final<|message|>", True, "", ""),
        ("<|channel|>commentary<|message|>I look.<|end|>", True, "", "I look."),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", True, "{}", ""),
        ("plain text, a < b <|en", False, "", "plain text, a < b <|en"),
        ("<|channel|>anal", True, "", ""),
        (f"{WHY}<|chann", True, "why<|chann", ""),
    ],
)
def test_channels(text, in_header, reasoning, answer):
    rng = random.Random(2)
    for pieces in [[text], list(text), *(cuts(text, rng) for _ in range(20))]:
        split, seen = Channels(in_header), ["", ""]
        for piece in pieces:
            seen = [a + b for a, b in zip(seen, split.feed(piece), strict=True)]
            assert reasoning.startswith(seen[0])
            assert answer.startswith(seen[1])
        seen = [a + b for a, b in zip(seen, split.finish(), strict=True)]
        assert seen == [reasoning, answer]
