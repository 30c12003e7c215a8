"""The gpt_oss family: sliding and full attention with sinks, experts with biases, MXFP4 weights.

Follows transformers' GptOssModel; the MXFP4 blocks are kept as MLX reads them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.moe import Experts, mixed, top_k_softmax
from dflash_mlx.layers.rope import rope_from_config, rope_scaling
from dflash_mlx.models.config import (
    layer_kinds,
    positive_float,
    positive_int,
    read_dense_config,
    refuse,
)
from dflash_mlx.models.dense import DenseTarget

_OWN_KEYS = frozenset(
    {
        "experts_per_token",  # the older name of num_experts_per_tok, beside it
        "initial_context_length",
        "layer_types",
        "num_experts_per_tok",
        "num_local_experts",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
        # Of the loss in training only.
        "output_router_logits",
        "router_aux_loss_coef",
    }
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
# HF's name of an expert tensor -> projection and parameter.
_EXPERT_TENSORS = {
    projection + ending: (projection, parameter)
    for projection in ("gate_up_proj", "down_proj")
    for ending, parameter in (
        ("", "weight"),
        ("_blocks", "weight"),
        ("_scales", "scales"),
        ("_bias", "bias"),
    )
}


@partial(mx.compile, shapeless=True)
def clamped_swiglu(gate: mx.array, up: mx.array, alpha: float, limit: float) -> mx.array:
    """gate · sigmoid(alpha · gate) · (up + 1), gate clamped from above, up from both sides."""
    gate = mx.minimum(gate, limit)
    up = mx.clip(up, -limit, limit)
    return (up + 1.0) * (gate * mx.sigmoid(alpha * gate))


class RoutedMLP(nn.Module):
    """A biased router, the top k's softmax, experts with biases and the clamped activation."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        experts: int,
        experts_per_token: int,
        alpha: float,
        limit: float,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.router = nn.Linear(hidden_size, experts, bias=True)
        self.experts = Experts(
            experts,
            hidden_size,
            intermediate_size,
            bias=True,
            activation=partial(clamped_swiglu, alpha=alpha, limit=limit),
        )

    def __call__(self, x: mx.array) -> mx.array:
        """[..., H] -> [..., H]."""
        indices, weights = top_k_softmax(self.router(x), self.experts_per_token)
        return mixed(self.experts(x, indices), weights)


def build(config: Mapping[str, Any]) -> DenseTarget:
    """A gpt_oss with unset weights from its config.json (transformers' GptOssConfig)."""
    config = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, **config}
    if not rope_scaling(config):
        raise CheckpointError(
            "The config has no rope_scaling; add the YaRN settings the model was made with."
        )
    dense = read_dense_config(config, explicit_head_dim=True, own_keys=_OWN_KEYS)
    experts = positive_int(config, "num_local_experts")
    chosen = positive_int(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"The config's num_experts_per_tok {chosen} exceeds its {experts} experts; "
            "correct config.json."
        )
    alpha, limit = positive_float(config, "swiglu_alpha"), positive_float(config, "swiglu_limit")

    def mlp(index: int) -> RoutedMLP:
        return RoutedMLP(
            dense.hidden_size,
            dense.intermediate_size,
            experts=experts,
            experts_per_token=chosen,
            alpha=alpha,
            limit=limit,
        )

    return DenseTarget(
        dense,
        rope_from_config(config, dense.head_dim),
        qk_norm=False,
        mlp=mlp,
        windows=_windows(config, dense.num_hidden_layers),
        sinks=True,
    )


def _windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Of each layer the positions a query sees; without layer_types they alternate."""
    kinds = layer_kinds(config) or [(_SLIDING, _FULL)[i % 2] for i in range(layers)]
    if len(kinds) != layers:
        raise CheckpointError(
            f"The config's layer_types names {len(kinds)} layers of {layers}; correct config.json."
        )
    if other := sorted(set(kinds) - {_SLIDING, _FULL}):
        refuse("layer_types", ", ".join(other))
    if _SLIDING not in kinds:
        return [None] * layers
    window = positive_int(config, "sliding_window")
    return [window if kind == _SLIDING else None for kind in kinds]


def quantization(method: str) -> Mapping[str, Any] | None:
    """The quantization a HF checkpoint of the family comes in, in MLX's terms."""
    return _MXFP4 if method == "mxfp4" else None


def remap_hf(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Cut the interleaved gate_up tensors into gate and up, [E, out, in] each, in place.

    Takes the experts as MXFP4 (`*_blocks` [E, out, groups, 16] of two 4-bit numbers a byte,
    `*_scales` [E, out, groups]) or as transformers writes them unquantized ([E, in, out]).
    """
    for key in list(weights):
        prefix, _, name = key.rpartition(".experts.")
        if name not in _EXPERT_TENSORS:
            continue
        projection, suffix = _EXPERT_TENSORS[name]
        tensor = weights.pop(key)
        if name.endswith("_proj"):
            tensor = tensor.swapaxes(1, 2)
        elif name.endswith("_blocks"):
            # The earlier number is in the low half of a byte, as MLX packs eight into a uint32.
            tensor = tensor.flatten(-2).view(mx.uint32)
        path = f"{prefix}.experts"
        if projection == "down_proj":
            weights[f"{path}.down_proj.{suffix}"] = mx.contiguous(tensor)
            continue
        # Contiguous, or each half would keep the whole tensor and be copied at every use.
        weights[f"{path}.gate_proj.{suffix}"] = mx.contiguous(tensor[:, ::2])
        weights[f"{path}.up_proj.{suffix}"] = mx.contiguous(tensor[:, 1::2])
