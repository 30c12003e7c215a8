"""The qwen3_next family (Qwen3-Next, Qwen3-Coder-Next): fused projections in the delta layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dflash_mlx.layers.gated_delta_net import FusedDeltaNet
from dflash_mlx.models.experts import stated_experts
from dflash_mlx.models.hybrid import HybridTarget, convert_layout, drop_other_parts
from dflash_mlx.models.hybrid_config import read_hybrid_config


def build(config: Mapping[str, Any]) -> HybridTarget:
    """A qwen3_next with unset weights from its config.json (transformers' Qwen3NextConfig)."""
    return HybridTarget(read_hybrid_config(config), FusedDeltaNet)


def remap_hf(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Hugging Face's layouts to the model's, in place; multi-token prediction is dropped."""
    drop_other_parts(weights)
    convert_layout(weights, stated_experts(config))
