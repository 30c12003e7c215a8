"""A dense pre-norm decoder under the target contract; families differ in how they configure it.

Attribute names are the keys of HF checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import CacheStack, KVCache
from dflash_mlx.layers.attention import Attention
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.layers.rope import Rope
from dflash_mlx.models.config import DenseConfig
from dflash_mlx.segment import Segment, flat_ids


class DecoderLayer(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, config: DenseConfig, rope: Rope, *, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rope,
            bias=config.attention_bias,
            norm_eps=eps if qk_norm else None,
        )
        self.mlp = MLP(hidden, config.intermediate_size, bias=config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def __call__(
        self, h: mx.array, segments: Sequence[Segment], caches: Sequence[KVCache]
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]."""
        h = h + self.self_attn(self.input_layernorm(h), segments, caches)
        return h + self.mlp(self.post_attention_layernorm(h))


class DecoderStack(nn.Module):
    """What checkpoints keep under `model.`: embedding, layers, final norm."""

    def __init__(self, config: DenseConfig, rope: Rope, *, qk_norm: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(config, rope, qk_norm=qk_norm) for _ in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DenseTarget(nn.Module):
    """Fulfils `models.base.Target`; `qk_norm` adds the per-head norms of queries and keys."""

    def __init__(self, config: DenseConfig, rope: Rope, *, qk_norm: bool) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.context_length = config.max_position_embeddings
        self.model = DecoderStack(config, rope, qk_norm=qk_norm)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """The type of hidden states, features and logits."""
        return self.model.norm.weight.dtype

    def make_cache(self) -> CacheStack:
        return CacheStack([KVCache() for _ in range(self.num_layers)])

    def forward(
        self, segments: Sequence[Segment], taps: Sequence[int] = ()
    ) -> tuple[mx.array, mx.array | None]:
        """See `Target.forward`; ValueError for a tap outside 0 .. num_layers - 1."""
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise ValueError(f"tap {tap} of a target with layers 0..{self.num_layers - 1}")
        h = self.model.embed_tokens(flat_ids(segments))
        tapped: dict[int, mx.array] = {}
        for index, layer in enumerate(self.model.layers):
            h = layer(h, segments, [cast(KVCache, s.cache[index]) for s in segments])
            if index in taps:
                tapped[index] = h
        features = mx.concatenate([tapped[tap] for tap in taps], axis=-1) if taps else None
        return self.model.norm(h), features

    def logits(self, rows: mx.array) -> mx.array:
        return self.head(rows)

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.embed_tokens(ids)

    def head(self, rows: mx.array) -> mx.array:
        if "lm_head" in self:
            return self.lm_head(rows)
        return self.model.embed_tokens.as_linear(rows)
