"""The qwen3_5 families (dense and mixture), of Qwen3.5 and Qwen3.6: the text model alone.

Images and the extra heads for multi-token prediction are left out, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dflash_mlx.layers.gated_delta_net import SplitDeltaNet
from dflash_mlx.models.config import object_of
from dflash_mlx.models.experts import stated_experts
from dflash_mlx.models.hybrid import HybridTarget, convert_layout, drop_other_parts
from dflash_mlx.models.hybrid_config import read_hybrid_config

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")

# Where checkpoints keep the text model: Hugging Face, MLX, and a text model on its own.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def build(config: Mapping[str, Any]) -> HybridTarget:
    """A qwen3_5 with unset weights from config.json (transformers' Qwen3_5Config and its kin)."""
    return HybridTarget(read_hybrid_config(_text_config(config)), SplitDeltaNet)


def remap_hf(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Hugging Face's names and layouts to the model's, in place."""
    remap_mlx(weights, config)
    convert_layout(weights, stated_experts(_text_config(config)))


def remap_mlx(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """MLX's names to the model's, in place; the head of a tied model is dropped."""
    drop_other_parts(weights)
    for name in list(weights):
        for prefix, own in _PREFIXES:
            if name.startswith(prefix):
                weights[own + name.removeprefix(prefix)] = weights.pop(name)
    if _text_config(config).get("tie_word_embeddings"):
        for name in [n for n in weights if n.startswith("lm_head.")]:
            del weights[name]


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of the config; the top level may say alone whether the head is tied."""
    text = object_of(config, "text_config") or config
    return {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
