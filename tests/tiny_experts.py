"""The parts of tiny random models with experts that dense models lack, by HF key."""

from __future__ import annotations

from typing import Any

import numpy as np

# Half the experts of a layer see a row or more of any prompt of some rows.
EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "intermediate_size": 32,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer's MLP is made of experts."""
    if config["model_type"] == "gpt_oss":
        return True
    if config["model_type"] != "qwen3_moe" or layer in config["mlp_only_layers"]:
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


def expert_weights(
    config: dict[str, Any], mlp: str, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Router and experts under the key `mlp`, scaled so that each choice and each clamp shows."""
    hidden = config["hidden_size"]

    def matrix(*shape: int, gain: float, into: int) -> np.ndarray:
        return rng.standard_normal(shape) * gain / np.sqrt(into)

    if config["model_type"] == "gpt_oss":
        count, inner = config["num_local_experts"], config["intermediate_size"]
        return {
            f"{mlp}.router.weight": matrix(count, hidden, gain=1.0, into=hidden),
            f"{mlp}.router.bias": 0.3 * rng.standard_normal(count),
            f"{mlp}.experts.gate_up_proj": matrix(count, hidden, 2 * inner, gain=4.0, into=hidden),
            f"{mlp}.experts.gate_up_proj_bias": 0.3 * rng.standard_normal((count, 2 * inner)),
            f"{mlp}.experts.down_proj": matrix(count, inner, hidden, gain=0.3, into=inner),
            f"{mlp}.experts.down_proj_bias": 0.3 * rng.standard_normal((count, hidden)),
        }
    count, inner = config["num_experts"], config["moe_intermediate_size"]
    weights = {f"{mlp}.gate.weight": matrix(count, hidden, gain=1.0, into=hidden)}
    for i in range(count):
        expert = f"{mlp}.experts.{i}"
        weights[f"{expert}.gate_proj.weight"] = matrix(inner, hidden, gain=2.5, into=hidden)
        weights[f"{expert}.up_proj.weight"] = matrix(inner, hidden, gain=2.5, into=hidden)
        weights[f"{expert}.down_proj.weight"] = matrix(hidden, inner, gain=2.5, into=inner)
    return weights


def mxfp4_experts(weights: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """gpt_oss weights with random MXFP4 experts in their place, as OpenAI's checkpoints hold them.

    `*_blocks` [E, out, groups, 16] of two 4-bit numbers a byte, `*_scales` [E, out, groups] of
    powers of two; scaled so that the dequantized tensors spread as the replaced ones do.
    """
    rng, packed = np.random.default_rng(seed), {}
    for name, array in weights.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            packed[name] = array
            continue
        count, into, out = array.shape
        shape = (count, out, into // 32)
        # Random 4-bit numbers have a standard deviation of about 3.
        exponent = round(float(np.log2(array.std() / 3.0)))
        packed[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        packed[f"{name}_scales"] = rng.integers(-1, 2, shape).astype(np.uint8) + np.uint8(
            127 + exponent
        )
    return packed
