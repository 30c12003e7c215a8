"""A trained drafter in the official format: config.json, bfloat16 weights, model card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.draft.dflash2 import DFlash2Drafter
from dflash_mlx.draft.head import ORDER_FILE
from dflash_mlx.models.base import Target
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.files import make_folder, write_tensors, write_text
from dflash_mlx.train.start import new_model

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def save_drafter(folder: Path, config: Mapping[str, Any], parameters: Any) -> None:
    """Write config.json and bfloat16 weights; each file is the old one or the new one, whole."""
    make_folder(folder)
    weights = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(parameters)}
    write_tensors(folder / _WEIGHTS, weights, {"format": "pt"})
    write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")


def has_drafter(folder: Path) -> bool:
    """Whether `save_drafter` has written there."""
    return (folder / _WEIGHTS).exists() and (folder / _CONFIG).exists()


def save_token_order(folder: Path, texts: Iterable[Text]) -> None:
    """Write which tokens drafts are likely to be, the most frequent first.

    Counted over prompts and answers; tokens that occur equally often are in the order of their ids.
    """
    counts = Counter(token for text in texts for token in text.ids)
    order = sorted(counts, key=lambda token: (-counts[token], token))
    write_text(folder / ORDER_FILE, json.dumps({"order": order}, separators=(",", ":")) + "\n")


def as_drafter(
    config: DFlashConfig, parameters: Any, target: Target, dtype: mx.Dtype
) -> DFlashDrafter:
    """The drafter of generation with these weights as they are exported, rounded to bfloat16."""
    model = new_model(config)
    rounded = [(n, a.astype(mx.bfloat16).astype(dtype)) for n, a in tree_flatten(parameters)]
    model.load_weights(rounded)
    mx.eval(model.parameters())
    return (DFlash2Drafter if config.parts else DFlashDrafter)(model, config, target)
