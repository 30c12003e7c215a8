"""GGUF targets with experts and hybrids: files of llama.cpp's converter equal the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import encode, write_gguf
from mlx.utils import tree_flatten
from oracle import plain_features, plain_logits
from tiny import target_with, tiny_prompt
from tiny_gguf import FAMILIES, GOLDENS, golden_config, golden_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf import open_gguf
from dflash_mlx.gguf.file import read_gguf
from dflash_mlx.gguf.quants import to_dense
from dflash_mlx.gguf.tensors import Entry
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models.decoder import DecoderTarget

IDS = tiny_prompt(64, 20)


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def expected(name: str) -> DecoderTarget:
    config = golden_config(name)
    return target_with(config, golden_weights(config))


def rewritten(
    name: str,
    path: Path,
    *,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    drop: str = "",
    change: dict[str, Any] | None = None,
) -> Path:
    """A golden written again in float32, with metadata changed, tensors left out or quantized."""
    file = read_gguf(GOLDENS / f"{name}.gguf")
    fields = {k: v for k, v in file.metadata.items() if k.startswith(f"{name}.")} | (change or {})
    tensors = {
        key: np.array(to_dense(tensor, mx.float32))
        for key, tensor in file.tensors.items()
        if key != drop
    }
    return write_gguf(path, name, fields, tensors, kinds)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_converted_file_equals_the_model(name: str) -> None:
    target, wanted = load_target(GOLDENS / f"{name}.gguf", "float32"), expected(name)
    logits = plain_logits(wanted, IDS)
    assert logits.std() > 1.0
    assert off(plain_logits(target, IDS), logits) <= 1e-5
    assert off(plain_features(target, IDS, [0, 1]), plain_features(wanted, IDS, [0, 1])) <= 1e-5


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen35", "attn_qkv.weight"),
        ("qwen35", "attn_gate.weight"),
        ("qwen35", "ssm_alpha.weight"),
        ("qwen35", "ssm_beta.weight"),
        ("qwen35", "ssm_out.weight"),
        ("qwen35", "ssm_conv1d.weight"),
        ("qwen35", "ssm_dt.bias"),
        ("qwen35", "ssm_a"),
    ],
)
def test_every_order_of_heads_matters(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one tensor's heads as the file has them the logits are far off."""
    from dflash_mlx.gguf import model

    table = model.tensor_table

    def faulty(architecture: str, config: dict[str, Any]) -> dict[str, Entry]:
        entries = table(architecture, config)
        for key, entry in entries.items():
            if key.endswith(part):
                entries[key] = Entry(entry.name, entry.shape, finish=entry.finish)
        return entries

    monkeypatch.setattr(model, "tensor_table", faulty)
    target = load_target(GOLDENS / f"{name}.gguf", "float32")
    assert off(plain_logits(target, IDS), plain_logits(expected(name), IDS)) > 2e-4


def test_the_config_of_a_hybrid() -> None:
    config = open_gguf(GOLDENS / "qwen35.gguf").config()
    assert config["model_type"] == "qwen3_5_text"
    assert config["num_hidden_layers"] == 2  # the block for multi-token prediction is none
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    assert config["partial_rotary_factor"] == 0.5
    assert (config["linear_num_key_heads"], config["linear_num_value_heads"]) == (2, 6)
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (8, 12)


def test_stacked_experts_stay_quantized(tmp_path: Path) -> None:
    """Groups are 32 wide, so the experts' inner width has to be too."""
    kinds = {
        f"blk.{i}.ffn_down_exps.weight": GGMLQuantizationType[kind]
        for i, kind in enumerate(("Q8_0", "Q4_0"))
    }
    path = rewritten("qwen35moe", tmp_path / "m.gguf", kinds=kinds)
    kept = load_target_as(path, Precision(mx.float32, True))
    dense = load_target_as(path, Precision(mx.float32, False))
    names = {name for name, _ in tree_flatten(kept.parameters())}  # type: ignore[attr-defined]
    assert "model.layers.1.mlp.switch_mlp.down_proj.scales" in names
    assert off(plain_logits(kept, IDS), plain_logits(dense, IDS)) <= 1e-4
    assert off(plain_logits(dense, IDS), plain_logits(expected("qwen35moe"), IDS)) > 0.002


def test_columns_of_whole_groups_are_moved_quantized(tmp_path: Path) -> None:
    """The output projection of a delta layer, whose columns come in another order of heads."""
    from dflash_mlx.gguf.quants import to_affine

    values = np.random.default_rng(5).standard_normal((8, 96)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_1
    path = write_gguf(tmp_path / "m.gguf", "x", {}, {"a": values}, {"a": kind})
    tensor = read_gguf(path).tensors["a"]
    assert np.array_equal(tensor.rows.reshape(-1), encode(values, kind).reshape(-1))
    columns = np.arange(96).reshape(3, 32)[[2, 0, 1]].reshape(-1)
    weight, scales, biases = to_affine(tensor, mx.float32, None, columns)
    moved = mx.dequantize(weight, scales, biases, group_size=32, bits=4)
    assert off(np.array(moved), np.array(to_dense(tensor, mx.float32))[:, columns]) <= 1e-6


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("qwen35", {"drop": "blk.0.ssm_a"}, "lacks the tensors blk.0.ssm_a"),
        ("qwen35", {"change": {"qwen35.nextn_predict_layers": 0}}, "not understood: blk.2"),
        ("qwen35", {"change": {"qwen35.ssm.inner_size": 71}}, "no multiple of 6 heads"),
        ("qwen35", {"change": {"qwen35.ssm.odd": 1}}, "not understood: qwen35.ssm.odd = 1"),
        (
            "qwen35",
            {"change": {"qwen35.attention.recurrent_layers": [False, False]}},
            "lacks the tensors blk.0.attn_q.weight",
        ),
        (
            "qwen35",
            {"change": {"qwen35.attention.recurrent_layers": [False]}},
            r"recurrent_layers = \[False\] for 2 layers",
        ),
        ("qwen3moe", {"change": {"qwen3moe.expert_count": 5}}, "ffn_gate_exps.weight of shape"),
        ("qwen3moe", {"change": {"qwen3moe.expert_weights_scale": 2.0}}, "expert_weights_scale"),
        ("qwen35moe", {"drop": "blk.1.ffn_up_shexp.weight"}, "lacks .*blk.1.ffn_up_shexp.weight"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, name: str, how: dict[str, Any], message: str
) -> None:
    path = rewritten(name, tmp_path / "m.gguf", **how)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_beyond_the_tensors_are_refused_before_a_model_is_built(
    tmp_path: Path, name: str
) -> None:
    """And so is every other wrong value of the metadata: a sentence, or it does not matter."""
    keys = [k for k in read_gguf(GOLDENS / f"{name}.gguf").metadata if k.startswith(f"{name}.")]
    sentences = {}
    for key in keys:
        for value in (2**31 - 1, 0, True, "x", [1], float("nan")):
            path = rewritten(name, tmp_path / "m.gguf", change={key: value})
            try:
                load_target(path)
            except CheckpointError as error:
                sentences[key, value if isinstance(value, int | str) else str(value)] = str(error)
    assert len(sentences) > 4 * len(keys)
    assert not any("\n" in sentence for sentence in sentences.values())
    for key, of_config in (
        ("block_count", "block_count"),
        ("embedding_length", "hidden_size"),
        ("attention.head_count", "num_attention_heads times head_dim"),
        ("attention.key_length", None),
    ):
        found = sentences[f"{name}.{key}", 2**31 - 1]
        assert of_config is None or f"has {of_config} " in found, found
        assert of_config is None or "where its tensors have room for" in found, found
