"""Sources to convert, what other programs make of the results, and a conversion as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import WIDE, write_folder
from gguf import GGMLQuantizationType
from gguf_files import TOKENS, gguf_tensors, model_fields, tokenizer_fields, write_gguf
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from oracle import plain_logits
from tiny import VARIANTS, tiny_config, tiny_prompt, tiny_weights
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx.gguf.config import read_config
from dflash_mlx.gguf.file import read_gguf
from dflash_mlx.gguf.tensors import tensor_table
from dflash_mlx.loader import Precision, load_target_as
from dflash_mlx.models import FAMILIES

IDS = tiny_prompt(VOCAB, 20)
HERE = Path(__file__).parent


# Tiny models that mlx-lm computes otherwise, and why.
NOT_COMPARED = {"gemma4_untied": "mlx-lm has no attention biases and no Gemma 4 without soft-cap"}


def tiny_families() -> list[str]:
    """Every tiny model that mlx-lm reads as we do."""
    types = {tiny_config(variant)["model_type"] for variant in VARIANTS}
    # The others are the names of multimodal checkpoints around these.
    missing = {kind for kind in FAMILIES if kind not in types and f"{kind}_text" not in types}
    assert not missing, f"no tiny model of {missing}"
    return [variant for variant in VARIANTS if variant not in NOT_COMPARED]


def write_source(folder: Path, family: str = "qwen3", **options: Any) -> Path:
    """A checkpoint as people publish it: weights, tokenizer with template, generation config."""
    config = source_config(family, **options.pop("changes", {}))
    write_folder(folder, config, **options)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, VOCAB - 1]}))
    return folder


def source_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of `write_source`."""
    # Rows that groups of 32 and 64 divide; other families have layers of their own pattern.
    wide = WIDE if family in ("llama", "qwen3") else {"hidden_size": WIDE["hidden_size"]}
    if family == "gpt_oss":  # mlx-lm computes YaRN only so
        scaling = tiny_config(family)["rope_scaling"]
        wide = {**wide, "rope_scaling": {**scaling, "truncate": True}}
    if family == "gemma4_moe":
        wide = {**wide, "moe_intermediate_size": 32}
    return tiny_config(family, vocab_size=VOCAB, **{**wide, **changes})


def saved_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 5 writes it: `rope_parameters` alone, heads layer by layer."""
    from transformers import AutoConfig

    own = dict(config)
    return json.loads(AutoConfig.for_model(own.pop("model_type"), **own).to_json_string())


def write_tiny_drafter(folder: Path, **changes: Any) -> Path:
    """A drafter that fits `write_source`."""
    config = drafter_config(
        hidden_size=64,
        vocab_size=VOCAB,
        num_target_layers=2,
        dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 3, "block_size": 4},
        block_size=4,
        **changes,
    )
    return write_drafter(folder, config)


def write_tiny_gguf(file: Path, kind: str | None = None) -> Path:
    """A llama of `write_source`'s scale as GGUF with a byte-level tokenizer, matrices in `kind`."""
    config = tiny_config("llama", vocab_size=300, **WIDE)
    tensors = gguf_tensors("llama", tiny_weights(config))
    matrices = [n for n, a in tensors.items() if a.ndim == 2]
    fields = model_fields(
        "llama",
        feed_forward_length=config["intermediate_size"],
        attention__layer_norm_rms_epsilon=config["rms_norm_eps"],
    )
    kinds = dict.fromkeys(matrices, GGMLQuantizationType[kind]) if kind else None
    return write_gguf(file, "llama", fields | tokenizer_fields(), tensors, kinds)


_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
_HYBRID = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 2,
    "rope.dimension_count": 16,
}
#: what each architecture has beyond the sizes that all have
GGUF_KEYS: dict[str, dict[str, int]] = {
    "qwen3moe": {"feed_forward_length": 128, **_EXPERTS},
    "qwen35": {"feed_forward_length": 128, **_HYBRID},
    "qwen35moe": {"expert_shared_feed_forward_length": 64, **_EXPERTS, **_HYBRID},
}


def write_family_gguf(file: Path, architecture: str) -> Path:
    """A float32 GGUF of random weights, all of it as wide as groups of 32 ask for."""
    sizes = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000.0,
        **GGUF_KEYS[architecture],
    }
    fields = {f"{architecture}.{k}": v for k, v in sizes.items()} | tokenizer_fields()
    # The reader's own table says which tensors a config asks for.
    table = {"token_embd.weight": np.zeros((len(TOKENS), 64), np.float32)}
    # Room for the layers and widths that are stated, which the reader asks for.
    table |= {f"room.{i}": np.zeros(2048, np.float32) for i in range(2)}
    write_gguf(file, architecture, fields, table)
    config = {**read_config(read_gguf(file), architecture), "tie_word_embeddings": False}
    rng, tensors = np.random.default_rng(3), {}
    for name, entry in tensor_table(architecture, config).items():
        values = rng.normal(size=entry.shape)
        if name.endswith("ssm_a"):
            values = -np.exp(values)
        elif len(entry.shape) == 1:
            values = 1 + 0.2 * values
        else:
            values = values * 1.5 / np.sqrt(entry.shape[-1])
        tensors[name] = values.astype(np.float32)
    return write_gguf(file, architecture, fields, tensors)


def our_logits(folder: Path, *, keep: bool = False) -> np.ndarray:
    return plain_logits(load_target_as(folder, Precision(mx.float32, keep)), IDS)


def mlx_lm_logits(folder: Path) -> np.ndarray:
    """mlx-lm's own reading of the folder, widened to float32 so that it rounds as ours does."""
    model, _ = load_model(folder)
    model.update(tree_map(_widened, model.parameters()))
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def tensors_of(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a folder's safetensors files."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(mx.load(str(file)))  # type: ignore[arg-type]
    return found


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python code in a process of its own that finds the package and the tests."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
