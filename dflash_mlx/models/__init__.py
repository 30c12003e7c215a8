"""Target families: one file each, the contract in base. A new family adds its row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import llama, qwen3
from dflash_mlx.models.dense import DenseTarget

# config.json's model_type -> a model with unset weights.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], DenseTarget]] = {
    "llama": llama.build,
    "qwen3": qwen3.build,
}


def build_target(config: Mapping[str, Any]) -> DenseTarget:
    """A model with unset weights; CheckpointError names a model_type that is not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"The config's model_type {family!r} is not supported; use a model of one of "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[family](config)
