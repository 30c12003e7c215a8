"""A config in words that mlx-lm reads as this program does.

It knows fewer spellings than Hugging Face writes, and takes other defaults for absent keys.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.rope import (
    original_length,
    rope_scaling,
    rope_theta,
    rope_type,
    yarn_magnitude,
)
from dflash_mlx.models.hybrid_config import DEFAULT_INTERVAL, DEFAULT_ROTARY, FULL
from dflash_mlx.models.qwen3_moe import expert_count

#: Llama 3.1 and 3.2 differ in the first; GGUF files hold the divisors these numbers make
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What this program takes for keys that these families' configs leave out.
_DENSE_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False}
_MIXTURE_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_GEMMA4_DEFAULTS = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}


def for_mlx_lm(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config that both programs read alike, as far as mlx-lm has words for it.

    Rotary settings are written flat and as `rope_parameters`. CheckpointError for a model_type that
    mlx-lm does not have.
    """
    read = with_llama3_scaling(copy.deepcopy(dict(config)))
    read["model_type"] = name = mlx_lm_type(config)
    nested = read.get("text_config")
    # Families of text alone read their keys at the top, whatever lies below it.
    text = nested if isinstance(nested, dict) and "num_hidden_layers" in nested else read
    if name.startswith("gemma4"):
        _state(text, _GEMMA4_DEFAULTS)
        text.update(_global_heads(text))
        if text is not read:
            read["vocab_size"] = text["vocab_size"]  # mlx-lm takes it from here alone
        return read
    _state(text, {"tie_word_embeddings": read.get("tie_word_embeddings")})
    _state(text, {**_DENSE_DEFAULTS, "num_key_value_heads": text["num_attention_heads"]})
    _state(text, {"head_dim": text["hidden_size"] // text["num_attention_heads"]})
    if name == "qwen3_moe":
        _state(text, {"num_experts": expert_count(text), "norm_topk_prob": False})
        _state(text, _MIXTURE_DEFAULTS)
    hybrid = name.startswith(("qwen3_5", "qwen3_next"))
    if hybrid:
        text["full_attention_interval"] = _interval(text)
        if text.get("num_experts"):
            _state(text, {"norm_topk_prob": True, **_MIXTURE_DEFAULTS})
            _state(text, {"intermediate_size": text["moe_intermediate_size"]})
    text.update(_both_spellings(text, hybrid))
    return read


def _state(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the keys that are absent or null."""
    for key, value in values.items():
        if config.get(key) is None:
            config[key] = copy.copy(value)


def _interval(text: Mapping[str, Any]) -> int:
    """Every how many layers one is of full attention; mlx-lm knows no other patterns."""
    kinds = text.get("layer_types")
    if kinds and FULL in kinds:
        return int(kinds.index(FULL)) + 1
    return int(text.get("full_attention_interval") or DEFAULT_INTERVAL)


def _both_spellings(text: Mapping[str, Any], hybrid: bool) -> dict[str, Any]:
    """The rotary settings in flat keys, and in the one object of newer configs."""
    scaling = rope_scaling(text)
    kind, theta = rope_type(scaling), rope_theta(text, scaling)
    share = scaling.pop("partial_rotary_factor", None) or text.get("partial_rotary_factor")
    own = {k: v for k, v in scaling.items() if k not in ("rope_theta", "type")}
    own["rope_type"] = kind
    if kind in ("llama3", "yarn"):
        # A whole number where it is one, as configs have it.
        original = original_length(scaling, text)
        own["original_max_position_embeddings"] = int(original)
    if kind == "yarn":
        own |= _magnitude_in_mscale(own)
    stated: dict[str, Any] = {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else dict(own),
        "rope_parameters": {**own, "rope_theta": theta},
    }
    if hybrid:
        stated["partial_rotary_factor"] = share or DEFAULT_ROTARY
        stated["rope_parameters"]["partial_rotary_factor"] = share or DEFAULT_ROTARY
    return stated


def _magnitude_in_mscale(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's factor of cosine and sine as mlx-lm computes it, where it would come to another."""
    alone = bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim"))
    factor = float(scaling["factor"])
    if factor <= 1 or not (alone or scaling.get("attention_factor") is not None):
        return {}
    magnitude = yarn_magnitude(scaling, factor)
    mscale = (magnitude - 1.0) / (0.1 * math.log(factor))
    return {"attention_factor": magnitude, "mscale": mscale, "mscale_all_dim": 0.0}


def _global_heads(text: Mapping[str, Any]) -> dict[str, Any]:
    """Head sizes of full-attention layers in two keys, where they are stated layer by layer."""
    exceptions = text.get("per_layer_config") or {}
    sizes = [exceptions.get(str(i), {}) for i, k in enumerate(text["layer_types"]) if k == FULL]
    if not exceptions or any(own != sizes[0] for own in sizes):
        return {}
    stated = {"global_head_dim": sizes[0].get("head_dim", text["head_dim"])}
    if text["attention_k_eq_v"]:
        heads = sizes[0].get("num_key_value_heads", text["num_key_value_heads"])
        stated["num_global_key_value_heads"] = heads
    return stated


def with_llama3_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """The config with Llama 3's rope scaling by name where a GGUF's divisors are exactly that.

    mlx-lm knows the name and not the divisors. Other divisors stay as they are.
    """
    if config.get("rope_freq_factors") is None:
        return config
    theta, dim = float(config["rope_theta"]), int(config["head_dim"])
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    )
    keep = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        divisors = 1 / (keep + (1 - keep) / factor)
        if np.allclose(divisors, config["rope_freq_factors"], rtol=1e-5):
            rest = {k: v for k, v in config.items() if k != "rope_freq_factors"}
            return {**rest, "rope_scaling": {**_LLAMA3, "factor": factor}}
    return config


def mlx_lm_type(config: Mapping[str, Any]) -> str:
    """The config's model_type as mlx-lm calls it, which has fewer names for text models alone."""
    name = str(config["model_type"])
    whole = name.removesuffix("_text")
    alone = [f"{module_of(whole)}_text"] if whole != name else []
    for known in (name, *alone, whole):
        if importlib.util.find_spec(f"mlx_lm.models.{module_of(known)}"):
            return known
    raise CheckpointError(
        f"mlx-lm has no model_type {name!r}, and the converter asks it what to quantize; convert a "
        "model of a family that mlx-lm has."
    )


def module_of(name: str) -> str:
    """mlx-lm's module of a model_type."""
    from mlx_lm.utils import MODEL_REMAPPING

    return MODEL_REMAPPING.get(name, name)
