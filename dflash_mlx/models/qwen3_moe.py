"""The qwen3_moe family: qwen3's attention, and sparse MLPs in all layers or some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.moe import SparseMLP
from dflash_mlx.layers.rope import rope_from_config
from dflash_mlx.models.config import (
    flag,
    layer_numbers,
    positive_int,
    read_dense_config,
    refuse,
)
from dflash_mlx.models.dense import DenseTarget
from dflash_mlx.models.experts import stack_experts

_OWN_KEYS = frozenset(
    {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "shared_expert_intermediate_size",
        "use_qk_norm",
        # Of the loss in training only.
        "output_router_logits",
        "router_aux_loss_coef",
    }
)
# Keys that some checkpoints state, with the one value that the family computes.
_COMPUTED = {"use_qk_norm": True, "shared_expert_intermediate_size": 0}


def build(config: Mapping[str, Any]) -> DenseTarget:
    """A qwen3_moe with unset weights from its config.json (transformers' Qwen3MoeConfig)."""
    for key, computed in _COMPUTED.items():
        if config.get(key) not in (None, computed):
            refuse(key, config[key])
    dense = read_dense_config(config, explicit_head_dim=True, own_keys=_OWN_KEYS)
    experts, chosen = expert_count(config), positive_int(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"The config's num_experts_per_tok {chosen} exceeds its {experts} experts; "
            "correct config.json."
        )
    inner, normalise = positive_int(config, "moe_intermediate_size"), flag(config, "norm_topk_prob")
    step = positive_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense_layers = layer_numbers(config, "mlp_only_layers")

    def mlp(index: int) -> SparseMLP | None:
        if index in dense_layers or (index + 1) % step:
            return None
        return SparseMLP(
            dense.hidden_size,
            experts=experts,
            experts_per_token=chosen,
            intermediate_size=inner,
            normalise=normalise,
        )

    return DenseTarget(dense, rope_from_config(config, dense.head_dim), qk_norm=True, mlp=mlp)


def expert_count(config: Mapping[str, Any]) -> int:
    """num_experts, which transformers 5 also writes as num_local_experts."""
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return positive_int(config, key)


def remap_hf(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """One stack a projection from a tensor an expert, or from the fused ones."""
    stack_experts(weights, expert_count(config))
