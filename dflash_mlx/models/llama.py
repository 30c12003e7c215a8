"""The llama family: Llama 2 and 3, SmolLM2 and others of the same arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.layers.rope import rope_from_config
from dflash_mlx.models.config import read_dense_config
from dflash_mlx.models.dense import DenseTarget


def build(config: Mapping[str, Any]) -> DenseTarget:
    """A llama with unset weights from its config.json (transformers' LlamaConfig)."""
    dense = read_dense_config(config, explicit_head_dim=False)
    return DenseTarget(dense, rope_from_config(config, dense.head_dim), qk_norm=False)
