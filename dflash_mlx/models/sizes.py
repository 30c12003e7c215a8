"""Sizes of a config against the tensors it comes with, before a model of these sizes is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models.config import object_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Keys whose value is, or divides, a dimension of some tensor.
_WIDTH_NAMES = """
    hidden_size intermediate_size vocab_size head_dim num_attention_heads num_key_value_heads
    global_head_dim num_global_key_value_heads num_experts num_local_experts num_experts_per_tok
    top_k_experts moe_intermediate_size shared_expert_intermediate_size linear_num_key_heads
    linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    """
_MOST_PACKED = 16  # numbers of 2 bits in a uint32, the most that a checkpoint packs


def check_sizes(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], source: Path | str
) -> None:
    """CheckpointError for a number of layers or a width that the tensors have no room for.

    A broken number could ask for more layers or larger tables than memory holds; what is only
    wrong is found later, tensor by tensor. Values that are no numbers are left to the family.
    """
    layers = {int(match[1]) for name in weights if (match := _LAYER.search(name))}
    widest = max((_width(array) for array in weights.values()), default=0)
    limits = dict.fromkeys(_WIDTH_NAMES.split(), widest) | {
        "num_hidden_layers": max(layers, default=-1) + 1
    }
    for level in (config, object_of(config, "text_config")):
        for key, most in limits.items():
            value = level.get(key)
            if isinstance(value, int) and value > most:
                raise CheckpointError(
                    f"The config's {key} is {value!r:.80}, the tensors of {source} have room "
                    f"for {most}; use the config.json that belongs to these weights."
                )


def _width(array: mx.array) -> int:
    packed = _MOST_PACKED if array.dtype == mx.uint32 else 1
    return max(array.shape, default=0) * packed
