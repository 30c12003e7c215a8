"""Typed, strict reading of the config.json keys that dense transformer families share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash_mlx.errors import CheckpointError, malformed

_log = logging.getLogger(__name__)

_MOST_LAYERS = 10_000  # all of them are made before the weights are known to be there

_ROPE_KEYS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "rope_freq_factors", "partial_rotary_factor"}
)

# Keys that change a model's arithmetic where it is not what these families compute, with the
# values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False, None),
    "rope_traditional": (False, None),
    "use_sliding_window": (False, None),
    "no_rope_layers": (None, []),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "use_qk_norm": (False, None),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}

# Keys about training, generation or files; they say nothing about the forward pass.
_INERT_KEYS = """
    _attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward conversion dtype embd_pdrop eos_token_id id2label initializer_range
    is_llama_config label2id language max_window_layers model_type name num_labels
    original_max_position_embeddings output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type quantization quantization_config resid_pdrop return_dict
    sep_token_id sliding_window task_specific_params tokenizer_class torch_dtype
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_cache
    """
_INERT = frozenset(_INERT_KEYS.split())


@dataclass(frozen=True)
class DenseConfig:
    """A dense pre-norm transformer: one attention and one gated MLP a layer."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def read_dense_config(
    config: Mapping[str, Any], *, explicit_head_dim: bool, own_keys: Collection[str] = ()
) -> DenseConfig:
    """Read the shared keys; absent optional ones take the defaults of HF's llama and qwen3.

    With `explicit_head_dim` the key head_dim is required, else it defaults to H / heads.
    `own_keys` are those the family reads itself. CheckpointError names a missing or malformed key
    and every setting that is not supported.
    """
    refuse_unsupported(config, own_keys)
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    if explicit_head_dim or config.get("head_dim") is not None:
        head_dim = positive_int(config, "head_dim")
    else:
        head_dim = _divided(hidden, heads, "hidden_size", "num_attention_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = positive_int(config, "num_key_value_heads")
    _divided(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    if head_dim % 2:
        raise CheckpointError(
            f"The config's head_dim {head_dim} is odd and cannot be rotated; correct config.json."
        )
    return DenseConfig(
        hidden_size=hidden,
        num_hidden_layers=positive_int(config, "num_hidden_layers"),
        intermediate_size=positive_int(config, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive_int(config, "vocab_size"),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        rms_norm_eps=positive_float(config, "rms_norm_eps"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
    )


def refuse_unsupported(config: Mapping[str, Any], own_keys: Collection[str] = ()) -> None:
    """Refuse settings that would change the arithmetic; warn of keys nobody knows.

    `own_keys`, which the family reads itself, are not judged.
    """
    config = {key: value for key, value in config.items() if key not in own_keys}
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            refuse(key, config[key])
    if other := sorted(set(layer_kinds(config) or ()) - {"full_attention"}):
        refuse("layer_types", ", ".join(other))
    known = _ROPE_KEYS | _NEUTRAL.keys() | {"layer_types"}
    warn_unread(config, known | DenseConfig.__dataclass_fields__.keys())


def warn_unread(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Warn of keys that are neither `known` nor about training, generation or files."""
    known = {*known, *_INERT}
    unread = [k for k in config if k not in known and config[k] not in (None, False, "", [], {})]
    if unread:
        _log.warning("Keys of config.json that are not known and not used: %s", ", ".join(unread))


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """A required key whose value is a whole number above zero, in 32 bits as MLX counts."""
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        malformed(key, value, "a whole number above zero")
    if value >= 2**31:
        malformed(key, value, "below 2**31")
    if key == "num_hidden_layers" and value > _MOST_LAYERS:
        malformed(key, value, f"at most {_MOST_LAYERS}")
    return value


def positive_float(config: Mapping[str, Any], key: str) -> float:
    """A required key whose value is a number above zero."""
    value = _required(config, key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        malformed(key, value, "a number above zero")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """An optional key that is true or false; absent or null means false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        malformed(key, value, "true or false")
    return bool(value)


def layer_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """layer_types, a list of names; None where it is absent, null or empty."""
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    ):
        malformed("layer_types", kinds, "a list of names")
    return kinds or None


def layer_numbers(config: Mapping[str, Any], key: str) -> frozenset[int]:
    """An optional key that lists layers by number; none where it is absent or null."""
    numbers = config.get(key)
    if numbers is None:
        return frozenset()
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        malformed(key, numbers, "a list of whole numbers")
    return frozenset(numbers)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An optional key whose value is an object; empty where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        malformed(key, value, "an object")
    return value or {}


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(
            f"The config has no {key}; use a checkpoint with a complete config.json."
        )
    return config[key]


def _divided(total: int, part: int, total_key: str, part_key: str) -> int:
    if total % part:
        raise CheckpointError(
            f"The config's {total_key} {total} is no multiple of its {part_key} {part}; "
            "correct config.json."
        )
    return total // part


def refuse(key: str, value: Any) -> NoReturn:
    """Raise the CheckpointError of a setting that is not supported."""
    raise CheckpointError(
        f"The config's {key} = {value!r:.80} is not supported; use a checkpoint without it."
    )
