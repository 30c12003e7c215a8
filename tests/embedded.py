"""The embedded drafter, and inputs that it and the official classes are both given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

ASSETS = Path(__file__).resolve().parent.parent / "dflash_mlx" / "assets"
STEPS = (7, 3)  # context rows that come in before each cycle


def folder() -> Path:
    """The one drafter that the package carries."""
    [config] = ASSETS.glob("*/config.json")
    return config.parent


def inputs(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(features [rows, T·H], embedded blocks [cycles, b, H]), float32, of ordinary size."""
    random = np.random.default_rng(5)
    hidden, own = config["hidden_size"], config["dflash_config"]
    width = hidden * len(own["target_layer_ids"])
    features = random.standard_normal((sum(STEPS), width), np.float32)
    blocks = random.standard_normal((len(STEPS), own["block_size"], hidden), np.float32) * 0.1
    return features, blocks.astype(np.float32)
