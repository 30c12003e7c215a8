"""Configs of new drafters as the official classes read them, taps, masks and first weights."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from tiny import tiny_config, tiny_target
from tiny_engine import write_tokenizer

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.config import parse_config
from dflash_mlx.tokenizer import load_tokenizer
from dflash_mlx.train.export import save_drafter
from dflash_mlx.train.shape import Shape, chosen_taps, drafter_config, mask_token, spread_taps
from dflash_mlx.train.start import random_start, target_start

GOLDENS = Path(__file__).parent / "goldens" / "train"
OFFICIAL = json.loads((GOLDENS / "official.json").read_text())
CASES = {
    "v1": ("llama", Shape(layers=2, taps=2)),
    "windows": ("llama", Shape(layers=2, taps=3, windows=64)),
    "v2": ("llama", Shape(layers=1, taps=2, selector_rank=8)),
    "causal": ("llama", Shape(layers=2, taps=2, causal=True)),
    # With rotary embeddings, heads and norms of their own.
    "qwen3_5": ("qwen3_5", Shape(layers=2, taps=2)),
    "gpt_oss": ("gpt_oss", Shape(layers=2, taps=2)),
    "gemma4": ("gemma4", Shape(layers=2, taps=2)),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.mark.parametrize("name", CASES)
def test_the_official_class_has_the_tensors_we_write(name, tmp_path):
    family, shape = CASES[name]
    target = tiny_target(family)
    stored = drafter_config(target, tiny_config(family), shape, 8, 3)
    assert stored == json.loads((GOLDENS / f"{name}.config.json").read_text())
    start = random_start(parse_config(stored), 0)
    save_drafter(tmp_path, stored, tree_unflatten(list(start.weights.items())))
    written = mx.load(str(tmp_path / "model.safetensors"))
    official = OFFICIAL[name]
    assert {n: list(a.shape) for n, a in written.items()} == official["tensors"]
    drafter = open_drafter(tmp_path, target, dtype=mx.float32)
    assert list(drafter.taps) == official["taps"]
    assert drafter.block_size == official["block_size"]
    assert drafter.config.mask_token_id == official["mask_token_id"]
    rope = drafter.config.rope
    assert np.allclose(1 / np.array(rope.periods), official["frequencies"], rtol=1e-5)
    assert rope.magnitude == pytest.approx(official["magnitude"])


def test_taps_are_spread_as_the_paper_spreads_them():
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(30, 5) == (1, 8, 14, 20, 27)
    assert spread_taps(64, 5) == (1, 16, 31, 46, 61)
    assert spread_taps(30, 3) == (1, 14, 27)
    for layers in range(1, 12):
        for count in range(1, layers + 1):
            taps = spread_taps(layers, count)
            assert len(set(taps)) == count
            assert 0 <= min(taps) <= max(taps) < layers


def test_given_taps_stay_in_their_order(target):
    assert chosen_taps(target, (3, 0)) == (3, 0)


def test_a_start_from_the_target_has_its_last_layers(target):
    stored = drafter_config(target, tiny_config("llama"), Shape(layers=2, taps=(0, 1)), 8, 3)
    start = target_start(parse_config(stored), target, 0)
    for index, name in ((0, "mlp.down_proj"), (1, "self_attn.k_proj"), (1, "input_layernorm")):
        source = target.model.layers[2 + index]
        for part in name.split("."):
            source = source[part] if part in source else getattr(source, part)
        ours = start.weights[f"layers.{index}.{name}.weight"]
        assert mx.array_equal(ours, source.weight)
    # The last tap, the output below those layers, passes through the context projection.
    last = start.weights["fc.weight"][:, target.hidden_size :]
    assert np.abs(np.array(last) - np.eye(target.hidden_size)).max() < 0.1
    assert "layers.0.self_attn.q_norm.weight" not in start.taken  # llama has none


@pytest.mark.parametrize(
    ("layers", "taps", "passed"),
    [
        (2, (1, 0), 0),  # in whatever order taps are given
        (1, (0, 1, 2), 2),
        (3, (2, 0), 1),  # layers 1 to 3 read the output of layer 0
        (2, (0, 2), 0),  # as far below as above: rather what is below
    ],
)
def test_the_tap_nearest_to_what_the_first_layer_reads_passes(target, layers, taps, passed):
    stored = drafter_config(target, tiny_config("llama"), Shape(layers=layers, taps=taps), 8, 3)
    fc = np.array(target_start(parse_config(stored), target, 0).weights["fc.weight"])
    parts = np.split(fc, len(taps), axis=1)
    passes = [np.abs(part - np.eye(target.hidden_size)).max() < 0.1 for part in parts]
    assert passes == [index == passed for index in range(len(taps))]


def test_a_start_from_a_quantized_target_is_its_dequantized_weight():
    import mlx.nn as nn

    target = tiny_target("qwen3", hidden_size=64, intermediate_size=96)
    whole = np.array(target.model.layers[-1].mlp.gate_proj.weight)
    nn.quantize(target, group_size=32, bits=8)
    stored = drafter_config(
        target, tiny_config("qwen3", intermediate_size=96), Shape(layers=1, taps=1), 8, 3
    )
    taken = target_start(parse_config(stored), target, 0).weights["layers.0.mlp.gate_proj.weight"]
    assert 0 < np.abs(np.array(taken) - whole).max() < 0.05


def test_a_random_start_depends_on_seed_and_name_only(target):
    config = [
        parse_config(drafter_config(target, tiny_config("llama"), Shape(layers=n, taps=2), 8, 3))
        for n in (1, 2)
    ]
    one, two = (random_start(c, 5).weights for c in config)
    assert all(mx.array_equal(one[name], two[name]) for name in one)
    other = random_start(config[0], 6).weights
    assert not mx.array_equal(one["fc.weight"], other["fc.weight"])


def test_the_mask_is_a_token_that_texts_do_not_hold(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "a"))
    wide = tiny_target("llama", vocab_size=300)
    assert mask_token(tokenizer, wide, None)[0] == tokenizer.size == 258
    full = tiny_target("llama", vocab_size=258)
    more = ["<|im_start|>", "<|im_end|>", "<spare>"]
    spare = load_tokenizer(write_tokenizer(tmp_path / "b", specials=more))
    assert spare.token_text(mask_token(spare, tiny_target("llama", vocab_size=259), None)[0]) == (
        "<spare>"
    )
    assert mask_token(tokenizer, full, 7) == (7, "given")
