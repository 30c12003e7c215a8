"""Token ids to text while they arrive, equal to decoding all of them at once.

Each step costs what its new tokens cost; nothing is decoded twice. Knows the decoders that language
models use (byte-level BPE, SentencePiece with byte fallback) and refuses others.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from dflash_mlx.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, the other bytes follow from 256."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = (b for b in range(256) if b not in set(plain))
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class _Pieces(Protocol):
    """The decoder's part of streaming: token strings in, finished text out."""

    def add(self, tokens: Iterable[str]) -> str: ...

    def finish(self) -> str: ...


class _ByteLevel:
    """Tokens are runs of bytes; an unfinished UTF-8 character waits for its next byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[str]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, tokens)))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    @staticmethod
    def _bytes(token: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHAR[c] for c in token])
        except KeyError:  # an added token is plain text, not stand-ins
            return token.encode()


class _SentencePiece:
    """Tokens are text with stand-ins; a run of byte tokens waits for its end.

    The run is text only if the whole of it is UTF-8, else every byte is U+FFFD: nothing in it is
    certain before it ends.
    """

    def __init__(self, replace: Sequence[tuple[str, str]], bytes_: bool, strip: str, count: int):
        self._replace, self._bytes = replace, bytes_
        self._strip, self._count = strip, count  # the text's first `count` characters, if `strip`
        self._run = bytearray()

    def add(self, tokens: Iterable[str]) -> str:
        return self._strip_start("".join(map(self._text, tokens)))

    def finish(self) -> str:
        return self._strip_start(self._end_run())

    def _text(self, token: str) -> str:
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            self._run.append(int(match[1], 16))
            return ""
        return self._end_run() + token

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip_start(self, text: str) -> str:
        start = 0
        while self._count and start < len(text):
            if text[start] != self._strip:
                self._count = 0
                break
            start, self._count = start + 1, self._count - 1
        return text[start:]


class _Metaspace:
    """Tokens are text with a stand-in for the space, which the first token loses."""

    def __init__(self, replacement: str, drops_first: bool) -> None:
        self._replacement, self._drops = replacement, drops_first

    def add(self, tokens: Iterable[str]) -> str:
        return "".join(map(self._text, tokens))

    def finish(self) -> str:
        return ""

    def _text(self, token: str) -> str:
        space, self._drops = "" if self._drops else " ", False
        return token.replace(self._replacement, space)


class StreamDetokenizer:
    """Text of one token sequence, given out as soon as it is certain; made by `Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], pieces: _Pieces) -> None:
        self._token, self._special, self._pieces = tokenizer.id_to_token, special, pieces

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids finish; "" while a character is incomplete."""
        tokens = (self._token(i) for i in ids if i not in self._special)
        return self._pieces.add(t for t in tokens if t is not None)

    def finish(self) -> str:
        """What was held back: an incomplete character becomes U+FFFD, as in decoding at once."""
        return self._pieces.finish()


def pieces_factory(tokenizer: Tokenizer, name: str) -> Callable[[], _Pieces]:
    """A maker of fresh streaming state for the tokenizer's decoder.

    Raises CheckpointError, with `name` as the place, for a decoder that cannot be streamed exactly.
    """
    decoder = tokenizer.decoder
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel
    if kinds == ["Metaspace"]:
        step = steps[0]
        return lambda: _Metaspace(step["replacement"], step["prepend_scheme"] != "never")
    if steps and (make := _sentencepiece(steps)) is not None:
        return make
    raise CheckpointError(
        f"{name} has a tokenizer with the decoder {' + '.join(kinds) or 'none'}, which cannot be "
        "streamed. Use a model with a byte-level or SentencePiece tokenizer."
    )


def _sentencepiece(steps: list[dict[str, Any]]) -> Callable[[], _Pieces] | None:
    """Replace steps, then ByteFallback, Fuse and Strip where present; None for other steps."""
    rest = list(steps)
    replace: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replace.append((step["pattern"]["String"], step["content"]))
    falls_back = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[int(falls_back) :]
    fuses = bool(rest) and rest[0]["type"] == "Fuse"
    rest = rest[int(fuses) :]
    strip, count = "", 0
    # Without Fuse, Strip would cut every token; with a stop, the end of the text.
    if fuses and rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        strip, count = rest[0]["content"], rest.pop(0)["start"]
    return None if rest else lambda: _SentencePiece(replace, falls_back, strip, count)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]
