"""Target families: one file each, the contract in base. A new family adds its row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import gemma4, gpt_oss, llama, qwen3, qwen3_5, qwen3_moe, qwen3_next
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.models.hybrid import KEEP_TYPE

Weights = dict[str, mx.array]


def _same_names(weights: Weights, config: Mapping[str, Any]) -> None:
    """The checkpoint's names are the model's."""


def _unquantized(method: str) -> None:
    """The family's HF checkpoints come unquantized."""


class Family(NamedTuple):
    """build: config.json -> a model with unset weights.

    remap_hf: renames, splits or drops by name, in place, what a Hugging Face checkpoint of the
    family holds otherwise than the model; not called for checkpoints in MLX's format.
    quantization: a HF config's quant_method -> MLX's `quantization` object for what remap_hf
    makes of such a checkpoint; None for a method that is not supported.
    remap_mlx: the same for checkpoints in MLX's format.
    keep_type: last parts of the names of parameters that stay in the checkpoint's number type.
    """

    build: Callable[[Mapping[str, Any]], DecoderTarget]
    remap_hf: Callable[[Weights, Mapping[str, Any]], None] = _same_names
    quantization: Callable[[str], Mapping[str, Any] | None] = _unquantized
    remap_mlx: Callable[[Weights, Mapping[str, Any]], None] = _same_names
    keep_type: frozenset[str] = frozenset()


# by config.json's model_type
FAMILIES: dict[str, Family] = {
    "llama": Family(llama.build),
    "qwen3": Family(qwen3.build),
    "qwen3_moe": Family(qwen3_moe.build, qwen3_moe.remap_hf),
    "gpt_oss": Family(gpt_oss.build, gpt_oss.remap_hf, gpt_oss.quantization),
    **dict.fromkeys(
        qwen3_5.MODEL_TYPES,
        Family(
            qwen3_5.build,
            qwen3_5.remap_hf,
            remap_mlx=qwen3_5.remap_mlx,
            keep_type=KEEP_TYPE,
        ),
    ),
    "qwen3_next": Family(qwen3_next.build, qwen3_next.remap_hf, keep_type=KEEP_TYPE),
    **dict.fromkeys(gemma4.MODEL_TYPES, Family(gemma4.build, gemma4.remap, remap_mlx=gemma4.remap)),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The config's family; CheckpointError names a model_type that is not supported."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"The config's model_type {name!r:.80} is not supported; use a model of one of "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def build_target(config: Mapping[str, Any]) -> DecoderTarget:
    """A model with unset weights; CheckpointError as `family_of`."""
    return family_of(config).build(config)
