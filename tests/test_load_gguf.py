"""GGUF targets equal the folder of the same weights; the real SmolLM2 equals mlx-lm's llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import WIDE
from gguf import GGMLQuantizationType
from gguf_files import gguf_tensors, model_fields, tokenizer_fields, write_gguf
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from oracle import plain_logits
from tiny import target_of, tiny_config, tiny_prompt, tiny_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

IDS = tiny_prompt(96, 20)
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0]


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def write(
    path: Path,
    config: dict[str, Any],
    kind: GGMLQuantizationType | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: str = "",
) -> Path:
    """The tiny model of `config` as llama.cpp's converter writes it, matrices in type `kind`."""
    family = config["model_type"]
    tensors = gguf_tensors(family, tiny_weights(config)) | (extra or {})
    tensors.pop(drop, None)
    kinds = {n: kind for n, a in tensors.items() if a.ndim == 2} if kind else None
    fields = model_fields(
        family,
        feed_forward_length=config["intermediate_size"],
        attention__key_length=16,
        attention__layer_norm_rms_epsilon=config["rms_norm_eps"],
    )
    return write_gguf(path, family, fields | tokenizer_fields(), tensors, kinds)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return tiny_config(family, vocab_size=300, **WIDE, **changes)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_float_file_equals_the_model_it_was_written_from(
    tmp_path: Path, family: str, tied: bool
) -> None:
    config = config_of(family, tie_word_embeddings=tied)
    target = load_target(write(tmp_path / "m.gguf", config), "float32")
    assert off(plain_logits(target, IDS), plain_logits(target_of(config), IDS)) <= 1e-5


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_quantized_equals_dequantized(tmp_path: Path, kind: str) -> None:
    config = config_of("llama")
    quantized = GGMLQuantizationType[kind]
    file = write(tmp_path / "m.gguf", config, quantized)
    kept = load_target_as(file, Precision(mx.float32, True))
    dense = load_target_as(file, Precision(mx.float32, False))
    names = {name for name, _ in tree_flatten(kept.parameters())}  # type: ignore[attr-defined]
    assert "model.layers.0.self_attn.q_proj.scales" in names
    assert off(plain_logits(kept, IDS), plain_logits(dense, IDS)) <= 1e-4
    assert off(plain_logits(dense, IDS), plain_logits(target_of(config), IDS)) > 0.002


def test_frequency_factors_reach_the_rope(tmp_path: Path) -> None:
    config = config_of("llama")
    extra = {"rope_freqs.weight": np.array(FACTORS, np.float32)}
    target = load_target(write(tmp_path / "m.gguf", config, extra=extra), "float32")
    wanted = target_of({**config, "rope_freq_factors": FACTORS})
    assert off(plain_logits(target, IDS), plain_logits(wanted, IDS)) <= 1e-5
    assert off(plain_logits(target, IDS), plain_logits(target_of(config), IDS)) > 0.002


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", config_of("llama"), drop="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        load_target(file)


def greedy(target: Target, prompt: list[int], n: int) -> list[int]:
    cache, ids, text = target.make_cache(), prompt, []
    for _ in range(n):
        hidden, _ = target.forward([Segment(mx.array(ids, dtype=mx.int32), cache)])
        cache.commit(len(ids))
        ids = [int(target.logits(hidden[:, -1]).argmax().item())]
        text += ids
    return text


@pytest.mark.smollm2
def test_smollm2_equals_mlx_lm(smollm2_gguf: Path) -> None:
    from dflash_mlx.gguf import open_gguf
    from dflash_mlx.tokenizer import load_tokenizer

    target = load_target(smollm2_gguf, "float32")
    reference = llama.Model(llama.ModelArgs.from_dict(open_gguf(smollm2_gguf).config()))
    reference.load_weights(tree_flatten(target.parameters()))  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(smollm2_gguf)
    # Short, for on MLX's bundled BLAS every row of this model costs 50 ms.
    prompt = tokenizer.encode("The capital of France is")
    expected = np.array(reference(mx.array([prompt]))[0])
    assert off(plain_logits(target, prompt), expected) == 0.0
    assert expected.std() > 1.0
    steps = generate_step(mx.array(prompt), reference, max_tokens=4)
    assert greedy(target, prompt, 4) == [int(token) for token, _ in steps]
