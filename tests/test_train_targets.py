"""Training for targets that are not a folder of plain weights: quantized ones, and a GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import tiny_gguf
from tiny_training import own_texts, write_answers, write_target

import dflash_mlx
from dflash_mlx.train import run
from dflash_mlx.train.loss import HeadSubset
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.shape import Shape

pytestmark = pytest.mark.usefixtures("no_picture")

RECIPE = Recipe(
    block_size=4, epochs=30, step_blocks=1000, pass_blocks=1000, learning_rate=2e-2, negatives=8
)


def learned(order: Order, monkeypatch: pytest.MonkeyPatch) -> float:
    """τ on the texts trained on, which the target that training loads has answered."""
    engine = run.engines.load(order.target, draft=None)
    write_answers(order.answers[0], own_texts(engine, 8, 8))
    monkeypatch.setattr(run, "split", lambda texts, held_out: (texts, texts))
    return run.train(order)["tau"]


def test_a_quantized_target_that_stays_so(tmp_path, monkeypatch):
    """As on a GPU: neither its layers nor its head are held in full."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = str(write_target(tmp_path / "target", "qwen3", **sizes))
    load = run.engines.load

    def quantized(*given, **named):
        engine = load(*given, **named)
        nn.quantize(engine.target, group_size=32, bits=8)
        return engine

    engine = quantized(folder, draft=None)
    head = HeadSubset(engine.target, [3, 90, 17])
    rows = mx.random.normal((4, 64), key=mx.random.key(0))
    assert np.allclose(rows @ head.rows.T, engine.target.head(rows)[:, [3, 17, 90]], atol=1e-4)
    monkeypatch.setattr(run.engines, "load", quantized)
    order = Order(
        folder, tmp_path / "out", RECIPE, Shape(layers=1, taps=2), answers=[tmp_path / "a.jsonl"]
    )
    assert learned(order, monkeypatch) > 2
    stored = json.loads((tmp_path / "out/config.json").read_text())
    assert (stored["hidden_size"], stored["intermediate_size"]) == (64, 96)


def test_a_gguf_file(tmp_path, monkeypatch):
    kind = {"blk.1.ffn_up.weight": GGMLQuantizationType.Q8_0}
    file = str(tiny_gguf(tmp_path / "tiny.gguf", kinds=kind))
    recipe = replace(RECIPE, epochs=60)
    order = Order(
        file, tmp_path / "out", recipe, Shape(layers=1, taps=2), answers=[tmp_path / "a.jsonl"]
    )
    assert learned(order, monkeypatch) > 2
    drafted = dflash_mlx.load(file, draft=str(order.out), block_size=None)
    assert drafted.generate([1, 2, 3], max_tokens=4).stats.cycles
