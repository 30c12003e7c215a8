"""Converted folders: mlx-lm's own bytes, logits by both programs, and all that goes beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import mixed_bits, write_folder, write_quantized
from conversions import (
    GGUF_KEYS,
    IDS,
    bytes_of,
    mlx_lm_logits,
    off,
    our_logits,
    source_config,
    tensors_of,
    tiny_families,
    write_family_gguf,
    write_source,
    write_tiny_drafter,
    write_tiny_gguf,
)
from mlx_lm import convert as mlx_lm_convert
from tiny import tiny_weights
from tiny_engine import VOCAB, write_tokenizer
from tiny_experts import mxfp4_experts

from dflash_mlx import engine, hub
from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.convert.check import PROMPT, PROMPT_TOKENS, compare
from dflash_mlx.convert.quantize import noise_of
from dflash_mlx.convert.source import open_source
from dflash_mlx.loader import load_target
from dflash_mlx.segment import Segment
from dflash_mlx.tokenizer import load_tokenizer

TEXT = "How many?  12 + 30 = 42.\n"


@pytest.mark.parametrize("family", tiny_families())
def test_every_family_is_read_alike_by_us_and_by_mlx_lm(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path / "m", family, shards=3)
    report = convert(Order(str(source), tmp_path / "q", Recipe(bits=8, group_size=32)))
    expected = mlx_lm_logits(tmp_path / "q")
    assert off(our_logits(tmp_path / "q"), expected) <= 1e-4
    assert off(our_logits(tmp_path / "q", keep=True), expected) <= 1e-4
    # Quantized, and still the model it was; the median, since a router may choose otherwise.
    changed = float(np.median(np.abs(our_logits(source) - expected)))
    assert 0.0005 < changed < 0.2 * expected.std()
    assert report.modules_quantized == len([n for n in tensors_of(tmp_path / "q") if "scales" in n])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(bits=6, group_size=32),
        Recipe(mixed="mixed_3_6"),
        Recipe(mode="mxfp4"),
        Recipe(mode="mxfp8"),
        Recipe(mode="nvfp4"),
        Recipe(bits=3, dtype="float16"),
    ],
    ids=lambda recipe: f"{recipe.label}-{recipe.dtype}",
)
def test_tensors_equal_those_of_mlx_lm_convert(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = recipe.group_size is None and recipe.mixed is None
    changes = {"tie_word_embeddings": tied, "torch_dtype": "bfloat16", "num_hidden_layers": 3}
    source = write_source(tmp_path / "m", "llama", changes=changes, dtype=mx.bfloat16)
    monkeypatch.setattr("dflash_mlx.convert.source.CHUNK", 1000)  # rows in many chunks
    convert(Order(str(source), tmp_path / "q", recipe, shard_bytes=30_000))
    mlx_lm_convert(
        str(source),
        str(tmp_path / "theirs"),
        quantize=True,
        q_group_size=recipe.group_size or (64 if recipe.mixed else None),
        q_bits=recipe.bits,
        q_mode=recipe.mode or "affine",
        dtype=recipe.dtype,
        quant_predicate=recipe.mixed,
    )
    ours, theirs = tensors_of(tmp_path / "q"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert mx.array_equal(ours[name], tensor), name
    assert off(our_logits(tmp_path / "q"), our_logits(tmp_path / "theirs")) == 0.0
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1


def test_what_is_quantized_with_the_bits_asked_for_stays(tmp_path: Path) -> None:
    source = write_quantized(
        tmp_path / "m", "qwen3", bits=4, predicate=mixed_bits, vocab_size=VOCAB
    )
    write_tokenizer(source)
    report = convert(Order(str(source), tmp_path / "q", Recipe(bits=4)))
    assert report.remarks[0] == (
        "The source is quantized itself: 12 of its modules stay as they are, and 3 are quantized a "
        "second time, which adds to their errors."
    )
    before, after = tensors_of(source), tensors_of(tmp_path / "q")
    kept = "model.layers.1.mlp.up_proj"
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(before[f"{kept}.{part}"], after[f"{kept}.{part}"])
    config = json.loads((tmp_path / "q/config.json").read_text())
    # 8 and 6 bits, and what was not quantized at all, were brought to 4.
    assert before["lm_head.weight"].shape != after["lm_head.weight"].shape
    assert "model.layers.1.self_attn.v_proj.scales" in after
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert report.modules_kept == 12
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        (Recipe(bits=4), {"group_size": 32, "bits": 4, "mode": "affine"}),
        (Recipe(bits=4, group_size=64), {"group_size": 64, "bits": 4, "mode": "affine"}),
        (Recipe(mode="mxfp4"), {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
    ids=lambda value: value.label if isinstance(value, Recipe) else str(value["group_size"]),
)
def test_group_size_and_mode_that_are_asked_for_are_in_the_file(
    tmp_path: Path, recipe: Recipe, found: dict[str, object]
) -> None:
    source = write_quantized(tmp_path / "m", "llama", bits=4, group_size=32, vocab_size=VOCAB)
    write_tokenizer(source)
    report = convert(Order(str(source), tmp_path / "q", recipe))
    config = json.loads((tmp_path / "q/config.json").read_text())
    assert config["quantization"] == found
    assert (
        config["conversion"]["recipe"] == report.recipe == {**found, "mixed": None, "dtype": None}
    )
    for name, tensor in tensors_of(tmp_path / "q").items():
        if name.endswith(".scales"):
            weight = tensors_of(tmp_path / "q")[f"{name.removesuffix('scales')}weight"]
            assert weight.shape[-1] * 32 // 4 // tensor.shape[-1] == found["group_size"], name
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4


def test_floating_point_formats_stay_when_more_bits_are_asked_for(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "m", "llama", mode="mxfp4", vocab_size=VOCAB)
    write_tokenizer(source)
    convert(Order(str(source), tmp_path / "q", Recipe(bits=8)))
    assert off(our_logits(tmp_path / "q"), our_logits(source)) == 0.0
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4


def _in_layer_1(path: str, _: nn.Module) -> bool:
    return ".layers.1." in f".{path}"


def test_settings_that_stay_are_in_the_record(tmp_path: Path) -> None:
    source = write_quantized(
        tmp_path / "m", "qwen3", mode="mxfp4", predicate=_in_layer_1, vocab_size=VOCAB
    )
    write_tokenizer(source)
    asked = convert(Order(str(source), tmp_path / "q", Recipe(bits=4)))
    assert asked.recipe == {
        **Recipe(bits=4).settings,
        "mixed": None,
        "dtype": None,
        "taken_over": [{"group_size": 32, "bits": 4, "mode": "mxfp4"}],
    }
    plain = convert(Order(str(source), tmp_path / "p", Recipe(bits=4, mode="affine")))
    assert plain.recipe == {**Recipe(bits=4).settings, "mixed": None, "dtype": None}
    quantization = json.loads((tmp_path / "p/config.json").read_text())["quantization"]
    assert quantization == Recipe(bits=4).settings
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4
    assert off(our_logits(tmp_path / "p"), mlx_lm_logits(tmp_path / "p")) <= 1e-4


def test_everything_beside_the_weights_is_carried_over(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    (source / "LICENSE").write_text("free")
    (source / "onnx.bin").write_text("not this")
    convert(Order(str(source), tmp_path / "q"))
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"}
    assert {p.name for p in (tmp_path / "q").iterdir()} == {
        *names,
        "config.json",
        "model.safetensors",
    }
    ours, theirs = load_tokenizer(tmp_path / "q"), load_tokenizer(source)
    messages = [{"role": "user", "content": TEXT}]
    assert ours.chat_ids(messages) == theirs.chat_ids(messages)
    assert ours.end_ids == theirs.end_ids == {5, VOCAB - 1}


def test_config_tells_where_it_came_from(tmp_path: Path) -> None:
    import hashlib

    source = write_source(tmp_path / "m")
    (source / "README.md").write_text("---\nbase_model: org/Base\n---\n")
    drafter = write_tiny_drafter(tmp_path / "d", intermediate_size=64)
    order = Order(str(source), tmp_path / "q", Recipe(mixed="mixed_4_6"), drafter=str(drafter))
    report = convert(replace(order, draft_bits=8, shard_bytes=40_000))
    config = json.loads((tmp_path / "q/config.json").read_text())
    origin = config["conversion"]
    files = bytes_of(tmp_path / "q")
    del files["config.json"]
    assert origin["sha256"] == {n: hashlib.sha256(b).hexdigest() for n, b in files.items()}
    assert origin["source"] == str(source)
    # The card is not carried over, and what it says of the model's origin is.
    assert hub.base_models(tmp_path / "q") == (str(source), "org/Base")
    assert origin["recipe"]["mixed"] == "mixed_4_6"
    assert origin["drafter"] == {
        "folder": "drafter",
        "source": str(drafter),
        "revision": None,
        "bits": 8,
    }
    assert config["quantization"]["lm_head"] == {"group_size": 64, "bits": 6, "mode": "affine"}
    assert report.result_bytes == sum(
        a.nbytes for f in ("q", "q/drafter") for a in tensors_of(tmp_path / f).values()
    )


def test_chat_takes_the_folder_with_its_drafter(tmp_path: Path) -> None:
    source, drafter = write_source(tmp_path / "m"), write_tiny_drafter(tmp_path / "d")
    convert(Order(str(source), tmp_path / "q", drafter=str(drafter)))
    drafts = tensors_of(tmp_path / "q/drafter")
    assert {a.dtype for a in drafts.values()} == {mx.bfloat16}
    assert drafts.keys() == tensors_of(drafter).keys()
    loaded = engine.load(str(tmp_path / "q"), block_size=None, progress=False)
    assert loaded.reason == f"the drafter beside {tmp_path / 'q'}"
    answer = loaded.generate(IDS, max_tokens=12)
    plain = engine.load(str(tmp_path / "q"), draft=None, progress=False)
    assert answer.token_ids == plain.generate(IDS, max_tokens=12).token_ids
    assert answer.stats.cycles > 0


def test_the_self_check_equals_two_whole_forwards(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m", changes={"num_hidden_layers": 3})
    report = convert(Order(str(source), tmp_path / "q", Recipe(bits=3)))
    ids = load_tokenizer(source).encode(PROMPT)[:PROMPT_TOKENS]
    states, logits = [], []
    for folder in (source, tmp_path / "q"):
        target = load_target(folder, "float32")
        segment = Segment(mx.array(ids), target.make_cache())
        hidden, features = target.forward([segment], range(3))
        assert features is not None
        embedded = np.array(target.embed(mx.array(ids)))
        states.append([embedded, *np.split(np.array(features[0]), 3, axis=-1)])
        row = np.array(target.logits(hidden)[0, -1:])
        logits.append(row - row.mean())
    wanted = [
        np.max(np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1))
        for a, b in zip([*states[0], logits[0]], [*states[1], logits[1]], strict=True)
    ]
    assert report.self_check is not None
    found = report.self_check["places"]
    assert [p["where"] for p in found] == ["embedding", "layer 0", "layer 1", "layer 2", "logits"]
    np.testing.assert_allclose([p["error"] for p in found], wanted, rtol=1e-3)
    assert min(wanted) > 0.02
    same = compare(open_source(source), open_source(source), ids)
    assert (same.worst.error, same.as_expected) == (0.0, True)
    assert report.self_check["as_expected"]


def test_the_self_check_finds_a_weight_in_the_wrong_place(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    convert(Order(str(source), tmp_path / "q", Recipe(bits=8)))
    file = tmp_path / "q/model.safetensors"
    weights = tensors_of(tmp_path / "q")
    name = "model.layers.1.self_attn.{}_proj."
    for part in ("weight", "scales", "biases"):
        k, v = name.format("k") + part, name.format("v") + part
        weights[k], weights[v] = weights[v], weights[k]
    mx.save_safetensors(str(file), dict(weights), metadata={"format": "mlx"})
    noise = noise_of({"group_size": 64, "bits": 8, "mode": "affine"})
    check = compare(open_source(source), open_source(tmp_path / "q"), IDS, noise)
    assert not check.as_expected
    assert check.verdict.startswith("more than expected: most tokens are off by")
    errors = {place.where: place.error for place in check.places}
    assert errors["layer 0"] < 0.05 < 0.3 < errors["layer 1"]


def test_openai_s_own_layout_of_gpt_oss_stays_in_its_bits(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = source_config("gpt_oss", **changes, quantization_config={"quant_method": "mxfp4"})
    source = write_folder(tmp_path / "m", config, mxfp4_experts(tiny_weights(config)))
    write_tokenizer(source)
    report = convert(Order(str(source), tmp_path / "q", Recipe(bits=8, group_size=32)))
    assert (report.modules_kept, report.modules_quantized) == (6, 12)
    ours, expected = our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")
    assert off(ours, expected) <= 1e-4
    assert off(our_logits(tmp_path / "q", keep=True), expected) <= 1e-4
    assert float(np.median(np.abs(our_logits(source) - expected))) < 0.2 * expected.std()


@pytest.mark.parametrize("kind", [None, "Q4_1", "Q8_0"])
def test_gguf_becomes_a_folder_with_tokenizer(tmp_path: Path, kind: str | None) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf", kind)
    report = convert(Order(str(file), tmp_path / "q", Recipe(bits=8, group_size=32)))
    assert report.modules_kept == (16 if kind == "Q8_0" else 0)
    expected = mlx_lm_logits(tmp_path / "q")
    assert off(our_logits(tmp_path / "q"), expected) <= 1e-4
    assert off(our_logits(file), expected) < 0.5
    ours, theirs = load_tokenizer(tmp_path / "q"), load_tokenizer(file)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.end_ids == theirs.end_ids


@pytest.mark.parametrize("architecture", GGUF_KEYS)
def test_gguf_of_experts_and_hybrids_is_read_alike(tmp_path: Path, architecture: str) -> None:
    file = write_family_gguf(tmp_path / "m.gguf", architecture)
    convert(Order(str(file), tmp_path / "q", Recipe(bits=8, group_size=32)))
    expected = mlx_lm_logits(tmp_path / "q")
    assert off(our_logits(tmp_path / "q"), expected) <= 1e-4
    # The median, since a router may choose otherwise.
    assert float(np.median(np.abs(our_logits(file) - expected))) < 0.2 * expected.std()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_gguf_of_the_bits_asked_for_loses_nothing(tmp_path: Path, kind: str) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf", kind)
    report = convert(Order(str(file), tmp_path / "q", Recipe(bits=4, dtype="float32")))
    assert (report.modules_kept, report.modules_quantized) == (16, 0)
    assert off(our_logits(tmp_path / "q"), our_logits(file)) <= 1e-5


def test_a_dry_run_writes_nothing_and_counts_right(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    order = Order(str(source), tmp_path / "q", Recipe(bits=5))
    before = bytes_of(tmp_path)
    dry = convert(replace(order, dry_run=True))
    assert bytes_of(tmp_path) == before
    assert dry.remarks == []
    assert dry.result_bytes == convert(order).result_bytes
    after = bytes_of(tmp_path)
    again = convert(replace(order, dry_run=True))
    assert again.remarks == [f"{tmp_path / 'q'} exists already; delete it or give another folder."]
    assert again.result_bytes == dry.result_bytes
    assert bytes_of(tmp_path) == after
