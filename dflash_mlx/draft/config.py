"""Reads a drafter's config.json strictly: every key is used, known to be inert, or refused by name.

Knows the DFlash v1 format only. A key inside `dflash_config` wins over one at the top level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.rope import Rope, rope_from_config


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARCHITECTURE = "DFlashDraftModel"
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys of other packagings and architectures, each with the values under which it changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": (None,),
    "transformer_layer_config": (None,),
    "aux_hidden_state_layer_ids": (None,),
    "attention_sink_bias": (None, False),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "sliding_window_non_causal": (None, False),
    "sample_from_anchor": (None, False),
    "mask_embedding": (None, False),
    "conv_kernel_size": (None, 0),
    "conv_group_size": (None, 0),
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
    "logit_scale": (None, 1),
    "is_neox_style": (None, True),
    "hidden_act": (None, "silu", "swish"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization": (None,),
    "quantization_config": (None,),
}

# Bookkeeping of transformers and of trainers; it says nothing about the forward pass.
_INERT = _words(
    """
    _attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_decoder
    is_encoder_decoder label2id model_type output_attentions output_hidden_states pad_token_id
    problem_type return_dict tie_word_embeddings torch_dtype transformers_version use_cache
    """
)

_ROPE_PARAMETERS = _words(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor
    high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
    """
)

_NESTED_KEYS = _words(
    """
    block_size mask_token_id target_layer_ids input_embedding_scale output_multiplier
    final_logit_softcapping causal
    """
)

_TOP_KEYS = _words(
    """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size vocab_size rms_norm_eps max_position_embeddings attention_bias
    num_target_layers layer_types sliding_window use_sliding_window max_window_layers is_causal
    rope_theta rope_scaling rope_parameters draft_vocab_size dflash_config
    """
)


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash v1 drafter.

    `windows` and `causal` hold one entry a layer: how many positions a query sees, itself
    included (None: all), and whether it sees only earlier rows of its block.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    num_target_layers: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope: Rope
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @property
    def feature_size(self) -> int:
        """Width of one position's features: a hidden state of the target for every tap."""
        return len(self.target_layer_ids) * self.hidden_size


def parse_config(config: Mapping[str, Any]) -> DFlashConfig:
    """Check and type a drafter's config.json.

    CheckpointError names a missing or malformed key, another packaging or architecture, and every
    key whose meaning is not known.
    """
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        _malformed("dflash_config", nested, "an object")
    _refuse_other_formats(config, nested)
    _refuse_unknown(config, _TOP_KEYS | _NESTED_KEYS - {"causal"} | _INERT, "config.json")
    _refuse_unknown(nested, _NESTED_KEYS, "dflash_config")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), Mapping):
            _refuse_unknown(config[key], _ROPE_PARAMETERS, key)
    layers = _positive_int(config, "num_hidden_layers")
    heads, kv_heads = (
        _positive_int(config, key) for key in ("num_attention_heads", "num_key_value_heads")
    )
    if heads % kv_heads:
        _malformed("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    head_dim = _positive_int(config, "head_dim")
    if head_dim % 2:
        _malformed("head_dim", head_dim, "an even number, which rotary positions need")
    kinds = _layer_types(config, layers)
    return DFlashConfig(
        hidden_size=_positive_int(config, "hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive_int(config, "intermediate_size"),
        vocab_size=_vocab_size(config),
        rms_norm_eps=_positive_float(config, "rms_norm_eps"),
        max_position_embeddings=_positive_int(config, "max_position_embeddings"),
        attention_bias=bool(_flag(config, "attention_bias")),
        num_target_layers=_optional_int(config, "num_target_layers"),
        block_size=_block_size(config, nested),
        mask_token_id=_mask_token_id(config, nested),
        target_layer_ids=_target_layer_ids(config, nested),
        windows=_windows(config, kinds),
        causal=_causal(config, nested, kinds),
        rope=rope_from_config(config, head_dim),
        input_embedding_scale=_scale(config, nested, "input_embedding_scale"),
        output_multiplier=_scale(config, nested, "output_multiplier"),
        final_logit_softcapping=_soft_cap(config, nested),
    )


def _refuse_other_formats(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    names = [str(name) for name in config.get("architectures") or ()]
    if "DFlash2DraftModel" in names:
        raise CheckpointError(
            "The drafter is a DFlash 2 model (DFlash2DraftModel), which is not supported yet; "
            "use a DFlash v1 drafter."
        )
    for source in (config, nested):
        for key, neutral in _NEUTRAL.items():
            if key in source and source[key] not in neutral:
                _refuse(key, source[key])
    own_keys = ("target_layer_ids", "mask_token_id", "block_size")
    is_drafter = _ARCHITECTURE in names or bool(nested) or any(key in config for key in own_keys)
    if not is_drafter:
        label = ", ".join(names) or config.get("model_type") or "without an architecture"
        raise CheckpointError(
            f"The checkpoint given as drafter is a target model ({label}); give it as the model "
            "and pass a DFlash drafter."
        )
    if names and _ARCHITECTURE not in names:
        raise CheckpointError(
            f"The drafter's architecture {', '.join(names)} is not supported; use a drafter whose "
            f"architecture is {_ARCHITECTURE}."
        )


def _refuse_unknown(source: Mapping[str, Any], known: Set[str], where: str) -> None:
    """A key that is set and not known could change what the drafter computes."""
    for key, value in source.items():
        if key not in known and key not in _NEUTRAL and value is not None:
            raise CheckpointError(
                f"{where} of the drafter sets {key} = {value!r}, whose meaning is not known; use "
                "a drafter without it."
            )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """One kind a layer; absent, layers from max_window_layers on slide when a window is active."""
    kinds = config.get("layer_types")
    if kinds is None:
        if not (config.get("sliding_window") and _flag(config, "use_sliding_window")):
            return ["full_attention"] * layers
        first = _whole("max_window_layers", _required(config, "max_window_layers"), 0)
        return [_LAYER_TYPES[i >= first] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        _malformed("layer_types", kinds, f"a list of {layers} entries, one a layer")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            _malformed("layer_types", kind, f"one of {', '.join(_LAYER_TYPES)}")
    return kinds


def _windows(config: Mapping[str, Any], kinds: list[str]) -> tuple[int | None, ...]:
    if "sliding_attention" not in kinds:
        return (None,) * len(kinds)
    # A false use_sliding_window takes the window away from sliding layers in transformers.
    if _flag(config, "use_sliding_window") is False:
        raise CheckpointError(
            "The drafter's layer_types have sliding_attention while use_sliding_window is false; "
            "correct the one that is wrong in config.json."
        )
    window = _positive_int(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(
    config: Mapping[str, Any], nested: Mapping[str, Any], kinds: list[str]
) -> tuple[bool, ...]:
    """is_causal, else dflash_config.causal, for all layers; null: sliding layers are causal."""
    outer, inner = _flag(config, "is_causal"), _flag(nested, "causal")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(
            f"The drafter's is_causal is {outer} and its dflash_config.causal {inner}; remove the "
            "one that is wrong from config.json."
        )
    chosen = inner if outer is None else outer
    return tuple(kind == "sliding_attention" if chosen is None else chosen for kind in kinds)


def _vocab_size(config: Mapping[str, Any]) -> int:
    size = _positive_int(config, "vocab_size")
    if config.get("draft_vocab_size") not in (None, size):
        _refuse("draft_vocab_size", config["draft_vocab_size"])
    return size


def _block_size(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    value = _draft_value(config, nested, "block_size")
    return _whole("block_size", value, 2)


def _mask_token_id(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    value = _draft_value(config, nested, "mask_token_id")
    return _whole("mask_token_id", value, 0)


def _target_layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _draft_value(config, nested, "target_layer_ids")
    if not isinstance(ids, list) or not ids:
        _malformed("target_layer_ids", ids, "a list of target layers")
    return tuple(_whole("target_layer_ids", layer, 0) for layer in ids)


def _scale(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> float:
    value = nested.get(key, config.get(key))
    return 1.0 if value is None else _positive_number(key, value)


def _soft_cap(config: Mapping[str, Any], nested: Mapping[str, Any]) -> float | None:
    key = "final_logit_softcapping"
    value = nested.get(key, config.get(key))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        _malformed(key, value, "a number")
    return float(value) if value > 0 else None


def _draft_value(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    """A required key of the drafter, nested first."""
    value = nested.get(key)
    return _required(config, key) if value is None else value


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(
            f"The drafter's config.json has no {key}; use a drafter whose config.json is complete."
        )
    return config[key]


def _positive_int(config: Mapping[str, Any], key: str) -> int:
    return _whole(key, _required(config, key), 1)


def _optional_int(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else _positive_int(config, key)


def _whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _malformed(key, value, f"a whole number of at least {least}")
    return value


def _positive_float(config: Mapping[str, Any], key: str) -> float:
    return _positive_number(key, _required(config, key))


def _positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        _malformed(key, value, "a number above zero")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        _malformed(key, value, "true, false or null")
    return value


def _malformed(key: str, value: Any, wanted: str) -> NoReturn:
    raise CheckpointError(
        f"The drafter's {key} is {value!r}, not {wanted}; correct its config.json."
    )


def _refuse(key: str, value: Any) -> NoReturn:
    raise CheckpointError(
        f"The drafter uses {key} = {value!r}, which is not supported; use a drafter without it."
    )
