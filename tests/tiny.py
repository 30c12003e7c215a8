"""Tiny random models of every family, the same on every machine: weights come from numpy seeds.

Imports MLX only inside functions, so that the script that makes goldens can use it with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tiny_gemma
import tiny_hybrid
from tiny_experts import EXPERT_FAMILIES, expert_weights, is_sparse

if TYPE_CHECKING:
    from dflash_mlx.models.decoder import DecoderTarget

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    # Large, or a wrong eps would hide below the tolerance.
    "rms_norm_eps": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    **EXPERT_FAMILIES,
}
# Every tiny model there is; what is tested of all of them starts from here.
VARIANTS: tuple[str, ...] = (*_FAMILIES, *tiny_hybrid.VARIANTS, *tiny_gemma.VARIANTS)


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; qwen3's heads (4 x 16) are wider than its hidden size."""
    if family in tiny_hybrid.VARIANTS:
        return tiny_hybrid.hybrid_config(family, **overrides)
    if family in tiny_gemma.VARIANTS:
        return tiny_gemma.gemma_config(family, **overrides)
    return {**_COMMON, **_FAMILIES[family], **overrides}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by HF key, scaled so that every part matters to the logits.

    Layers outweigh the embedding, or a tied head would only repeat the last token.
    """
    if config["model_type"] in tiny_hybrid.MODEL_TYPES:
        return tiny_hybrid.hybrid_weights(config, seed)
    if config["model_type"].startswith("gemma4"):
        return tiny_gemma.gemma_weights(config, seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, out: int, into: int, gain: float, bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((out, into)) * gain / np.sqrt(into)
        if bias:
            weights[f"{name}.bias"] = 0.3 * rng.standard_normal(out)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1.0 + 0.3 * rng.standard_normal(size)

    weights["model.embed_tokens.weight"] = 0.4 * rng.standard_normal((config["vocab_size"], hidden))
    for index in range(config["num_hidden_layers"]):
        layer, bias = f"model.layers.{index}", config["attention_bias"]
        norm(f"{layer}.input_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", heads * dim, hidden, 2.0, bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * dim, hidden, 1.5, bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * dim, hidden, 1.5, bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * dim, 1.5, bias)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            norm(f"{layer}.self_attn.q_norm", dim)
            norm(f"{layer}.self_attn.k_norm", dim)
        if config["model_type"] == "gpt_oss":
            weights[f"{layer}.self_attn.sinks"] = 1.0 + rng.standard_normal(heads)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if is_sparse(config, index):
            weights |= expert_weights(config, f"{layer}.mlp", rng)
            continue
        mlp_bias = config.get("mlp_bias", False)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, 1.5, mlp_bias)
        matrix(f"{layer}.mlp.up_proj", inner, hidden, 1.5, mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, 1.5, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, 2.0)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def tiny_target(family: str, seed: int = 0, **overrides: Any) -> DecoderTarget:
    """A tiny float32 target with every parameter set from `tiny_weights` and evaluated."""
    return target_of(tiny_config(family, **overrides), seed)


def target_of(config: dict[str, Any], seed: int = 0) -> DecoderTarget:
    """The target of a config, with the weights of `tiny_weights`."""
    return target_with(config, tiny_weights(config, seed))


def target_with(config: dict[str, Any], weights: dict[str, np.ndarray]) -> DecoderTarget:
    """The target of a config with weights by HF key, evaluated."""
    import mlx.core as mx

    from dflash_mlx.models import build_target, family_of

    target, arrays = build_target(config), {k: mx.array(v) for k, v in weights.items()}
    family_of(config).remap_hf(arrays, config)
    target.load_weights(list(arrays.items()))
    mx.eval(target.parameters())
    return target


def tiny_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(1000 + seed).integers(0, vocab_size, length).tolist()
