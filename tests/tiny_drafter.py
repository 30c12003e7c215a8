"""Tiny random drafters, the same with torch and MLX: configs, weights and inputs from numpy seeds.

Imports MLX only inside functions, so that the script that makes goldens can use it with torch.
"""

from __future__ import annotations

import json
import zlib
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx

VOCAB = 48
BLOCK = 5
# Context rows that arrive before each proposal: a prompt, then a + 1 rows a cycle; 1 is a cycle
# that accepted nothing, also right after a window of 6 has wrapped.
CONTEXT_STEPS = (13, 1, 3, 1, 1, 5, 2, 4, 1)

_BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    # Large, or a wrong eps would hide below the tolerance.
    "rms_norm_eps": 0.02,
    "max_position_embeddings": 256,
    "num_target_layers": 7,
    "rope_theta": 1000.0,
    "attention_bias": False,
    "dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": 5, "block_size": BLOCK},
}

_SLIDING = {
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 6,
    "use_sliding_window": True,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "bias": {"attention_bias": True},
    "causal": {"is_causal": True},
    "sliding": _SLIDING,
    "sliding_bidirectional": {**_SLIDING, "is_causal": False},
    "mixed": {
        **_SLIDING,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "yarn": {"rope_theta": None, "rope_parameters": {**_YARN, "rope_theta": 1000.0}},
    "llama3": {"rope_scaling": _LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "scaled": {
        "dflash_config": {
            **_BASE["dflash_config"],
            "input_embedding_scale": 2.5,
            "output_multiplier": 0.6,
            "final_logit_softcapping": 4.0,
        }
    },
}

_PARTS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 6}
DFLASH2_VARIANTS: dict[str, dict[str, Any]] = {
    # As released: every layer slides, and sees the whole block.
    "second": {**_SLIDING, "is_causal": False},
    "second_three_taps": {
        "dflash_config": {
            **_PARTS,
            "conv_kernel_size": 3,
            "conv_group_size": 4,
            "input_embedding_scale": 2.5,
            "output_multiplier": 0.6,
            "final_logit_softcapping": 4.0,
        },
    },
    "second_mixed": {
        **_SLIDING,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
for _variant in DFLASH2_VARIANTS.values():
    _variant["architectures"] = ["DFlash2DraftModel"]
    _own = _variant.get("dflash_config", {})
    _variant["dflash_config"] = {**_BASE["dflash_config"], **_PARTS, **_own}


def drafter_config(variant: str = "full", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny drafter; its heads (4 x 16) are wider than its hidden size."""
    merged = {**_BASE, **(VARIANTS | DFLASH2_VARIANTS)[variant], **overrides}
    # A copy to the bottom: a test that changes its config must not change the next one's.
    return deepcopy({key: value for key, value in merged.items() if value is not None})


def drafter_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under the checkpoint's names, scaled so that every part matters."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, out: int, into: int, gain: float, bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((out, into)) * gain / np.sqrt(into)
        if bias:
            weights[f"{name}.bias"] = 0.3 * rng.standard_normal(out)

    def norm(name: str, size: int, mean: float = 1.0) -> None:
        weights[f"{name}.weight"] = mean + 0.3 * rng.standard_normal(size)

    taps = len(config["dflash_config"]["target_layer_ids"])
    matrix("fc", hidden, taps * hidden, 1.0)
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        bias = config["attention_bias"]
        norm(f"{name}.input_layernorm", hidden)
        norm(f"{name}.post_attention_layernorm", hidden)
        matrix(f"{name}.self_attn.q_proj", queries, hidden, 1.0, bias)
        matrix(f"{name}.self_attn.k_proj", keys, hidden, 1.0, bias)
        matrix(f"{name}.self_attn.v_proj", keys, hidden, 1.5, bias)
        matrix(f"{name}.self_attn.o_proj", hidden, queries, 1.5, bias)
        # Sharp attention: with flat weights a wrong position would hardly show.
        norm(f"{name}.self_attn.q_norm", dim, 1.5)
        norm(f"{name}.self_attn.k_norm", dim, 1.5)
        matrix(f"{name}.mlp.gate_proj", inner, hidden, 1.0)
        matrix(f"{name}.mlp.up_proj", inner, hidden, 1.0)
        matrix(f"{name}.mlp.down_proj", hidden, inner, 1.0)
    if "DFlash2DraftModel" in config["architectures"]:
        weights |= _second_weights(config, rng)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def _second_weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What DFlash 2 adds; fixed and dynamic coefficients of like size, edges as large as logits."""
    parts, hidden = config["dflash_config"], config["hidden_size"]
    taps, rank = parts["conv_kernel_size"], parts["selector_rank"]
    outputs = 2 * taps * hidden // parts["conv_group_size"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            base = 0.4 * rng.standard_normal((2, taps, hidden))
            base[:, 0] += 1.0
            dynamic = 0.5 * rng.standard_normal((outputs, hidden)) / np.sqrt(hidden)
            weights[f"layers.{layer}.{conv}.base_kernel"] = base
            weights[f"layers.{layer}.{conv}.kernel_projection.weight"] = dynamic
    books = rng.standard_normal((2, config["vocab_size"], rank))
    weights["candidate_selector.predecessor_codebook"] = books[0]
    weights["candidate_selector.successor_codebook"] = books[1]
    projection = rng.standard_normal((rank, hidden)) / np.sqrt(hidden)
    weights["candidate_selector.hidden_projection.weight"] = projection
    return weights


def target_tables(hidden: int, vocab: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
    """Embedding [V, H] and output head [V, H] of the target a tiny drafter borrows from."""
    rng = np.random.default_rng(101)
    embedding = 0.5 * rng.standard_normal((vocab, hidden))
    head = 2.0 * rng.standard_normal((vocab, hidden)) / np.sqrt(hidden)
    return embedding.astype(np.float32), head.astype(np.float32)


def context_features(config: dict[str, Any], rows: int) -> np.ndarray:
    """Random target features [rows, T·H] with some strong channels, as real ones have."""
    width = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
    rng = np.random.default_rng(202)
    scale = np.exp(0.5 * rng.standard_normal(width))
    return (scale * rng.standard_normal((rows, width))).astype(np.float32)


def anchors() -> list[int]:
    """The anchor token of each proposal."""
    rng = np.random.default_rng(303)
    return [int(token) for token in rng.integers(8, VOCAB, len(CONTEXT_STEPS))]


def variant_seed(variant: str) -> int:
    return zlib.crc32(variant.encode()) % 1000


class BorrowedTarget:
    """The part of a target that a drafter sees."""

    def __init__(self, hidden: int = 32, layers: int = 7, vocab: int = VOCAB) -> None:
        self.num_layers, self.hidden_size, self.vocab_size = layers, hidden, vocab
        self.context_length = 256
        embedding, head = target_tables(hidden, vocab)
        import mlx.core as mx

        self.dtype = mx.float32
        self._embedding, self._head = mx.array(embedding), mx.array(head)
        self.head_rows: list[int] = []

    def embed(self, ids: mx.array) -> mx.array:
        return self._embedding[ids]

    def head(self, rows: mx.array) -> mx.array:
        self.head_rows.append(rows.shape[1])
        return rows @ self._head.T


def write_drafter(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint folder of a tiny drafter."""
    import mlx.core as mx

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {k: mx.array(v) for k, v in drafter_weights(config, seed).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
