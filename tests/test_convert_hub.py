"""Conversions of repos of the hub: refused by config.json before the weights are fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import mixed_bits, write_folder, write_quantized
from conversions import bytes_of, source_config, write_source, write_tiny_drafter
from tiny import tiny_weights
from tiny_engine import VOCAB, write_tokenizer
from tiny_experts import mxfp4_experts

from dflash_mlx import hub
from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.errors import DFlashError
from tests.fake_hub import FakeHub, FakeRepo

pytest_plugins = ["tests.hub_fixtures"]


def change_config(source: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))


def repo_of(folder: Path) -> FakeRepo:
    return FakeRepo(bytes_of(folder))


DRAFTERS = {
    "other drafter": "made for a target of 9 layers",
    "bits": "has 40 inputs, no multiple of the group size 64; leave --draft-bits out",
}


@pytest.mark.parametrize(
    "what", ["family", "drafter", "other drafter", "bits", "gptq", "layout", "disk"]
)
def test_refusals_come_before_the_download(
    tmp_path: Path, server: FakeHub, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source = write_source(tmp_path / "m")
    sentence = "The disk of .* has 0.06 GB free, and .* are needed .*to fetch and .* to write"
    if what == "family":
        change_config(source, model_type="rwkv")
        sentence = "'rwkv' is not supported; use a model of one of llama, qwen3"
    elif what == "drafter":
        shutil.rmtree(source)
        write_tiny_drafter(source)
        sentence = "org/m is a DFlash drafter, not a model"
    elif what == "gptq":
        change_config(source, quantization_config={"quant_method": "gptq"})
        sentence = "org/m is quantized by gptq, which is not supported"
    elif what == "layout":
        change_config(source, attention_bias=True)
        sentence = "like this model's, and the converter asks it what to quantize"
    elif what in DRAFTERS:
        drafter = write_tiny_drafter(tmp_path / "d")
        if what == "other drafter":
            change_config(drafter, num_target_layers=9)
        server.repos["org/d"] = repo_of(drafter)
        sentence = DRAFTERS[what]
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=63_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    server.repos["org/m"] = repo_of(source)
    with pytest.raises(DFlashError, match=sentence):
        convert(
            Order(
                "org/m",
                tmp_path / "q",
                drafter="org/d" if what in DRAFTERS else None,
                draft_bits=4 if what == "bits" else None,
            )
        )
    assert server.gets("model.safetensors") == []
    assert not (tmp_path / "q").exists()


def test_a_hub_repo_is_converted_with_its_commit(tmp_path: Path, server: FakeHub) -> None:
    source = write_source(tmp_path / "m", changes={"torch_dtype": "float32"})
    server.repos["org/m"] = repo_of(source)
    order = Order("org/m", tmp_path / "q", Recipe(dtype="bfloat16"))
    dry = convert(replace(order, dry_run=True), show_fetch=False)
    assert server.gets("model.safetensors") == []
    wanted = sum(len(b) for n, b in bytes_of(source).items())
    assert dry.download_bytes == wanted
    report = convert(order, show_fetch=False)
    assert report.revision == "a" * 40
    assert abs(dry.result_bytes / report.result_bytes - 1) < 0.25
    config = json.loads((tmp_path / "q/config.json").read_text())
    assert config["conversion"]["revision"] == "a" * 40
    assert hub.preview("org/m") is None  # it is here now


def _gpt_oss(place: Path) -> Path:
    config = source_config("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    return write_tokenizer(write_folder(place, config, mxfp4_experts(tiny_weights(config))))


def _quantized(place: Path) -> Path:
    return write_tokenizer(
        write_quantized(place, "qwen3", bits=4, predicate=mixed_bits, vocab_size=VOCAB)
    )


@pytest.mark.parametrize("recipe", [Recipe(bits=8), Recipe(bits=4), Recipe(bits=8, mode="affine")])
@pytest.mark.parametrize("write", [_gpt_oss, _quantized, write_source])
def test_the_size_told_before_the_download_is_the_one_found_after_it(
    tmp_path: Path, server: FakeHub, write: Callable[[Path], Path], recipe: Recipe
) -> None:
    """Experts that stay in MXFP4 do not grow with the bits asked for."""
    source = write(tmp_path / "m")
    change_config(source, torch_dtype="bfloat16")
    server.repos["org/m"] = repo_of(source)
    before, after = (
        convert(Order(spec, tmp_path / "q", recipe, dry_run=True), show_fetch=False)
        for spec in ("org/m", str(source))
    )
    assert before.download_bytes > 0 == after.download_bytes
    assert before.result_bytes == pytest.approx(after.result_bytes, rel=0.01)


def test_a_drafter_for_a_source_on_disk_is_refused_before_the_download(
    tmp_path: Path, server: FakeHub
) -> None:
    source, drafter = write_source(tmp_path / "m"), write_tiny_drafter(tmp_path / "d")
    server.repos["org/d"] = repo_of(drafter)
    with pytest.raises(DFlashError, match="no multiple of the group size 64"):
        convert(Order(str(source), tmp_path / "q", drafter="org/d", draft_bits=8))
    assert server.gets("model.safetensors") == []
