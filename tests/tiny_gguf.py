"""The tiny models of tests/goldens/gguf, which llama.cpp's converter wrote (make_gguf_goldens)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny import tiny_config, tiny_weights

GOLDENS = Path(__file__).parent / "goldens/gguf"
FAMILIES = {"qwen3moe": "qwen3_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}


def golden_config(name: str) -> dict[str, Any]:
    """config.json of the model: two layers, for hybrids one of each kind."""
    small: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 2,
    }
    own = {"mlp_only_layers": []} if name == "qwen3moe" else {}
    extra = {"mtp_num_hidden_layers": 1} if name == "qwen35" else {}
    if name == "qwen35moe":
        small["intermediate_size"] = None
    return tiny_config(FAMILIES[name], **{**small, **own, **extra})


def golden_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Float32 weights by HF key that float16 holds without rounding."""
    return {
        name: array.astype(np.float16).astype(np.float32)
        for name, array in tiny_weights(config).items()
    }
