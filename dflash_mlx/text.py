"""Streaming text rules: stop strings that never leak, and reasoning kept apart from the answer.

Pieces arrive as they are decoded; text that may yet turn out to belong to a tag is held back, so
that the joined output does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# What the harmony format of gpt-oss writes around a message and between header and body.
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _held(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that could be the start of a tag."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:size]):
                longest = size
                break
    return longest


class StopStrings:
    """Cuts a stream of text before the first of several strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that is safe to show now; after a stop string nothing more."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = _held(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The rest that was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest


class Reasoning:
    """Splits a stream into reasoning and answer at think tags; the tags themselves are dropped.

    inside: the prompt's template already opened a think block. White space between the tags and
    the text on their inner and outer sides is dropped.
    """

    def __init__(self, tags: tuple[str, str] | None, inside: bool) -> None:
        self._tags = tags
        self._inside = inside
        self._held = ""
        self._strip = inside
        self._gap = ""  # white space at the end of reasoning: shown only if more follows

    def feed(self, piece: str) -> tuple[str, str]:
        """(reasoning, answer) that is certain now."""
        if self._tags is None:
            return "", piece
        out = ["", ""]
        text = self._held + piece
        while True:
            tag = self._tags[1 if self._inside else 0]
            at = text.find(tag)
            if at < 0:
                break
            self._put(out, text[:at])
            text = text[at + len(tag) :]
            self._inside, self._strip, self._gap = not self._inside, True, ""
        keep = _held(text, (tag,))
        self._held = text[len(text) - keep :]
        self._put(out, text[: len(text) - keep])
        return out[0], out[1]

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        out = ["", ""]
        self._put(out, self._held)
        self._held = ""
        return out[0], out[1]

    def _put(self, out: list[str], text: str) -> None:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if not self._inside:
            out[1] += text
            return
        text = self._gap + text
        body = text.rstrip()
        self._gap = text[len(body) :]
        out[0] += body


class Channels:
    """Splits a stream in the harmony format: messages, each a header that names its channel.

        <|start|>assistant<|channel|>analysis<|message|>why<|end|> ... <|channel|>final<|message|>so

    Messages on the analysis channel and those to a tool (`to=`) are reasoning, others answer; the
    marks and headers are dropped. `in_header`: the template already opened a message.
    """

    def __init__(self, in_header: bool) -> None:
        self._header: str | None = "" if in_header else None  # None inside a body
        self._side = 1  # of the body: 0 reasoning, 1 answer
        self._held = ""
        self._said = [False, False]
        self._gap = False  # a further message of the same side follows

    def feed(self, piece: str) -> tuple[str, str]:
        """(reasoning, answer) that is certain now."""
        out = ["", ""]
        text = self._held + piece
        while True:
            marks = ("<|message|>",) if self._header is not None else CHANNEL_MARKS
            found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
            if not found:
                break
            at, mark = min(found)
            if self._header is None:
                self._put(out, text[:at])
                self._header = mark
            else:
                self._open(self._header + text[:at])
            text = text[at + len(mark) :]
        keep = _held(text, marks)
        self._held = text[len(text) - keep :]
        if self._header is None:
            self._put(out, text[: len(text) - keep])
        else:
            self._header += text[: len(text) - keep]
        return out[0], out[1]

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more text comes; an unfinished header is no text."""
        out = ["", ""]
        if self._header is None:
            self._put(out, self._held)
        self._held = ""
        return out[0], out[1]

    def _open(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        hidden = (channel is not None and channel[1] == "analysis") or "to=" in header
        self._side, self._header = (0 if hidden else 1), None
        self._gap = self._said[self._side]

    def _put(self, out: list[str], text: str) -> None:
        if not text:
            return
        out[self._side] += ("\n\n" if self._gap else "") + text
        self._said[self._side], self._gap = True, False
