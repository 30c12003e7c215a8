"""Strict reading of Gemma 4's config.json: what every layer is, from the keys of its text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError, malformed
from dflash_mlx.layers.rope import Rope, proportional_rope, rope_from_config, rope_type
from dflash_mlx.models.config import (
    flag,
    object_of,
    positive_float,
    positive_int,
    refuse,
    warn_unread,
)

SLIDING, FULL = "sliding_attention", "full_attention"

# What transformers takes when a config leaves rope_parameters out.
_ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_READ_KEYS = """
    attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim
    head_dim hidden_activation hidden_size hidden_size_per_layer_input intermediate_size layer_types
    max_position_embeddings moe_intermediate_size num_attention_heads num_experts
    num_global_key_value_heads num_hidden_layers num_key_value_heads num_kv_shared_layers
    per_layer_config rms_norm_eps rope_parameters rope_traditional sliding_window
    tie_word_embeddings top_k_experts use_bidirectional_attention use_double_wide_mlp vocab_size
    vocab_size_per_layer_input
    """
_WRAPPER_KEYS = """
    audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    image_token_id text_config tie_word_embeddings video_token_id vision_config
    vision_soft_tokens_per_image vocab_size
    """


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer. `lender`: the earlier layer whose keys and values it uses, or None."""

    window: int | None  # positions a query sees, itself included; None for all
    head_dim: int
    kv_heads: int
    values_are_keys: bool  # no v_proj: values are the keys before norm and rope
    lender: int | None
    intermediate_size: int
    rope: Rope


@dataclass(frozen=True)
class ExpertPlan:
    """The routed experts beside every layer's dense MLP (26B-A4B)."""

    experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class Gemma4Config:
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    final_logit_softcapping: float | None
    experts: ExpertPlan | None
    layers: tuple[LayerPlan, ...]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal config, or the config of a text model itself."""
    return object_of(config, "text_config") or config


def tied(config: Mapping[str, Any]) -> bool:
    """tie_word_embeddings of the text model, else of the whole; Gemma ties when neither says."""
    for source in (text_config(config), config):
        if source.get("tie_word_embeddings") is not None:
            return flag(source, "tie_word_embeddings")
    return True


def read_gemma4_config(config: Mapping[str, Any]) -> Gemma4Config:
    """Read a text model's or a multimodal config.json (transformers' Gemma4Config and its kin).

    CheckpointError names a missing or malformed key and every setting that is not supported.
    """
    text = text_config(config)
    if text is not config:
        warn_unread(config, frozenset(_WRAPPER_KEYS.split()))
    warn_unread(text, frozenset(_READ_KEYS.split()))
    _refuse_unsupported(text, str(config.get("model_type")))
    cap = text.get("final_logit_softcapping")
    return Gemma4Config(
        hidden_size=positive_int(text, "hidden_size"),
        vocab_size=positive_int(text, "vocab_size"),
        max_position_embeddings=positive_int(text, "max_position_embeddings"),
        num_attention_heads=positive_int(text, "num_attention_heads"),
        rms_norm_eps=positive_float(text, "rms_norm_eps"),
        attention_bias=flag(text, "attention_bias"),
        tie_word_embeddings=tied(config),
        final_logit_softcapping=None
        if cap is None
        else positive_float(text, "final_logit_softcapping"),
        experts=_expert_plan(text),
        layers=_layer_plans(text),
    )


def _refuse_unsupported(text: Mapping[str, Any], model_type: str) -> None:
    # transformers' default is 256 per-layer inputs, but the unified models know none.
    inputs = text.get("hidden_size_per_layer_input", 0 if "unified" in model_type else 256)
    if inputs:
        raise CheckpointError(
            f"The config's hidden_size_per_layer_input = {inputs!r:.80} (the per-layer inputs of "
            "Gemma 4 E2B and E4B) is not supported; use a 12B, 26B-A4B or 31B model."
        )
    for key, supported in (
        ("hidden_activation", (None, "gelu_pytorch_tanh")),
        ("use_bidirectional_attention", (None, "vision")),  # "vision" concerns image tokens only
        ("rope_traditional", (None, False)),
    ):
        if text.get(key) not in supported:
            refuse(key, text[key])


def _expert_plan(text: Mapping[str, Any]) -> ExpertPlan | None:
    if not flag(text, "enable_moe_block"):
        return None
    experts, top_k = positive_int(text, "num_experts"), positive_int(text, "top_k_experts")
    if top_k > experts:
        raise CheckpointError(
            f"The config's top_k_experts {top_k} is more than its num_experts {experts}; "
            "correct config.json."
        )
    return ExpertPlan(experts, top_k, positive_int(text, "moe_intermediate_size"))


def _layer_plans(text: Mapping[str, Any]) -> tuple[LayerPlan, ...]:
    kinds = _layer_kinds(text)
    lenders = _lenders(text, kinds)
    heads = positive_int(text, "num_attention_heads")
    ropes: dict[tuple[str, int], Rope] = {}
    plans = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = _head_sizes(text, index, kind)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"The config gives layer {index} {kv_heads} key/value heads of {head_dim} for "
                f"{heads} query heads, which cannot be; correct config.json."
            )
        if (kind, head_dim) not in ropes:
            ropes[kind, head_dim] = _rope(text, kind, head_dim)
        double = lenders[index] is not None and flag(text, "use_double_wide_mlp")
        plans.append(
            LayerPlan(
                window=positive_int(text, "sliding_window") if kind == SLIDING else None,
                head_dim=head_dim,
                kv_heads=kv_heads,
                values_are_keys=kind == FULL and flag(text, "attention_k_eq_v"),
                lender=lenders[index],
                intermediate_size=positive_int(text, "intermediate_size") * (2 if double else 1),
                rope=ropes[kind, head_dim],
            )
        )
    return tuple(plans)


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    count, kinds = positive_int(text, "num_hidden_layers"), text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count:
        malformed("layer_types", kinds, f"a list of {count} kinds")
    if other := sorted({str(kind) for kind in kinds} - {SLIDING, FULL}):
        refuse("layer_types", ", ".join(other))
    if kinds[-1] != FULL:
        # transformers would run another layer than the one the config states.
        malformed("last of layer_types", kinds[-1], FULL)
    return kinds


def _lenders(text: Mapping[str, Any], kinds: list[str]) -> list[int | None]:
    """For each of the last num_kv_shared_layers layers the last layer of its kind before them."""
    count = len(kinds)
    shared = shared_layers(text, count)
    own = count - shared
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    if missing := sorted(set(kinds[own:]) - last.keys()):
        raise CheckpointError(
            f"The config's num_kv_shared_layers {shared} leaves no {missing[0]} layer to share "
            "from; correct config.json."
        )
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]


def shared_layers(text: Mapping[str, Any], count: int) -> int:
    """num_kv_shared_layers of `count` layers."""
    shared = text.get("num_kv_shared_layers") or 0
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < count:
        malformed("num_kv_shared_layers", shared, f"a whole number below {count}")
    return shared


def _head_sizes(text: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """(head_dim, key/value heads) of a layer.

    transformers writes exceptions by layer (per_layer_config); released checkpoints state them for
    all full-attention layers (global_head_dim, and num_global_key_value_heads where keys are
    values).
    """
    sizes = {key: positive_int(text, key) for key in ("head_dim", "num_key_value_heads")}
    if text.get("per_layer_config") is not None:
        exceptions = text["per_layer_config"]
        own = exceptions.get(str(index), {}) if isinstance(exceptions, Mapping) else None
        if not isinstance(own, Mapping) or own.keys() - sizes.keys():
            malformed("per_layer_config", exceptions, "head_dim and num_key_value_heads by layer")
        sizes.update({key: positive_int(own, key) for key in own})
    elif kind == FULL:
        sizes["head_dim"] = positive_int(text, "global_head_dim")
        if flag(text, "attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            sizes["num_key_value_heads"] = positive_int(text, "num_global_key_value_heads")
    return sizes["head_dim"], sizes["num_key_value_heads"]


def rope_parameters(text: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The rotary settings of one kind of layer."""
    parameters = text.get("rope_parameters") or _ROPE_DEFAULTS
    own = parameters.get(kind) if isinstance(parameters, Mapping) else None
    if not isinstance(own, Mapping):
        malformed("rope_parameters", parameters, f"an object with one for {kind}")
    return own


def _rope(text: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    own = rope_parameters(text, kind)
    if rope_type(own) == "proportional":
        return proportional_rope(own, head_dim)
    return rope_from_config({"rope_parameters": own}, head_dim)
