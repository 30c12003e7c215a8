"""The config of a drafter to be trained for a target: its shape, taps and mask token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import UsageError
from dflash_mlx.layers.rope import original_length, rope_scaling, rope_theta, rope_type
from dflash_mlx.models import gemma4_config
from dflash_mlx.models.base import Target
from dflash_mlx.tokenizer import Tokenizer
from dflash_mlx.train.start import target_layers
from dflash_mlx.train.wording import counted

#: rope kinds a drafter can have; positions of other kinds are rotated by theta alone
_ROPES = ("linear", "llama3", "yarn")
_DEFAULT_LAYERS, _DEFAULT_TAPS = 5, 5
#: of config.json, what says which layers have a window
WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
#: of DFlash 2: rows a convolution reads, and candidates of each position
_CONV_TAPS, _SELECTOR_TOP_K = 4, 8


@dataclass(frozen=True)
class Shape:
    """What a person may choose of a new drafter; None is decided from the target.

    taps: target layers whose outputs are read, or how many. windows: positions a layer sees, one
    number or entry for all layers, or one entry a layer, None where it sees everything; the format
    has one number for all layers with a window. selector_rank: makes it a DFlash 2 drafter.
    """

    layers: int | None = None
    taps: int | tuple[int, ...] | None = None
    windows: int | tuple[int | None, ...] | None = None
    causal: bool | None = None
    selector_rank: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        windows = self.windows if isinstance(self.windows, tuple) else (self.windows,)
        for name, values in {
            "layers": [self.layers],
            "windows": windows,
            "selector_rank": [self.selector_rank],
        }.items():
            for value in values:
                if value is not None and not 1 <= value < 2**31:
                    raise UsageError(f"{name} is {value}; give at least 1 and less than 2^31.")


def layer_windows(shape: Shape, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; UsageError for as many as do not fit, or two different ones."""
    windows = shape.windows
    each = windows if isinstance(windows, tuple) else (windows,)
    if len(each) == 1:
        each *= layers
    if len(each) != layers:
        raise UsageError(
            f"{len(each)} windows for {counted(layers, 'layer')}; give one number, or one for "
            "each layer."
        )
    if len(set(each) - {None}) > 1:
        raise UsageError(
            "The drafter's format has one window for all layers that have one; give one number, "
            "and 'all' for layers that see everything."
        )
    return each


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, evenly from the second to the third-last; over all where these are few."""
    first, last = 1, num_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_layers - 1
    if count == 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def chosen_taps(target: Target, taps: int | Sequence[int] | None) -> tuple[int, ...]:
    """Taps of a new drafter; UsageError for layers the target does not have."""
    if taps is None or isinstance(taps, int):
        count = min(_DEFAULT_TAPS, target.num_layers) if taps is None else taps
        if not 1 <= count <= target.num_layers:
            raise UsageError(
                f"{count} taps of a target with {target.num_layers} layers; give from 1 to that."
            )
        return spread_taps(target.num_layers, count)
    wrong = [tap for tap in taps if not 0 <= tap < target.num_layers]
    if wrong or not taps or len(set(taps)) != len(taps):
        raise UsageError(
            f"The taps {', '.join(map(str, taps)) or '(none)'} do not fit a target with layers 0 "
            f"to {target.num_layers - 1}; give distinct ones among these."
        )
    return tuple(taps)


def drafter_config(
    target: Target,
    target_config: Mapping[str, Any],
    shape: Shape,
    block_size: int,
    mask_token_id: int,
) -> dict[str, Any]:
    """config.json of a new drafter, in the official format."""
    text = target_config.get("text_config") or target_config
    attention = _last_attention(target)
    heads, kv_heads, dim = _heads(attention, text, target.hidden_size)
    layers = min(_DEFAULT_LAYERS, target.num_layers) if shape.layers is None else shape.layers
    taps = chosen_taps(target, shape.taps)
    windows = layer_windows(shape, layers)
    dflash: dict[str, Any] = {
        "target_layer_ids": list(taps),
        "mask_token_id": mask_token_id,
        "block_size": block_size,
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": _intermediate(target),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": target.context_length,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "attention_bias": False,
        "hidden_act": "silu",
        **_window_keys(windows),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **_rope(text),
        "dflash_config": dflash,
    }
    if shape.causal is not None or any(windows):
        config["is_causal"] = bool(shape.causal)
    if parts := second_parts(shape, target.hidden_size):
        config["architectures"] = ["DFlash2DraftModel"]
        dflash |= parts
    return config


def with_windows(stored: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """An official config.json with the shape's windows in place of its own.

    UsageError where layers with and without one see their block in different orders, and others
    are to have one: the format could not say so.
    """
    config = parse_config(dict(stored))
    each = layer_windows(shape, config.num_hidden_layers)
    others = [(a is None) != (b is None) for a, b in zip(each, config.windows, strict=True)]
    mixed = len(set(config.causal)) > 1
    if mixed and any(others):
        raise UsageError(
            "This drafter's layers with a window see their block in another order than the rest; "
            "other layers cannot have one. Give one number, and 'all' where it has 'all'."
        )
    kept = {key: value for key, value in stored.items() if key not in WINDOW_KEYS}
    made = {**kept, **_window_keys(each)}
    return made if mixed else {**made, "is_causal": config.causal[0]}


def with_length(stored: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """A config.json that says that the drafter knows texts of `longest` tokens.

    Its frequencies stay: a scaling that falls back to max_position_embeddings gets the old one.
    """
    before = parse_config(dict(stored)).max_position_embeddings
    if longest <= before:
        return dict(stored)
    made = {**stored, "max_position_embeddings": longest}
    scaling = rope_scaling(stored)
    if rope_type(scaling) in ("llama3", "yarn"):
        known = int(original_length(scaling, stored))
        for key in ("rope_parameters", "rope_scaling"):
            if stored.get(key):
                made[key] = {**stored[key], "original_max_position_embeddings": known}
    return made


def _window_keys(each: Sequence[int | None]) -> dict[str, Any]:
    kinds = [f"{'full' if one is None else 'sliding'}_attention" for one in each]
    window = next((one for one in each if one is not None), None)
    if window is None:
        return {"layer_types": kinds}
    return {
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }


def second_parts(shape: Shape, hidden_size: int) -> dict[str, int] | None:
    """DFlash 2's keys of config.json; None for a v1 drafter."""
    if shape.selector_rank is None:
        return None
    return {
        "conv_kernel_size": _CONV_TAPS,
        "conv_group_size": _conv_group(hidden_size),
        "selector_rank": shape.selector_rank,
        "selector_top_k": _SELECTOR_TOP_K,
    }


def mask_token(tokenizer: Tokenizer, target: Target, given: int | None) -> tuple[int, str]:
    """(mask token id, why this one); it must be a row of the target's embedding.

    The one given, the tokenizer's own mask, the first row no token uses, or a control token that
    text of a conversation never holds.
    """
    if given is not None:
        if not 0 <= given < target.vocab_size:
            raise UsageError(
                f"The mask token {given} is no id of the target; give one from 0 to "
                f"{target.vocab_size - 1}."
            )
        return given, "given"
    own = tokenizer.mask_id
    if own is not None and own < target.vocab_size:
        return own, "the tokenizer's mask token"
    if tokenizer.size < target.vocab_size:
        return tokenizer.size, "an embedding row that no token uses"
    spare = tokenizer.spare_control_id()
    if spare is None:
        raise UsageError(
            "No token of this tokenizer is free to stand for a mask; name one by --mask-token."
        )
    return spare, "a control token that conversations do not use"


def _last_attention(target: Target) -> nn.Module | None:
    for layer in reversed(target_layers(target)):
        attention = getattr(layer, "self_attn", None)
        if attention is not None and hasattr(attention, "o_proj"):
            return attention
    return None


def _heads(attention: Any, text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, K/V heads and their size, as the target's last attention layer has them."""
    if attention is not None and hasattr(attention, "heads"):
        heads, kv_heads = int(attention.heads), int(attention.kv_heads)
        # Gemma's attention has norms and no scale, Llama's a scale and no norms.
        norm = getattr(attention, "q_norm", None)
        return heads, kv_heads, norm.weight.size if norm else round(attention.scale**-2)
    heads = int(text["num_attention_heads"])
    dim = int(text.get("head_dim") or hidden // heads)
    return heads, int(text.get("num_key_value_heads") or heads), dim


def _intermediate(target: Target) -> int:
    """The target's own width of dense layers; three hidden sizes where it has experts."""
    mlp = getattr(target_layers(target)[-1], "mlp", None)
    gate = getattr(mlp, "gate_proj", None)
    if gate is not None and "weight" in gate and gate["weight"].ndim == 2:
        return int(gate["weight"].shape[0])
    return 3 * target.hidden_size


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    if str(text.get("model_type")).startswith("gemma4"):  # states one for each kind of layer
        scaling = dict(gemma4_config.rope_parameters(text, gemma4_config.FULL))
    else:
        scaling = rope_scaling(text)
    theta = float(rope_theta(text, scaling))
    kind = rope_type(scaling)
    if kind not in _ROPES:
        return {"rope_theta": theta}
    kept = {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}
    return {"rope_theta": theta, "rope_scaling": {**kept, "rope_type": kind}}


def _conv_group(hidden: int) -> int:
    """The largest power of two up to 64 that divides the hidden size."""
    return max(size for size in (1, 2, 4, 8, 16, 32, 64) if hidden % size == 0)
