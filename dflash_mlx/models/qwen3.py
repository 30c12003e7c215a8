"""The qwen3 family (dense): per-head norms of queries and keys, head_dim apart from H / heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.layers.rope import rope_from_config
from dflash_mlx.models.config import read_dense_config
from dflash_mlx.models.dense import DenseTarget


def build(config: Mapping[str, Any]) -> DenseTarget:
    """A qwen3 with unset weights from its config.json (transformers' Qwen3Config)."""
    dense = read_dense_config(config, explicit_head_dim=True)
    return DenseTarget(dense, rope_from_config(config, dense.head_dim), qk_norm=True)
