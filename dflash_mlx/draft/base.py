"""The contract every drafter fulfils: observe committed features, propose a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dflash_mlx.features import Features


@dataclass(frozen=True)
class DraftSampling:
    """How to draw draft tokens when the target samples; None in its place means greedy drafts."""

    temperature: float  # > 0
    key: mx.array  # PRNG key for this block's draws
    probabilities: Callable[[mx.array], mx.array]  # logits [n, V] -> filtered probabilities [n, V]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one block and the distribution each was drawn from.

    tokens [n] int32. probs: None for greedy drafts, else [n, V], or [n, K] over `candidates`
    [n, K] for drafters that draw from a few candidates.
    healthy: scalar bool array, False when a draft logit was NaN; the tokens are then worthless.
    """

    tokens: mx.array
    probs: mx.array | None
    healthy: mx.array
    candidates: mx.array | None = None


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

    def make_cache(self) -> DraftCache: ...

    def observe(self, features: mx.array | Features, cache: DraftCache) -> None:
        """Project newly committed target features [1, S, T·H] into the context K/V of all layers.

        They belong to positions cache.length .. cache.length + S - 1; length grows by S.
        """
        ...

    def propose(
        self, anchor: mx.array, n: int, sampling: DraftSampling | None, cache: DraftCache
    ) -> Proposal:
        """Draft tokens for the `n` positions behind `anchor` ([1] int32, position cache.length).

        1 <= n <= block_size - 1. The cache is not changed. All arrays stay lazy.
        """
        ...
