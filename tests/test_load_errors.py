"""Every broken checkpoint gets its sentence: what is wrong and where, and what to do."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import INDEX, write_folder, write_quantized
from tiny import tiny_config, tiny_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models import FAMILIES
from dflash_mlx.weights import read_config, read_weights

# Each fault changes a good folder; the sentence is the whole message.


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != ""}))


def _rewrite(folder: Path, drop: str = "", **extra: np.ndarray) -> None:
    weights = tiny_weights(json.loads((folder / "config.json").read_text()))
    weights.pop(drop, None)
    weights.update({name.replace("__", "."): array for name, array in extra.items()})
    mx.save_safetensors(
        str(folder / "model.safetensors"), {k: mx.array(v) for k, v in weights.items()}
    )


def _cut(folder: Path, count: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-count])


def _fp8(folder: Path) -> None:
    entry = {"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    header = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")


def _wrong_entry(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")


def _duplicate(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


def _shard(folder: Path, fault: Callable[[dict[str, str]], None]) -> None:
    (folder / "model.safetensors").unlink()
    write_folder(folder, json.loads((folder / "config.json").read_text()), shards=2)
    index = json.loads((folder / INDEX).read_text())
    fault(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _moved(weight_map: dict[str, str]) -> None:
    weight_map["lm_head.weight"] = "model-2-of-2.safetensors"


def _unlisted(weight_map: dict[str, str]) -> None:
    del weight_map["lm_head.weight"]


def _absent(weight_map: dict[str, str]) -> None:
    weight_map["lm_head.weight"] = "model-9-of-2.safetensors"


def _outside(weight_map: dict[str, str]) -> None:
    weight_map["lm_head.weight"] = "../model-1-of-2.safetensors"


NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj"
AGAIN = "fetch the checkpoint again."
FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "no config",
        lambda f: (f / "config.json").unlink(),
        "{f} has no config.json; give the folder of a complete checkpoint.",
    ),
    (
        "config no json",
        lambda f: (f / "config.json").write_text("{"),
        "{f}/config.json cannot be read (*); " + AGAIN,
    ),
    (
        "config no object",
        lambda f: (f / "config.json").write_text("[]"),
        "{f}/config.json is not a JSON object; " + AGAIN,
    ),
    (
        "no weights",
        lambda f: (f / "model.safetensors").unlink(),
        "{f} has no .safetensors file; give a folder with safetensors weights.",
    ),
    (
        "truncated",
        lambda f: _cut(f, 100),
        "{f}/model.safetensors has * bytes, its header describes *; " + AGAIN,
    ),
    (
        "empty file",
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "{f}/model.safetensors is no complete safetensors file; " + AGAIN,
    ),
    (
        "a web page",
        lambda f: (f / "model.safetensors").write_text("<html>not found</html>" * 9),
        "{f}/model.safetensors is no complete safetensors file; " + AGAIN,
    ),
    (
        "header no json",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{" + b"0"),
        "{f}/model.safetensors has a broken safetensors header; " + AGAIN,
    ),
    (
        "wrong entry",
        _wrong_entry,
        "{f}/model.safetensors has a broken entry for w; " + AGAIN,
    ),
    (
        "fp8",
        _fp8,
        "Tensor w of {f}/model.safetensors is stored as F8_E4M3, which is not supported; use a "
        "checkpoint in one of *.",
    ),
    (
        "duplicate",
        _duplicate,
        "Tensor * is in both a.safetensors and b.safetensors of {f}; remove the file that does not "
        "belong to the checkpoint.",
    ),
    (
        "index moved",
        lambda f: _shard(f, _moved),
        INDEX + " of {f} puts tensor lm_head.weight into model-2-of-2.safetensors, which does not "
        "hold it; " + AGAIN,
    ),
    (
        "index unlisted",
        lambda f: _shard(f, _unlisted),
        "model-1-of-2.safetensors of {f} holds tensor lm_head.weight, which " + INDEX + " does not "
        "list; " + AGAIN,
    ),
    (
        "shard absent",
        lambda f: _shard(f, _absent),
        "{f} lacks model-9-of-2.safetensors, which " + INDEX + " lists; " + AGAIN,
    ),
    (
        "shard outside",
        lambda f: _shard(f, _outside),
        "{f}/" + INDEX + " names '../model-1-of-2.safetensors', which is no file name; " + AGAIN,
    ),
    (
        "tensor missing",
        lambda f: _rewrite(f, drop=NORM),
        "{f} lacks model.norm.weight; fetch or convert it again.",
    ),
    (
        "tensor extra",
        lambda f: _rewrite(f, model__mystery__weight=np.ones(3, np.float32)),
        "{f} holds model.mystery.weight, which its model_type does not use; use a checkpoint that "
        "fits its config.json.",
    ),
    (
        "wrong shape",
        lambda f: _rewrite(f, model__norm__weight=np.ones(47, np.float32)),
        "model.norm.weight of {f} has shape (47,), its config asks for (48,); use the config.json "
        "that belongs to these weights.",
    ),
    (
        "head untied",
        lambda f: _edit(f, tie_word_embeddings=True, model_type="qwen3", head_dim=12),
        "{f} lacks model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight, "
        "model.layers.1.self_attn.k_norm.weight and 5 more; fetch or convert it again.",
    ),
    (
        "drafter by architecture",
        lambda f: _edit(f, architectures=["DFlashDraftModel"]),
        "{f} is a DFlash drafter, not a model; give the model it was made for, and this as "
        "its drafter.",
    ),
    (
        "drafter by key",
        lambda f: _edit(f, dflash_config={"mask_token_id": 3}),
        "{f} is a DFlash drafter, not a model; give the model it was made for, and this as "
        "its drafter.",
    ),
    (
        "unknown family",
        lambda f: _edit(f, model_type="mamba"),
        "The config's model_type 'mamba' is not supported; use a model of one of "
        f"{', '.join(FAMILIES)}.",
    ),
    (
        "gptq",
        lambda f: _edit(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "{f} is quantized by gptq, which is not supported; use the unquantized checkpoint, an MLX "
        "or a GGUF conversion.",
    ),
    (
        "unnamed quantization",
        lambda f: _edit(f, quantization_config={"bits": 4}),
        "{f} is quantized by an unnamed method, which is not supported; use the unquantized "
        "checkpoint, an MLX or a GGUF conversion.",
    ),
    (
        "quantization without bits",
        lambda f: _edit(f, quantization={"group_size": 64}),
        "The quantization in config.json of {f} has no group_size and bits; convert the checkpoint "
        "again.",
    ),
]


def message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_target(folder)
    return str(caught.value)


def agrees(pattern: str, text: str, folder: Path) -> bool:
    """`*` stands for anything; all else is literal."""
    literal = re.escape(pattern.replace("{f}", str(folder))).replace(r"\*", ".+")
    return re.fullmatch(literal, text) is not None


@pytest.mark.parametrize(("fault", "sentence"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_broken_checkpoints_get_their_sentence(
    tmp_path: Path, fault: Callable[[Path], Any], sentence: str
) -> None:
    folder = write_folder(tmp_path / "m", tiny_config("llama"))
    load_target(folder)  # good before the fault
    fault(folder)
    text = message(folder)
    assert agrees(sentence, text, folder), text


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    assert "has no config.json" in message(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_weights(tmp_path / "nowhere")


QUANTIZED_FAULTS: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
    (
        "not stated",
        lambda c, w: c.pop("quantization"),
        "lm_head has quantized weights, but the config states no quantization for it; "
        "convert the checkpoint again.",
    ),
    (
        "stated as plain",
        lambda c, w: c["quantization"].update({Q: False}),
        Q + " has quantized weights, but the config states no quantization for it; convert the "
        "checkpoint again.",
    ),
    (
        "other key",
        lambda c, w: c["quantization"].update({Q: {"bits": 4, "swirl": 1}}),
        "The quantization of " + Q + " has swirl, which is not supported; convert the checkpoint "
        "with group_size, bits and mode only.",
    ),
    (
        "wrong bits",
        lambda c, w: c["quantization"].update({"bits": 8}),
        "* of {f} *; *.",
    ),
    (
        "no weight",
        lambda c, w: w.pop(f"{Q}.weight"),
        "{f} lacks " + Q + ".weight; fetch or convert it again.",
    ),
    (
        "no biases",
        lambda c, w: w.pop(f"{Q}.biases"),
        "{f} lacks " + Q + ".biases; fetch or convert it again.",
    ),
    (
        "scales of nothing",
        lambda c, w: w.update({"model.mystery.scales": w[f"{Q}.scales"]}),
        "{f} *model.mystery.*; *.",
    ),
]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantized"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [f[1:] for f in QUANTIZED_FAULTS],
    ids=[f[0] for f in QUANTIZED_FAULTS],
)
def test_broken_quantized_checkpoints_get_their_sentence(
    tmp_path: Path, fault: Callable[[Any, Any], Any], sentence: str, keep: bool
) -> None:
    folder = write_quantized(tmp_path / "q", "llama")
    config, weights = read_config(folder), read_weights(folder)
    config.pop("quantization_config")
    fault(config, weights)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / INDEX).unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_target_as(folder, Precision(mx.float32, keep))
    assert agrees(sentence, str(caught.value), folder), str(caught.value)
