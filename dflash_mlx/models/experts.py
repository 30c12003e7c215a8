"""Hugging Face's layouts of expert weights, per expert or fused, into one stack a projection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models.config import positive_int

_ONE_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FUSED = re.compile(r"(.*)\.experts\.(gate_up_proj|down_proj)")


def stated_experts(config: Mapping[str, Any]) -> int:
    """num_experts of the config, 0 where there are none."""
    return positive_int(config, "num_experts") if config.get("num_experts") else 0


def stack_experts(weights: dict[str, mx.array], count: int, name: str = "switch_mlp") -> None:
    """Rename `X.experts...` to `X.NAME.{gate,up,down}_proj.weight` [E, out, in], in place.

    Takes one tensor an expert (`experts.{i}.gate_proj.weight`), as checkpoints are released, and
    the fused `experts.gate_up_proj` [E, 2I, H], gate first. The stacks are lazy: each is read
    when it is evaluated, so no second copy of the checkpoint is ever held. CheckpointError names
    an expert that is missing.
    """
    for key in list(weights):
        if key not in weights:
            continue
        if match := _ONE_EXPERT.fullmatch(key):
            prefix, _, projection = match.groups()
            parts = [f"{prefix}.experts.{i}.{projection}.weight" for i in range(count)]
            if missing := [part for part in parts if part not in weights]:
                raise CheckpointError(
                    f"The checkpoint lacks {missing[0]}; fetch or convert it again."
                )
            stacked = mx.stack([weights.pop(part) for part in parts])
            weights[f"{prefix}.{name}.{projection}.weight"] = stacked
        elif match := _FUSED.fullmatch(key):
            prefix, projection = match.groups()
            fused = weights.pop(key)
            if projection == "down_proj":
                weights[f"{prefix}.{name}.down_proj.weight"] = fused
                continue
            # Contiguous, or each half would keep the whole tensor and be copied at every use.
            for half, part in zip(("gate_proj", "up_proj"), fused.split(2, axis=1), strict=True):
                weights[f"{prefix}.{name}.{half}.weight"] = mx.contiguous(part)
