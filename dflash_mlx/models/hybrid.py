"""Hybrid decoders, as qwen3_5 and qwen3_next are: gated delta-rule and gated attention layers.

The two families differ in how they pack the delta layers' projections and name their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import KVCache, RecurrentCache
from dflash_mlx.layers.gated_attention import GatedAttention
from dflash_mlx.layers.gated_delta_net import GatedDeltaNet
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.layers.moe import SparseMLP
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.models.experts import stack_experts
from dflash_mlx.models.hybrid_config import LINEAR, ExpertSizes, HybridConfig
from dflash_mlx.segment import Segment

# A_log is exponentiated twice; rounded to 16 bits it would shift every decay.
KEEP_TYPE = frozenset({"A_log"})

# Parts of a name that mark tensors of images and of multi-token prediction, which text needs not.
_OTHER_PARTS = frozenset({"mtp", "visual", "vision_tower"})

# Norms that Hugging Face stores as the difference from one.
_CENTRED_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)

DeltaLayer = Callable[..., GatedDeltaNet]


class HybridLayer(nn.Module):
    """h + mixer(norm(h)), then h + mlp(norm(h)); mixer is linear_attn or self_attn."""

    def __init__(self, config: HybridConfig, index: int, delta_layer: DeltaLayer) -> None:
        super().__init__()
        dense = config.dense
        hidden, eps = dense.hidden_size, dense.rms_norm_eps
        if config.layer_types[index] == LINEAR:
            self.linear_attn = delta_layer(hidden, config.delta, norm_eps=eps)
        else:
            self.self_attn = GatedAttention(
                hidden,
                dense.num_attention_heads,
                dense.num_key_value_heads,
                dense.head_dim,
                config.rope,
                bias=dense.attention_bias,
                norm_eps=eps,
            )
        if config.sparse[index]:
            assert config.experts is not None
            self.mlp: nn.Module = _sparse_mlp(hidden, config.experts)
        else:
            self.mlp = MLP(hidden, dense.intermediate_size)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def make_cache(self) -> KVCache | RecurrentCache:
        return self.linear_attn.make_cache() if "linear_attn" in self else KVCache()

    def __call__(self, h: mx.array, segments: Sequence[Segment], caches: Sequence[Any]) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]."""
        mixer = self.linear_attn if "linear_attn" in self else self.self_attn
        h = h + mixer(self.input_layernorm(h), segments, caches)
        return h + self.mlp(self.post_attention_layernorm(h))


class HybridTarget(DecoderTarget):
    """`delta_layer` makes the family's kind of gated delta-rule layer."""

    def __init__(self, config: HybridConfig, delta_layer: DeltaLayer) -> None:
        dense = config.dense
        super().__init__(
            [HybridLayer(config, i, delta_layer) for i in range(dense.num_hidden_layers)],
            nn.RMSNorm(dense.hidden_size, eps=dense.rms_norm_eps),
            vocab_size=dense.vocab_size,
            hidden_size=dense.hidden_size,
            context_length=dense.max_position_embeddings,
            tied=dense.tie_word_embeddings,
        )


def drop_other_parts(weights: dict[str, mx.array]) -> None:
    """Drop, by name and in place, what only images and multi-token prediction use."""
    for name in [n for n in weights if not _OTHER_PARTS.isdisjoint(n.split("."))]:
        del weights[name]


def convert_layout(weights: dict[str, mx.array], experts: int) -> None:
    """From Hugging Face's layout to MLX's, in place; names are the model's already.

    Norms become plain factors, conv1d [C, 1, taps] becomes [C, taps, 1], experts are stacked.
    """
    if experts:
        stack_experts(weights, experts)
    for name, array in weights.items():
        if name.endswith(_CENTRED_NORMS) or name == "model.norm.weight":
            weights[name] = array.astype(mx.float32) + 1.0
        elif name.endswith(".conv1d.weight"):
            weights[name] = mx.contiguous(array.swapaxes(1, 2))


def _sparse_mlp(hidden_size: int, sizes: ExpertSizes) -> SparseMLP:
    return SparseMLP(
        hidden_size,
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        intermediate_size=sizes.intermediate_size,
        normalise=sizes.normalise,
        shared_intermediate_size=sizes.shared_intermediate_size,
    )
