"""What all families share under the target contract: embedding, layers in a loop, norm, head.

A family brings its layers and wires them; attribute names are the keys of HF checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import CacheStack, LayerCache
from dflash_mlx.features import Features
from dflash_mlx.layers.rows import take_rows
from dflash_mlx.segment import Segment, flat_ids


class Layer(Protocol):
    """One decoder layer. It is called with the flat rows and its own cache of every segment."""

    def __call__(
        self, h: mx.array, segments: Sequence[Segment], caches: Sequence[Any]
    ) -> mx.array: ...

    def make_cache(self) -> LayerCache: ...


class DecoderStack(nn.Module):
    """What checkpoints keep under `model.`: embedding, layers, final norm."""

    def __init__(
        self, vocab_size: int, hidden_size: int, layers: Sequence[Layer], norm: nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = list(layers)
        self.norm = norm


class DecoderTarget(nn.Module):
    """Fulfils `models.base.Target`; a family overrides `embed`, `head` or `logits` as it needs."""

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: nn.Module,
        *,
        vocab_size: int,
        hidden_size: int,
        context_length: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.num_layers = len(layers)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.model = DecoderStack(vocab_size, hidden_size, layers, norm)
        if not tied:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """The type of hidden states, features and logits."""
        return self.model.norm.weight.dtype

    def make_cache(self) -> CacheStack:
        return CacheStack([layer.make_cache() for layer in self.model.layers])

    def forward(
        self, segments: Sequence[Segment], taps: Sequence[int] = ()
    ) -> tuple[mx.array, Features | None]:
        """See `Target.forward`; ValueError for a tap outside 0 .. num_layers - 1."""
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise ValueError(f"tap {tap} of a target with layers 0..{self.num_layers - 1}")
        h = self.embed(flat_ids(segments))
        tapped: dict[int, mx.array] = {}
        for index, layer in enumerate(self.model.layers):
            h = layer(h, segments, [s.cache[index] for s in segments])
            if index in taps:
                tapped[index] = h
        features = Features([tapped[tap] for tap in taps]) if taps else None
        return self.model.norm(h), features

    def logits(self, rows: mx.array) -> mx.array:
        return self.head(rows)

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.embed_tokens(ids)

    def head(self, rows: mx.array) -> mx.array:
        if "lm_head" in self:
            return self.lm_head(rows)
        return self.model.embed_tokens.as_linear(rows)

    def head_of(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        if "lm_head" in self:
            return take_rows(self.lm_head, ids)
        return take_rows(self.model.embed_tokens, ids).as_linear
