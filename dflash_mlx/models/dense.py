"""A pre-norm decoder of attention and MLP, as llama and qwen3 are; families configure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import KVCache, WindowCache
from dflash_mlx.layers.attention import Attention
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.layers.rope import Rope
from dflash_mlx.models.config import DenseConfig
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.segment import Segment


class DecoderLayer(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(
        self,
        config: DenseConfig,
        rope: Rope,
        *,
        qk_norm: bool,
        mlp: nn.Module | None = None,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
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
            window=window,
            sinks=sinks,
        )
        if mlp is None:
            mlp = MLP(hidden, config.intermediate_size, bias=config.mlp_bias)
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def make_cache(self) -> KVCache | WindowCache:
        return self.self_attn.make_cache()

    def __call__(
        self,
        h: mx.array,
        segments: Sequence[Segment],
        caches: Sequence[KVCache | WindowCache],
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]."""
        h = h + self.self_attn(self.input_layernorm(h), segments, caches)
        return h + self.mlp(self.post_attention_layernorm(h))


class DenseTarget(DecoderTarget):
    """`qk_norm` adds the per-head norms of queries and keys, `sinks` a learned sink a head.

    mlp: the MLP of layer i where it is not the dense gated one (None: the dense one).
    windows: of each layer the positions a query sees, None for all.
    """

    def __init__(
        self,
        config: DenseConfig,
        rope: Rope,
        *,
        qk_norm: bool,
        mlp: Callable[[int], nn.Module | None] = lambda index: None,
        windows: Sequence[int | None] | None = None,
        sinks: bool = False,
    ) -> None:
        spans = windows or [None] * config.num_hidden_layers
        layers = [
            DecoderLayer(config, rope, qk_norm=qk_norm, mlp=mlp(index), window=span, sinks=sinks)
            for index, span in enumerate(spans)
        ]
        super().__init__(
            layers,
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            context_length=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )
