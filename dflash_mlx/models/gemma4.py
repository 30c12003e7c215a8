"""The Gemma 4 text models: sliding and full attention with sizes of their own, four norms a layer.

Covers the text part of 12B, 26B-A4B (experts beside the dense MLP) and 31B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import BorrowedCache, CacheStack, KVCache, WindowCache
from dflash_mlx.layers.gemma_attention import GemmaAttention
from dflash_mlx.layers.mlp import MLP, geglu
from dflash_mlx.layers.moe import Experts, mixed, top_k_softmax
from dflash_mlx.models.config import positive_int
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.models.experts import stack_experts, stated_experts
from dflash_mlx.models.gemma4_config import (
    ExpertPlan,
    Gemma4Config,
    LayerPlan,
    read_gemma4_config,
    shared_layers,
    text_config,
    tied,
)
from dflash_mlx.segment import Segment

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")

# Beginnings of the names of what is no part of the text model.
_OTHER_MODALITIES = (
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "multi_modal_projector.",
    "vision_embedder.",
    "vision_tower.",
)


class Gemma4Layer(nn.Module):
    """Attention and feed-forward, each between two norms on its branch; then one scalar on all."""

    def __init__(self, config: Gemma4Config, plan: LayerPlan) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.window, self.lender = plan.window, plan.lender
        self.self_attn = GemmaAttention(
            hidden,
            config.num_attention_heads,
            plan.kv_heads,
            plan.head_dim,
            plan.rope,
            window=plan.window,
            norm_eps=eps,
            bias=config.attention_bias,
            values_are_keys=plan.values_are_keys,
            borrows=plan.lender is not None,
        )
        self.mlp = MLP(hidden, plan.intermediate_size, activation=geglu)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def make_cache(self) -> KVCache | WindowCache:
        return KVCache() if self.window is None else WindowCache(self.window)

    def __call__(self, h: mx.array, segments: Sequence[Segment], caches: Sequence[Any]) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]."""
        attended = self.self_attn(self.input_layernorm(h), segments, caches)
        h = h + self.post_attention_layernorm(attended)
        h = h + self.post_feedforward_layernorm(self._feed_forward(h))
        return h * self.layer_scalar

    def _feed_forward(self, h: mx.array) -> mx.array:
        return self.mlp(self.pre_feedforward_layernorm(h))


class Router(nn.Module):
    """Chooses a row's experts, by what the row is before the feed-forward's norm."""

    def __init__(self, hidden_size: int, plan: ExpertPlan, eps: float) -> None:
        super().__init__()
        self.top_k, self.eps, self.root = plan.top_k, eps, hidden_size**-0.5
        self.proj = nn.Linear(hidden_size, plan.experts, bias=False)
        self.scale = mx.ones((hidden_size,))
        self.per_expert_scale = mx.ones((plan.experts,))

    def __call__(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """[..., H] -> indices and weights of the experts [..., k]."""
        logits = self.proj(mx.fast.rms_norm(h, self.scale * self.root, self.eps))
        indices, weights = top_k_softmax(logits, self.top_k)
        return indices, weights * self.per_expert_scale[indices]


class RoutedExperts(nn.Module):
    def __init__(self, hidden_size: int, plan: ExpertPlan) -> None:
        super().__init__()
        self.switch_glu = Experts(
            plan.experts, hidden_size, plan.intermediate_size, activation=geglu
        )

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """[..., H] -> [..., H]."""
        return mixed(self.switch_glu(x, indices), weights)


class Gemma4SparseLayer(Gemma4Layer):
    """A layer whose feed-forward is the dense MLP and, beside it, routed experts."""

    def __init__(self, config: Gemma4Config, plan: LayerPlan, experts: ExpertPlan) -> None:
        super().__init__(config, plan)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.router = Router(hidden, experts, eps)
        self.experts = RoutedExperts(hidden, experts)
        self.post_feedforward_layernorm_1 = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm_2 = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm_2 = nn.RMSNorm(hidden, eps=eps)

    def _feed_forward(self, h: mx.array) -> mx.array:
        dense = self.post_feedforward_layernorm_1(super()._feed_forward(h))
        routed = self.experts(self.pre_feedforward_layernorm_2(h), *self.router(h))
        return dense + self.post_feedforward_layernorm_2(routed)


class Gemma4Target(DecoderTarget):
    """Embeddings are scaled by √H, also those that drafters borrow; logits are soft-capped."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(
            [
                Gemma4Layer(config, plan)
                if config.experts is None
                else Gemma4SparseLayer(config, plan, config.experts)
                for plan in config.layers
            ],
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            context_length=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )
        self.embed_scale = config.hidden_size**0.5
        self.final_logit_softcapping = config.final_logit_softcapping

    def make_cache(self) -> CacheStack:
        caches: list[Any] = []
        for layer in self.model.layers:
            own = layer.lender is None
            caches.append(layer.make_cache() if own else BorrowedCache(caches[layer.lender]))
        return CacheStack(caches)

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.embed_tokens(ids) * self.embed_scale

    def logits(self, rows: mx.array) -> mx.array:
        logits, cap = self.head(rows), self.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap


def build(config: Mapping[str, Any]) -> Gemma4Target:
    """A Gemma 4 text model with unset weights from its config.json, multimodal or not."""
    return Gemma4Target(read_gemma4_config(config))


def remap(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Names of Hugging Face's and MLX's checkpoints -> the model's; other modalities are dropped.

    The text model is at `model.language_model.` (Hugging Face) or `language_model.model.` (MLX)
    in multimodal checkpoints. Projections that borrowing layers do not use are dropped, too.
    """
    text = text_config(config)
    layers = positive_int(text, "num_hidden_layers")
    unused = [
        f"model.layers.{index}.self_attn.{part}."
        for index in range(layers - shared_layers(text, layers), layers)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    if tied(config):
        unused.append("lm_head.")
    for name in list(weights):
        array = weights.pop(name)
        own = name.removeprefix("model.")
        if own.startswith(_OTHER_MODALITIES):
            continue
        if own.startswith("language_model.model.") or own.startswith("language_model.lm_head."):
            own = own.removeprefix("language_model.")
        elif own.startswith("language_model."):
            own = own.replace("language_model.", "model.", 1)
        else:
            own = name
        if not own.startswith(tuple(unused)):
            weights[own] = array
    stack_experts(weights, stated_experts(text), "experts.switch_glu")
