"""The contract every drafter fulfils: observe committed features, propose a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from dflash_mlx.features import Features


@dataclass(frozen=True)
class DraftSampling:
    """How to draw draft tokens when the target samples; None in its place means greedy drafts."""

    temperature: float  # > 0
    key: mx.array  # PRNG key for this block's draws
    #: logits [n, V] -> filtered probabilities [n, V]; or both [n, R] of the tokens with these ids
    probabilities: Callable[[mx.array, mx.array | None], mx.array]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one block and the distribution each was drawn from.

    tokens [n] int32. probs: None for greedy drafts, else [n, V], or [n, K] over `candidates`
    [n, K] for drafters that draw from a part of the vocabulary.
    healthy: scalar bool array, False when a draft logit was NaN; the tokens are then worthless.
    """

    tokens: mx.array
    probs: mx.array | None
    healthy: mx.array
    candidates: mx.array | None = None


Projection = Callable[[mx.array], mx.array]  # hidden rows [..., H] -> logits [..., R]


@dataclass(frozen=True)
class ReducedHead:
    """An output head that knows some of the vocabulary.

    rows: how many of its tokens are the most frequent ones. ids [R] int32: all its tokens, each
    once. parts: projections whose outputs, joined, are their logits.
    """

    rows: int
    ids: mx.array
    parts: tuple[Projection, ...]

    @property
    def others(self) -> int:
        """Tokens it knows besides the frequent ones."""
        return self.ids.shape[0] - self.rows

    def __call__(self, rows: mx.array) -> mx.array:
        """[..., H] -> [..., R]."""
        logits = [part(rows) for part in self.parts]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=-1)


class HeadRows(Protocol):
    """Makes reduced heads of a whole one."""

    order: np.ndarray  # all token ids [V], the most frequent first

    def reduced(self, rows: int, others: Sequence[int] = ()) -> ReducedHead:
        """The head of the `rows` most frequent tokens and of `others`, which are none of them."""
        ...


class DraftCache(Protocol):
    """Context K/V of a drafter for one sequence; `length` equals the target's committed length."""

    length: int

    def rewind(self, length: int) -> bool: ...

    def arrays(self) -> list[mx.array]: ...

    @property
    def nbytes(self) -> int: ...


class Drafter(Protocol):
    """A drafter bound to the target whose embedding and head it borrows."""

    block_size: int  # trained block: the anchor and block_size - 1 drafts
    taps: tuple[int, ...]  # target layers whose outputs `observe` expects, in order
    head_rows: HeadRows | None  # of the head it drafts with; None where that cannot be reduced

    def make_cache(self) -> DraftCache: ...

    def observe(self, features: mx.array | Features, cache: DraftCache) -> None:
        """Project newly committed target features [1, S, T·H] into the context K/V of all layers.

        They belong to positions cache.length .. cache.length + S - 1; length grows by S.
        """
        ...

    def propose(
        self,
        anchor: mx.array,
        n: int,
        sampling: DraftSampling | None,
        cache: DraftCache,
        head: ReducedHead | None = None,
    ) -> Proposal:
        """Draft tokens for the `n` positions behind `anchor` ([1] int32, position cache.length).

        1 <= n <= block_size - 1. The cache is not changed. All arrays stay lazy.
        head: made by `head_rows`, to draft with in place of the whole one.
        """
        ...
