"""Reads a drafter's config.json strictly: every key is used, known to be inert, or refused by name.

Knows DFlash v1 and DFlash 2 in the official packaging and those of packagings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.draft.keys import (
    Config,
    draft_value,
    either,
    flag,
    layer_ids,
    malformed,
    optional_int,
    positive_float,
    positive_int,
    positive_number,
    refuse,
    refuse_active,
    refuse_unknown,
    whole,
    words,
)
from dflash_mlx.draft.packagings import ARCHITECTURE, packaging_of
from dflash_mlx.draft.sight import parse_sight
from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.rope import Rope, rope_from_config

_ARCHITECTURE_2 = "DFlash2DraftModel"

# Keys of other packagings and architectures, each with the values under which it changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "transformer_layer_config": (None,),
    "aux_hidden_state_layer_ids": (None,),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "sliding_window_non_causal": (None, False),
    "sample_from_anchor": (None, False),
    "mask_embedding": (None, False),
    "logit_scale": (None, 1),
    "is_neox_style": (None, True),
    "hidden_act": (None, "silu", "swish"),
    "mlp_bias": (None, False),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization": (None,),
    "quantization_config": (None,),
}

# Sizes of DFlash 2's own parts.
_PARTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_NO_PARTS: dict[str, tuple[Any, ...]] = dict.fromkeys(_PARTS, (None, 0))

# Bookkeeping of transformers and of trainers; it says nothing about the forward pass.
_INERT = words(
    """
    _attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_decoder
    is_encoder_decoder label2id model_type output_attentions output_hidden_states pad_token_id
    problem_type return_dict tie_word_embeddings torch_dtype transformers_version use_cache
    """
)

_ROPE_PARAMETERS = words(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor
    high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
    """
)

_DRAFT_KEYS = words(
    """
    block_size mask_token_id target_layer_ids input_embedding_scale output_multiplier
    final_logit_softcapping use_swa swa_window_size
    """
) | set(_PARTS)

_TOP_KEYS = words(
    """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size vocab_size rms_norm_eps max_position_embeddings attention_bias
    num_target_layers layer_types sliding_window use_sliding_window max_window_layers is_causal
    rope_theta rope_scaling rope_parameters draft_vocab_size dflash_config
    """
)


@dataclass(frozen=True)
class DFlash2Parts:
    """Sizes of what DFlash 2 adds to the decoder: convolutions and the candidate selector."""

    conv_kernel_size: int  # taps: the row itself and the rows before it
    conv_group_size: int  # channels that share a dynamic coefficient
    selector_rank: int
    selector_top_k: int  # candidates a row


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter; `parts` is None for v1.

    `windows` and `causal` hold one entry a layer: how many positions a query sees, itself
    included (None: all), and whether it sees only earlier rows of its block.
    `vocab_size` is None where the packaging leaves it to the target; `draft_vocab_size` is set
    when the drafter knows only a part of that vocabulary.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int | None
    draft_vocab_size: int | None
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
    parts: DFlash2Parts | None = None

    @property
    def feature_size(self) -> int:
        """Width of one position's features: a hidden state of the target for every tap."""
        return len(self.target_layer_ids) * self.hidden_size


def parse_config(config: Mapping[str, Any]) -> DFlashConfig:
    """Check and type a drafter's config.json.

    CheckpointError names a missing or malformed key, another packaging or architecture, and every
    key whose meaning is not known.
    """
    packaging = packaging_of(config)
    config = packaging.official(config)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        malformed("dflash_config", nested, "an object")
    second = _is_second(config, nested)
    _refuse_other_keys(config, nested, second)
    layers = positive_int(config, "num_hidden_layers")
    heads, kv_heads = (
        positive_int(config, key) for key in ("num_attention_heads", "num_key_value_heads")
    )
    if heads % kv_heads:
        malformed("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    head_dim = positive_int(config, "head_dim")
    if head_dim % 2:
        malformed("head_dim", head_dim, "an even number, which rotary positions need")
    if heads * head_dim >= 2**31:
        malformed("num_attention_heads", heads, f"below 2**31 / head_dim {head_dim}")
    stated = packaging.states_vocabulary
    vocabulary = (positive_int if stated else optional_int)(config, "vocab_size")
    sight = parse_sight(config, nested, layers)
    taps = draft_value(config, nested, "target_layer_ids")
    return DFlashConfig(
        hidden_size=positive_int(config, "hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive_int(config, "intermediate_size"),
        vocab_size=vocabulary,
        draft_vocab_size=_draft_vocab_size(config, vocabulary, second),
        rms_norm_eps=positive_float(config, "rms_norm_eps"),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        attention_bias=bool(flag(config, "attention_bias")),
        num_target_layers=optional_int(config, "num_target_layers"),
        block_size=whole("block_size", draft_value(config, nested, "block_size"), 2),
        mask_token_id=whole("mask_token_id", draft_value(config, nested, "mask_token_id"), 0),
        target_layer_ids=layer_ids("target_layer_ids", taps, 0),
        windows=sight.windows,
        causal=sight.causal,
        rope=rope_from_config(config, head_dim),
        input_embedding_scale=_scale(config, nested, "input_embedding_scale"),
        output_multiplier=_scale(config, nested, "output_multiplier"),
        final_logit_softcapping=_soft_cap(config, nested),
        parts=_parts(config, nested) if second else None,
    )


def _is_second(config: Config, nested: Config) -> bool:
    """Whether it is DFlash 2; CheckpointError for what is no DFlash drafter at all."""
    stated = config.get("architectures") or []
    if not isinstance(stated, list):
        malformed("architectures", stated, "a list of names")
    names = [str(name) for name in stated]
    own_keys = ("target_layer_ids", "mask_token_id", "block_size")
    known = [name for name in (ARCHITECTURE, _ARCHITECTURE_2) if name in names]
    if not (known or nested or any(key in config for key in own_keys)):
        label = ", ".join(names) or config.get("model_type") or "without an architecture"
        raise CheckpointError(
            f"The checkpoint given as drafter is a target model ({label}); give it as the model "
            "and pass a DFlash drafter."
        )
    if names and not known:
        raise CheckpointError(
            f"The drafter's architecture {', '.join(names)} is not supported; use a drafter whose "
            f"architecture is {ARCHITECTURE} or {_ARCHITECTURE_2}."
        )
    return _ARCHITECTURE_2 in names


def _refuse_other_keys(config: Config, nested: Config, second: bool) -> None:
    neutral = _NEUTRAL if second else _NEUTRAL | _NO_PARTS
    for source in (config, nested):
        refuse_active(source, neutral)
    refuse_unknown(config, _TOP_KEYS | _DRAFT_KEYS | _INERT | _NEUTRAL.keys(), "config.json")
    refuse_unknown(nested, _DRAFT_KEYS | {"causal"} | _NEUTRAL.keys(), "dflash_config")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), Mapping):
            refuse_unknown(config[key], _ROPE_PARAMETERS | _NEUTRAL.keys(), key)


def _draft_vocab_size(config: Config, vocabulary: int | None, second: bool) -> int | None:
    size = optional_int(config, "draft_vocab_size")
    if size in (None, vocabulary):
        return None
    # DFlash 2's codebooks have a row for every token of the target.
    if second or vocabulary is None or size > vocabulary:
        refuse("draft_vocab_size", size)
    return size


def _parts(config: Config, nested: Config) -> DFlash2Parts:
    sizes = {key: whole(key, draft_value(config, nested, key), 1) for key in _PARTS}
    hidden, group = positive_int(config, "hidden_size"), sizes["conv_group_size"]
    if hidden % group:
        malformed("conv_group_size", group, f"a divisor of hidden_size {hidden}")
    return DFlash2Parts(**sizes)


def _scale(config: Config, nested: Config, key: str) -> float:
    value = either(config, nested, key)
    return 1.0 if value is None else positive_number(key, value)


def _soft_cap(config: Config, nested: Config) -> float | None:
    key = "final_logit_softcapping"
    value = either(config, nested, key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        malformed(key, value, "a number")
    return float(value) if value > 0 else None
