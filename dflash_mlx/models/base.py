"""The contract every target family fulfils; the decode loop sees nothing else of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from dflash_mlx.cache import CacheStack
from dflash_mlx.features import Features
from dflash_mlx.segment import Segment


class Target(Protocol):
    """A target language model. Weights are never modified after loading; all state is in caches."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int  # positions the checkpoint was made for

    @property
    def dtype(self) -> mx.Dtype:
        """The type of hidden states, features and logits."""
        ...

    def make_cache(self) -> CacheStack:
        """An empty cache for one sequence."""
        ...

    def forward(
        self, segments: Sequence[Segment], taps: Sequence[int] = ()
    ) -> tuple[mx.array, Features | None]:
        """Run the segments' tokens; every cache gets its rows as pending rows.

        Returns the hidden states after the final norm [1, ΣT, H], and for `taps` the outputs of
        those decoder layers (0-based, residual stream after the MLP, before the final norm)
        side by side in the order given: features [1, ΣT, len(taps)·H], None without taps.
        """
        ...

    def logits(self, rows: mx.array) -> mx.array:
        """The target's own logits for rows of `forward`'s hidden states: [..., H] -> [..., V]."""
        ...

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings as drafters borrow them (with the family's draft scale): [...] -> [..., H]."""
        ...

    def head(self, rows: mx.array) -> mx.array:
        """The bare output head as drafters borrow it: no norm, no soft-cap. [..., H] -> [..., V]"""
        ...

    def head_of(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        """`head` for the tokens `ids` [R] only, in their order: [..., H] -> [..., R]."""
        ...
