"""Tiny random hybrids of gated delta-rule and attention layers: configs, weights, packagings.

Imports no MLX, so that the script that makes goldens can use it with torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    # Layers 0 and 2 are linear, 1 and 3 full attention.
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "rope_parameters": _ROPE,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "rope_parameters": _ROPE,
        "intermediate_size": None,
        **_EXPERTS,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        **_EXPERTS,
    },
}
MODEL_TYPES = {str(variant["model_type"]) for variant in VARIANTS.values()}
# With the names of multimodal checkpoints; all of these are tested in test_hybrid.py.
FAMILIES = {*MODEL_TYPES, "qwen3_5", "qwen3_5_moe"}


def hybrid_config(variant: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny text model; keys that are None are left out."""
    config = {**_COMMON, **VARIANTS[variant], **overrides}
    return {key: value for key, value in config.items() if value is not None}


def is_linear(config: dict[str, Any], index: int) -> bool:
    if kinds := config.get("layer_types"):
        return kinds[index] == "linear_attention"
    return (index + 1) % config["full_attention_interval"] != 0


class _Random:
    """Fills a dict with float32 tensors by Hugging Face's names."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}

    def tensor(self, name: str, *shape: int, gain: float, shift: float = 0.0) -> None:
        values = shift + gain * self.rng.standard_normal(shape)
        self.weights[name] = values.astype(np.float32)

    def matrix(self, name: str, out: int, into: int, gain: float) -> None:
        self.tensor(f"{name}.weight", out, into, gain=gain / np.sqrt(into))

    def mlp(self, name: str, hidden: int, inner: int) -> None:
        self.matrix(f"{name}.gate_proj", inner, hidden, 1.5)
        self.matrix(f"{name}.up_proj", inner, hidden, 1.5)
        self.matrix(f"{name}.down_proj", hidden, inner, 1.5)


def hybrid_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by HF key, scaled so that every part matters to the logits.

    Norms but the delta layers' own are stored as their difference from one, as HF does.
    """
    made, hidden, vocab = _Random(seed), config["hidden_size"], config["vocab_size"]
    made.tensor("model.embed_tokens.weight", vocab, hidden, gain=0.4)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        made.tensor(f"{layer}.input_layernorm.weight", hidden, gain=0.3)
        if is_linear(config, index):
            _delta_layer(made, f"{layer}.linear_attn", config)
        else:
            _attention(made, f"{layer}.self_attn", config)
        made.tensor(f"{layer}.post_attention_layernorm.weight", hidden, gain=0.3)
        if config.get("num_experts") and index not in config.get("mlp_only_layers", ()):
            _experts(made, f"{layer}.mlp", config)
        else:
            made.mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
    made.tensor("model.norm.weight", hidden, gain=0.3)
    if not config["tie_word_embeddings"]:
        made.matrix("lm_head", vocab, hidden, 2.0)
    return made.weights


def _delta_layer(made: _Random, name: str, config: dict[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        made.matrix(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden, 2.0)
        made.matrix(f"{name}.in_proj_ba", 2 * heads, hidden, 1.0)
    else:
        made.matrix(f"{name}.in_proj_qkv", 2 * keys + values, hidden, 2.0)
        made.matrix(f"{name}.in_proj_z", values, hidden, 2.0)
        made.matrix(f"{name}.in_proj_b", heads, hidden, 1.0)
        made.matrix(f"{name}.in_proj_a", heads, hidden, 1.0)
    taps = config["linear_conv_kernel_dim"]
    made.tensor(f"{name}.conv1d.weight", 2 * keys + values, 1, taps, gain=0.6)
    made.tensor(f"{name}.dt_bias", heads, gain=0.7, shift=-0.7)
    made.tensor(f"{name}.A_log", heads, gain=0.5, shift=-1.0)
    made.tensor(f"{name}.norm.weight", config["linear_value_head_dim"], gain=0.3, shift=1.0)
    made.matrix(f"{name}.out_proj", hidden, values, 1.8)


def _attention(made: _Random, name: str, config: dict[str, Any]) -> None:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    made.matrix(f"{name}.q_proj", 2 * heads * dim, hidden, 2.0)
    made.matrix(f"{name}.k_proj", kv_heads * dim, hidden, 1.5)
    made.matrix(f"{name}.v_proj", kv_heads * dim, hidden, 1.5)
    made.matrix(f"{name}.o_proj", hidden, heads * dim, 1.8)
    made.tensor(f"{name}.q_norm.weight", dim, gain=0.3, shift=0.5)
    made.tensor(f"{name}.k_norm.weight", dim, gain=0.3, shift=0.5)


def _experts(made: _Random, name: str, config: dict[str, Any]) -> None:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config["num_experts"]
    made.matrix(f"{name}.gate", count, hidden, 2.0)
    gain = 1.5 / np.sqrt(hidden)
    made.tensor(f"{name}.experts.gate_up_proj", count, 2 * inner, hidden, gain=gain)
    made.tensor(f"{name}.experts.down_proj", count, hidden, inner, gain=1.5 / np.sqrt(inner))
    made.mlp(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"])
    made.matrix(f"{name}.shared_expert_gate", 1, hidden, 2.0)


def multimodal(
    config: dict[str, Any], weights: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The same text model as released: inside a multimodal checkpoint, beside other parts."""
    outer = {
        "model_type": config["model_type"].removesuffix("_text"),
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"depth": 1},
        "image_token_id": 90,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    named = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: w
        for name, w in weights.items()
    }
    for other in ("model.visual.blocks.0.norm1.weight", "mtp.norm.weight", "mtp.fc.weight"):
        named[other] = np.ones((3,), np.float32)
    return outer, named


def one_tensor_an_expert(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights with experts apart, as qwen3_next is released."""
    apart = dict(weights)
    for name in [n for n in weights if n.endswith((".gate_up_proj", ".experts.down_proj"))]:
        prefix, of = name.rsplit(".", 1)
        for expert, array in enumerate(apart.pop(name)):
            parts = {of: array}
            if of == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(array, 2), strict=True))
            for projection, part in parts.items():
                apart[f"{prefix}.{expert}.{projection}.weight"] = part
    return apart
