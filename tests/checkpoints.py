"""Writes tiny checkpoints as people publish them: HF folders, sharded or not, and MLX ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tiny import tiny_config, tiny_weights

# Widths that quantization groups of 32 and 64 divide.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
INDEX = "model.safetensors.index.json"


def write_folder(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """A checkpoint as HF lays it out: config.json, one file or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    source = tiny_weights(config) if weights is None else weights
    arrays = {name: mx.array(array) for name, array in source.items()}
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating):
            arrays[name] = array.astype(dtype)
    names, index = sorted(arrays), {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1}-of-{shards}.safetensors"
        part = {name: arrays[name] for name in names[shard::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_quantized(
    folder: Path,
    family: str,
    *,
    mode: str = "affine",
    bits: int = 4,
    group_size: int | None = None,
    predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
    tied: bool = False,
    weights: dict[str, np.ndarray] | None = None,
    **overrides: Any,
) -> Path:
    """An MLX-format checkpoint, quantized and written by mlx-lm itself.

    weights: those of the plain checkpoint that is quantized, in names that mlx-lm reads.
    """
    config = tiny_config(family, tie_word_embeddings=tied, **{**WIDE, **overrides})
    plain = write_folder(folder.parent / "plain", config, weights)
    model, config = load_model(plain)
    group = group_size or {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}[mode]
    model, config = quantize_model(model, config, group, bits, mode=mode, quant_predicate=predicate)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def mixed_bits(path: str, module: nn.Module) -> bool | dict[str, Any]:
    """As mixed recipes do: the head in 8 bits, one projection finer grouped, one left alone."""
    if "lm_head" in path or "embed_tokens" in path:
        return {"group_size": 32, "bits": 8}
    if path.endswith("layers.0.mlp.down_proj"):
        return {"group_size": 32, "bits": 6}
    return hasattr(module, "to_quantized") and not path.endswith("layers.1.self_attn.v_proj")
