"""Tiny drafters as other packagings write them; each has an official one with the same drafts.

Imports MLX only inside functions, so that the script that makes goldens can use it with torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_drafter as tiny

KNOWN = [3, 4, 7, 9, 11, 12, 20, 21, 22, 30, 33, 40, 46, 47]  # target ids of a reduced vocabulary
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def save(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    """A checkpoint folder of these tensors."""
    import mlx.core as mx

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {k: v if isinstance(v, mx.array) else mx.array(v) for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def official_weights() -> dict[str, np.ndarray]:
    return tiny.drafter_weights(tiny.drafter_config(), 8)


def own_tables() -> dict[str, np.ndarray]:
    """Embedding and head unlike those of the target."""
    rng = np.random.default_rng(71)
    shape = (tiny.VOCAB, 32)
    return {
        "embed_tokens.weight": (0.5 * rng.standard_normal(shape)).astype(np.float32),
        "lm_head.weight": (0.4 * rng.standard_normal(shape)).astype(np.float32),
    }


def reduced_tables() -> dict[str, Any]:
    """Head, d2t (an offset from draft id to target id) and t2d of the tokens in KNOWN."""
    import mlx.core as mx

    known = np.zeros(tiny.VOCAB, bool)
    known[KNOWN] = True
    return {
        "lm_head.weight": own_tables()["lm_head.weight"][KNOWN],
        "d2t": mx.array(np.array(KNOWN) - np.arange(len(KNOWN)), mx.int64),
        "t2d": mx.array(known),
    }


def speculators_config(**overrides: Any) -> dict[str, Any]:
    """config.json of speculators around a tiny drafter with two sliding layers."""
    layers = {
        "transformers_version": "5.24.0",
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "initializer_range": 0.02,
        "rms_norm_eps": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "attention_bias": False,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 28,
        "layer_types": MIXED,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "model_type": "qwen3",
    }
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "a/b"}},
        "transformer_layer_config": layers,
        "draft_vocab_size": tiny.VOCAB,
        "block_size": tiny.BLOCK,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 4, 7],
        "mask_token_id": 5,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "max_anchors": 512,
        "projector_type": "dflash",
        "shift_label": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    config |= overrides
    return {key: value for key, value in config.items() if value != "absent"}


def meta_config(**overrides: Any) -> dict[str, Any]:
    """config.json of Meta's assistant around a tiny drafter."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "attention_dropout": 0,
        "block_size": tiny.BLOCK,
        "bos_token_id": 200000,
        "dtype": "float32",
        "eos_token_id": 200001,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 40,
        "layer_types": ["sliding_attention"] * 3,
        "mask_token_id": 5,
        "max_position_embeddings": 256,
        "model_type": "muse_glimmer_assistant",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 200018,
        "rms_norm_eps": 0.02,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "sliding_window": 6,
        "target_layer_ids": [1, 3, 6],
        "transformers_version": "5.24.0",
    }
    return {k: v for k, v in (config | overrides).items() if v != "absent"}


def meta_weights() -> dict[str, np.ndarray]:
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    return {names.get(k, k): v for k, v in official_weights().items()}
