"""Loading: every packaging gives mlx-lm's logits, every broken checkpoint its sentence."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import INDEX, mixed_bits, write_folder, write_quantized
from mlx_lm.utils import load_model
from oracle import plain_greedy, plain_logits
from tiny import target_of, tiny_config, tiny_prompt, tiny_weights

from dflash_mlx import models
from dflash_mlx.errors import UsageError
from dflash_mlx.loader import Precision, load_target, load_target_as, resolve_dtype
from dflash_mlx.weights import read_weights

IDS = tiny_prompt(96, 20)


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def mlx_lm_logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_load_whole_and_sharded(
    tmp_path: Path, family: str, tied: bool, shards: int
) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    target = load_target(write_folder(tmp_path / "m", config, shards=shards), "float32")
    seen = plain_logits(target, IDS)
    assert off(seen, plain_logits(target_of(config), IDS)) == 0.0
    assert off(seen, mlx_lm_logits(tmp_path / "m")) <= 1e-4


def test_several_files_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, shards=2)
    (folder / INDEX).unlink()
    assert (
        off(plain_logits(load_target(folder, "float32"), IDS), plain_logits(target_of(config), IDS))
        == 0.0
    )


def test_a_bfloat16_checkpoint_is_widened_without_loss(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, dtype=mx.bfloat16)
    rounded = {
        k: np.array(mx.array(v).astype(mx.bfloat16).astype(mx.float32))
        for k, v in tiny_weights(config).items()
    }
    target = load_target_as(folder, Precision(mx.float32, False))
    assert target.dtype == mx.float32
    same = load_target(write_folder(tmp_path / "f32", config, rounded), "float32")
    assert off(plain_logits(target, IDS), plain_logits(same, IDS)) == 0.0


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_dtype_is_that_of_weights_features_and_logits(tmp_path: Path, name: str) -> None:
    from dflash_mlx.segment import Segment

    folder = write_folder(tmp_path / "m", tiny_config("qwen3", num_hidden_layers=1))
    target = load_target(folder, name)
    wanted = getattr(mx, name)
    hidden, features = target.forward([Segment(mx.array([1, 2]), target.make_cache())], [0])
    assert target.dtype == wanted
    assert features is not None
    assert {hidden.dtype, features.dtype, target.logits(hidden).dtype} == {wanted}


def test_what_dtype_names_mean() -> None:
    assert resolve_dtype("auto", metal=True) == Precision(None, True)
    assert resolve_dtype("auto", metal=False) == Precision(mx.float32, False)
    assert resolve_dtype("float16", metal=True) == Precision(mx.float16, True)
    assert resolve_dtype("bfloat16", metal=False) == Precision(mx.bfloat16, False)
    with pytest.raises(UsageError) as caught:
        resolve_dtype("int4")
    assert str(caught.value) == (
        "The dtype 'int4' is not known; use one of auto, bfloat16, float16, float32."
    )


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantized"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"bits": 4}),
        ("qwen3", {"bits": 8, "tied": True}),
        ("llama", {"bits": 4, "predicate": mixed_bits, "tied": True}),
        ("qwen3", {"bits": 4, "predicate": mixed_bits}),
        ("llama", {"bits": 4, "mode": "mxfp4"}),
    ],
    ids=["4bit", "8bit-tied", "mixed-tied", "mixed", "mxfp4"],
)
def test_mlx_quantized_checkpoints_equal_mlx_lm(
    tmp_path: Path, family: str, settings: dict[str, Any], keep: bool
) -> None:
    folder = write_quantized(tmp_path / "q", family, **settings)
    target = load_target_as(folder, Precision(mx.float32, keep))
    kinds = {type(m).__name__ for _, m in target.named_modules()}  # type: ignore[attr-defined]
    assert ("QuantizedLinear" in kinds) == keep
    seen, expected = plain_logits(target, IDS), mlx_lm_logits(folder)
    assert off(seen, expected) <= 1e-4
    # Quantization must show, or the comparison would also pass on the unquantized weights.
    assert off(expected, mlx_lm_logits(tmp_path / "plain")) > 0.01


def test_auto_keeps_the_float_type_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "q", "llama")
    weights = {
        k: v.astype(mx.float16) if mx.issubdtype(v.dtype, mx.floating) else v
        for k, v in read_weights(folder).items()
    }
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert load_target_as(folder, Precision(None, True)).dtype == mx.float16
    plain = load_target_as(tmp_path / "plain", Precision(None, True))
    assert plain.dtype == mx.bfloat16


def test_unused_but_harmless_tensors_are_left_out(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    weights = tiny_weights(config)
    expected = plain_logits(target_of(config), IDS)
    weights["lm_head.weight"] = np.zeros((96, 48), np.float32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    target = load_target(write_folder(tmp_path / "m", config, weights), "float32")
    assert off(plain_logits(target, IDS), expected) == 0.0


def test_a_loaded_model_runs_in_other_threads(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "q", "qwen3")
    loaded: list[Any] = []
    loader = threading.Thread(target=lambda: loaded.append(load_target(folder)))
    loader.start()
    loader.join()
    texts: list[list[int]] = []
    for _ in range(2):
        runner = threading.Thread(target=lambda: texts.append(plain_greedy(loaded[0], IDS, 4)))
        runner.start()
        runner.join()
    assert texts == [plain_greedy(load_target(folder), IDS, 4)] * 2


def test_no_second_copy_of_the_weights_is_held(tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    folder = write_folder(tmp_path / "m", config, dtype=mx.bfloat16)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    target = load_target(folder, "float32")
    held = mx.get_active_memory() - before
    size = sum(a.nbytes for a in tiny_weights(config).values())
    assert size <= held <= 1.02 * size
    assert mx.get_peak_memory() - before <= 1.15 * size
    assert target.num_layers == 8


def test_only_foreign_checkpoints_are_renamed(tmp_path, monkeypatch):
    """A family's remap_hf sees HF checkpoints and not those with MLX's format tag."""
    seen = []
    real = models.FAMILIES["llama"]
    row = real._replace(remap_hf=lambda weights, config: seen.append(sorted(weights)))
    monkeypatch.setitem(models.FAMILIES, "llama", row)
    folder = write_folder(tmp_path / "hf", tiny_config("llama"))
    load_target(folder)
    assert len(seen) == 1
    assert "model.norm.weight" in seen[0]
    quantized = write_quantized(tmp_path / "mlx", "llama")
    load_target(quantized)
    assert len(seen) == 1
