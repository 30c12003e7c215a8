"""Exact mode over several turns: the caches and logits of a chat are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu
from oracle import OracleCache
from tiny import tiny_target
from tiny_engine import TAPS, VOCAB, tiny_engine

from dflash_mlx.cache import CacheStack, RecurrentCache
from dflash_mlx.chat import Chat
from dflash_mlx.draft.base import Proposal
from dflash_mlx.models.exact import make_exact

ASKED = ("Hi there.", "And then, what did they say?", "Why?", "So it is.")
STOPS = (1, 1, 2, 0)  # characters of each turn's stop string
TOKENS, ACCEPTED = 14, 6
PRINTABLE = 94  # the first tokens: ASCII from "!" to "~"
INSIDE = (4, 5, 6, 9, 10, 11, 12)  # the first token, then cycles of ACCEPTED + 1
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 3},
    "qwen3_5": {"num_hidden_layers": 3},
    "gemma4": {},
}


class Printable:
    """A target that says printable ASCII only, so that a text has one spelling; keeps logits."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._others = mx.where(mx.arange(VOCAB) < PRINTABLE, 0, -1e9)
        self.seen: list[mx.array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def logits(self, rows: mx.array) -> mx.array:
        self.seen.append(self._target.logits(rows) + self._others)
        return self.seen[-1]


class ForgetfulCache(OracleCache):
    def rewind(self, length: int) -> bool:
        return False


class Knowing:
    """Drafts the text it is given, with an error behind ACCEPTED tokens."""

    block_size, taps, head_rows = ACCEPTED + 2, TAPS, None

    def __init__(self, cache: type[OracleCache]) -> None:
        self.make_cache, self.text = cache, list[int]()

    def observe(self, features: Any, cache: Any) -> None:
        cache.length += features.shape[1]

    def propose(self, anchor: Any, n: int, sampling: Any, cache: Any, head: Any = None) -> Proposal:
        drafts = self.text[cache.length + 1 :][:n]
        drafts += [0] * (n - len(drafts))
        drafts[ACCEPTED:] = [(draft + 1) % PRINTABLE for draft in drafts[ACCEPTED:]]
        return Proposal(mx.array(drafts, mx.int32), None, mx.array(True))


def plain_run(folder: Path, target: Any) -> Chat:
    return tiny_engine(folder, target=target, exact=True).chat()


def stops_inside_blocks(folder: Path, target: Any) -> tuple[list[list[str]], list[list[int]]]:
    """Each turn's stop strings, which begin inside a block, and its tokens without them."""
    stops: list[list[str]] = []
    whole = []
    for turn, size in enumerate(STOPS):
        chat = plain_run(folder, target)
        for asked, stop in zip(ASKED[:turn], stops, strict=True):
            list(chat.send(asked, max_tokens=TOKENS, stop=stop))
        chunks = list(chat.send(ASKED[turn], max_tokens=2 * TOKENS))
        text = "".join(chunk.text for chunk in chunks)
        starts = [i for i in INSIDE if text.index(text[i : i + max(1, size)]) == i]
        stops.append([text[starts[0] :][:size]] if size else [])
        whole.append(list(chat._ids))
    return stops, whole


def rows_of(cache: CacheStack) -> list[mx.array]:
    """The state and the committed rows of every layer."""
    found = []
    for layer in cache:
        if isinstance(layer, RecurrentCache):
            assert layer.state is not None
            assert layer.tail is not None
            found += [layer.state, layer.tail]
        elif layer.arrays():
            end = layer.length - getattr(layer, "start", 0)
            first = end - getattr(layer, "visible", end)
            found += [array[:, :, first:end] for array in layer.arrays()]
    mx.eval(found)
    return found


def say(chat: Chat, target: Printable, asked: str, stop: list[str]) -> tuple[list[int], mx.array]:
    """An answer's tokens and the logits that chose them."""
    target.seen.clear()
    steps = [c.token_ids for c in chat.send(asked, max_tokens=TOKENS, stop=stop) if c.token_ids]
    logits = [one[: len(step)] for one, step in zip(target.seen, steps, strict=False)]
    return [token for step in steps for token in step], mx.concatenate(logits)


def same(one: list[mx.array], other: list[mx.array]) -> bool:
    return len(one) == len(other) and all(map(mx.array_equal, one, other))


@pytest.mark.metal_cpu
@pytest.mark.parametrize(
    ("family", "edited"), [*((family, False) for family in FAMILIES), ("qwen3", True)]
)
def test_turns_have_the_bits_of_plain_decoding(
    family: str, edited: bool, tmp_path: Path, row_invariant_blas: None
) -> None:
    inner = tiny_target(family, vocab_size=VOCAB, **FAMILIES[family])
    make_exact(inner)
    target = Printable(inner)
    stops, whole = stops_inside_blocks(tmp_path, target)
    drafter = Knowing(ForgetfulCache if edited else OracleCache)
    plain = plain_run(tmp_path, target)
    dflash = tiny_engine(tmp_path, target=target, drafter=drafter, exact=True).chat()
    length = 0
    with kernels_on_cpu(Mode.FAST):
        for turn, (asked, stop) in enumerate(zip(ASKED, stops, strict=True)):
            if edited and turn == len(ASKED) - 1:
                for chat in (plain, dflash):
                    chat.messages[1]["content"] = "something else"
            truth, single = say(plain, target, asked, stop)
            drafter.text = whole[turn]
            text, together = say(dflash, target, asked, stop)
            assert text == truth
            assert mx.array_equal(together, single)
            assert plain._session.ids == dflash._session.ids
            assert same(rows_of(plain._session.cache), rows_of(dflash._session.cache))
            assert plain.stats is not None
            assert dflash.stats is not None
            assert plain.stats.finish_reason == ("stop_string" if stop else "length")
            kept = plain.stats.cached_tokens
            if edited and turn == len(ASKED) - 1 and kept:
                kept = 0  # its drafter could not go back: the target ran these tokens beside
            assert dflash.stats.cached_tokens == kept
            # The turn behind a stop string of one token goes on where the text ended.
            if 0 < turn <= 2:
                assert plain.stats.cached_tokens == length
            length = len(plain._session.ids)
            if not edited or turn < len(ASKED) - 1:
                assert dflash.stats.accepted >= 2
    assert family != "qwen3_5" or any(isinstance(c, RecurrentCache) for c in inner.make_cache())
