"""Tiny random Gemma 4 models: configs and weights from numpy seeds. Imports no MLX."""

from __future__ import annotations

from typing import Any

import numpy as np

# Values of model_type, whose tests are test_gemma4*.py.
FAMILIES = frozenset({"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"})
SLIDING, FULL = "sliding_attention", "full_attention"

_BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    # Large, or a wrong eps would hide below the tolerance.
    "rms_norm_eps": 0.02,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
    },
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "final_logit_softcapping": 6.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
}
_SHARED_TYPES = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4_untied": {
        "tie_word_embeddings": False,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "attention_bias": True,
        "final_logit_softcapping": None,
    },
    "gemma4_shared": {
        "num_hidden_layers": 6,
        "layer_types": _SHARED_TYPES,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "hidden_size_per_layer_input": None,
        "enable_moe_block": None,
        "sliding_window": 5,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    },
    "gemma4_moe": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


def gemma_config(variant: str = "gemma4", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny text model whose prompts are longer than its window."""
    merged = {**_BASE, **VARIANTS[variant], **overrides}
    return {key: value for key, value in merged.items() if value is not None}


def gemma_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by HF key, scaled so that every part matters to the logits.

    The final norm has weights of both signs, or a tied head would only repeat the last token.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    hidden, count = config["hidden_size"], config["num_hidden_layers"]

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        weights[name] = rng.standard_normal(shape) * gain / np.sqrt(shape[-1])

    def norm(name: str, size: int, mean: float = 1.0, key: str = "weight") -> None:
        weights[f"{name}.{key}"] = mean + 0.3 * rng.standard_normal(size)

    weights["model.embed_tokens.weight"] = 0.2 * rng.standard_normal((config["vocab_size"], hidden))
    for index, kind in enumerate(config["layer_types"]):
        layer, shared = f"model.layers.{index}", index >= count - config["num_kv_shared_layers"]
        _attention(config, f"{layer}.self_attn", kind, matrix, norm, rng, weights, shared=shared)
        double = 2 if shared and config["use_double_wide_mlp"] else 1
        inner = config["intermediate_size"] * double
        matrix(f"{layer}.mlp.gate_proj.weight", inner, hidden, gain=1.5)
        matrix(f"{layer}.mlp.up_proj.weight", inner, hidden, gain=1.5)
        matrix(f"{layer}.mlp.down_proj.weight", hidden, inner, gain=1.5)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm(f"{layer}.{name}_layernorm", hidden)
        weights[f"{layer}.layer_scalar"] = np.array([0.8 + 0.1 * index])
        if config.get("enable_moe_block"):
            _experts(config, layer, matrix, norm)
    weights["model.norm.weight"] = 2.0 * rng.standard_normal(hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def _attention(
    config: dict[str, Any],
    name: str,
    kind: str,
    matrix: Any,
    norm: Any,
    rng: np.random.Generator,
    weights: dict[str, np.ndarray],
    *,
    shared: bool,
) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    same = kind == FULL and config["attention_k_eq_v"]
    dim = config["global_head_dim"] if kind == FULL else config["head_dim"]
    kv_heads = config["num_global_key_value_heads"] if same else config["num_key_value_heads"]
    shapes = {"q_proj": (heads * dim, hidden), "o_proj": (hidden, heads * dim)}
    if not shared:
        shapes["k_proj"] = (kv_heads * dim, hidden)
        if not same:
            shapes["v_proj"] = (kv_heads * dim, hidden)
    for part, shape in shapes.items():
        matrix(f"{name}.{part}.weight", *shape, gain=1.5)
        if config["attention_bias"]:
            weights[f"{name}.{part}.bias"] = 0.3 * rng.standard_normal(shape[0])
    # Scores are unscaled dot products of normed heads: smaller weights keep attention spread out.
    norm(f"{name}.q_norm", dim, 0.7)
    if not shared:
        norm(f"{name}.k_norm", dim, 0.7)


def _experts(config: dict[str, Any], layer: str, matrix: Any, norm: Any) -> None:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["num_experts"]
    norm(f"{layer}.router", hidden, key="scale")
    norm(f"{layer}.router", experts, key="per_expert_scale")
    matrix(f"{layer}.router.proj.weight", experts, hidden, gain=8.0)
    matrix(f"{layer}.experts.gate_up_proj", experts, 2 * inner, hidden, gain=1.5)
    matrix(f"{layer}.experts.down_proj", experts, hidden, inner, gain=1.5)
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        norm(f"{layer}.{name}", hidden)
    norm(f"{layer}.pre_feedforward_layernorm_2", hidden)
