"""Typed, strict reading of the config.json of hybrids of gated delta-rule and attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.gated_delta_net import DeltaSizes
from dflash_mlx.layers.rope import Rope, rope_from_config, rope_scaling
from dflash_mlx.models.config import (
    DenseConfig,
    flag,
    layer_kinds,
    layer_numbers,
    positive_float,
    positive_int,
    read_dense_config,
    refuse,
)

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_INTERVAL, DEFAULT_ROTARY = 4, 0.25  # transformers' defaults of these families

_OWN_KEY_NAMES = """
    attn_output_gate decoder_sparse_step full_attention_interval layer_types
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_ssm_dtype mlp_only_layers moe_intermediate_size norm_topk_prob
    num_experts num_experts_per_tok shared_expert_intermediate_size
    mtp_num_hidden_layers mtp_use_dedicated_embeddings output_router_logits router_aux_loss_coef
    """
_OWN_KEYS = frozenset(_OWN_KEY_NAMES.split())


@dataclass(frozen=True)
class ExpertSizes:
    """A sparse MLP's routed experts, and the one that all tokens share."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise: bool


@dataclass(frozen=True)
class HybridConfig:
    """`dense` holds what hybrids share with dense models; `sparse` says which layers have experts.

    `dense.intermediate_size` counts in layers without experts only.
    """

    dense: DenseConfig
    delta: DeltaSizes
    rope: Rope
    layer_types: tuple[str, ...]
    experts: ExpertSizes | None
    sparse: tuple[bool, ...]


def read_hybrid_config(config: Mapping[str, Any]) -> HybridConfig:
    """Read the config of a text model (the `text_config` of a multimodal one).

    CheckpointError names a missing or malformed key and every setting that is not supported.
    """
    if config.get("attn_output_gate", True) is not True:
        refuse("attn_output_gate", config["attn_output_gate"])
    if config.get("mamba_ssm_dtype") not in (None, "float32"):
        refuse("mamba_ssm_dtype", config["mamba_ssm_dtype"])
    experts = _experts(config) if config.get("num_experts") else None
    shared = dict(config)
    if experts is not None and shared.get("intermediate_size") is None:
        # A mixture in every layer states none.
        shared["intermediate_size"] = experts.intermediate_size
    dense = read_dense_config(shared, explicit_head_dim=True, own_keys=_OWN_KEYS)
    return HybridConfig(
        dense=dense,
        delta=_delta_sizes(config),
        rope=_rope(config, dense.head_dim),
        layer_types=_layer_types(config, dense.num_hidden_layers),
        experts=experts,
        sparse=_sparse_layers(config, dense.num_hidden_layers, experts is not None),
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """layer_types, else every full_attention_interval-th layer is one of full attention."""
    kinds = layer_kinds(config)
    if kinds is None:
        key = "full_attention_interval"
        interval = positive_int({key: DEFAULT_INTERVAL, **config}, key)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if len(kinds) != layers:
        raise CheckpointError(
            f"The config has {len(kinds)} layer_types for {layers} layers; correct config.json."
        )
    if other := sorted(set(kinds) - {LINEAR, FULL}):
        refuse("layer_types", ", ".join(other))
    return tuple(kinds)


def _delta_sizes(config: Mapping[str, Any]) -> DeltaSizes:
    sizes = DeltaSizes(
        key_heads=positive_int(config, "linear_num_key_heads"),
        value_heads=positive_int(config, "linear_num_value_heads"),
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        conv_taps=positive_int(config, "linear_conv_kernel_dim"),
    )
    if sizes.value_heads % sizes.key_heads:
        raise CheckpointError(
            f"The config's linear_num_value_heads {sizes.value_heads} is no multiple of its "
            f"linear_num_key_heads {sizes.key_heads}; correct config.json."
        )
    return sizes


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The rotation of the first partial_rotary_factor of each head.

    mrope_section and mrope_interleaved choose among the positions of an image's axes; the axes of
    text all have the same position, so that they change nothing.
    """
    key, scaling = "partial_rotary_factor", rope_scaling(config)
    given = scaling.pop(key, None)
    factor = positive_float({key: given or config.get(key) or DEFAULT_ROTARY}, key)
    dims = int(head_dim * factor)
    if factor > 1 or dims % 2 or not dims:
        raise CheckpointError(
            f"The config's {key} {factor} of head_dim {head_dim} is no even number of dimensions; "
            "correct config.json."
        )
    plain = {k: v for k, v in config.items() if k not in (key, "rope_parameters", "rope_scaling")}
    return rope_from_config({**plain, "rope_parameters": scaling}, dims)


def _experts(config: Mapping[str, Any]) -> ExpertSizes:
    sizes = ExpertSizes(
        experts=positive_int(config, "num_experts"),
        experts_per_token=positive_int(config, "num_experts_per_tok"),
        intermediate_size=positive_int(config, "moe_intermediate_size"),
        shared_intermediate_size=positive_int(config, "shared_expert_intermediate_size"),
        normalise=flag({"norm_topk_prob": True, **config}, "norm_topk_prob"),
    )
    if sizes.experts_per_token > sizes.experts:
        raise CheckpointError(
            f"The config's num_experts_per_tok {sizes.experts_per_token} exceeds its "
            f"{sizes.experts} experts; correct config.json."
        )
    return sizes


def _sparse_layers(config: Mapping[str, Any], layers: int, mixture: bool) -> tuple[bool, ...]:
    key = "decoder_sparse_step"
    step = positive_int({key: 1, **config}, key)
    dense = layer_numbers(config, "mlp_only_layers")
    return tuple(mixture and i not in dense and (i + 1) % step == 0 for i in range(layers))
