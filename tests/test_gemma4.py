"""Gemma 4 against transformers: logits and layer outputs, what faults would show, and rollback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from oracle import plain_features, plain_forward, plain_logits
from tiny import target_of, tiny_target
from tiny_gemma import FULL, SLIDING, VARIANTS, gemma_config, gemma_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.gemma_attention import GemmaAttention
from dflash_mlx.layers.rope import Rope
from dflash_mlx.models import build_target, family_of
from dflash_mlx.models.gemma4 import Gemma4Target
from dflash_mlx.segment import Segment

GOLDENS = Path(__file__).parent / "goldens" / "gemma4"
TOLERANCE = 1e-4
TEETH = 20 * TOLERANCE


class Golden:
    def __init__(self, name: str) -> None:
        with np.load(GOLDENS / f"{name}.npz") as stored:
            self.config: dict[str, Any] = json.loads(str(stored["config"]))
            self.saved_config: dict[str, Any] = json.loads(str(stored["saved_config"]))
            self.ids: list[int] = stored["ids"].tolist()
            self.taps: list[int] = stored["taps"].tolist()
            self.logits: np.ndarray = stored["logits"]
            self.features: np.ndarray = stored["features"]


@pytest.fixture(params=VARIANTS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def segment(ids: list[int], cache: Any) -> Segment:
    return Segment(mx.array(ids, dtype=mx.int32), cache)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def test_goldens_spread_and_wrap_their_windows() -> None:
    for name in VARIANTS:
        golden = Golden(name)
        assert golden.logits.std() >= 1.0
        assert golden.config == gemma_config(name)
        assert len(golden.ids) >= 3 * golden.config["sliding_window"]


@pytest.mark.parametrize("sizes", [[24], [3, 12, 8, 1], [1] * 24], ids=["whole", "chunks", "steps"])
def test_equals_transformers(golden: Golden, sizes: list[int]) -> None:
    target, start = target_of(golden.config), 0
    cache, logits, features = target.make_cache(), [], []
    for size in sizes:
        ids = golden.ids[start : start + size]
        hidden, tapped = target.forward([segment(ids, cache)], golden.taps)
        logits.append(np.array(target.logits(hidden)[0]))
        features.append(np.array(tapped[0]))
        cache.commit(size)
        start += size
    assert start == len(golden.ids) == cache.length
    assert off(np.concatenate(logits), golden.logits) <= TOLERANCE
    assert off(np.concatenate(features), golden.features) <= TOLERANCE


def test_head_sizes_by_layer_as_transformers_saves_them(golden: Golden) -> None:
    assert "global_head_dim" not in golden.saved_config
    target = build_target(golden.saved_config)
    assert _shapes(target) == _shapes(target_of(golden.config))
    target = target_of(
        {**golden.config, "per_layer_config": golden.saved_config["per_layer_config"]}
    )
    assert off(plain_logits(target, golden.ids), golden.logits) <= TOLERANCE


def _shapes(target: Any) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tree_flatten(target.parameters())}


# What is wrong, done to a target that was right; the variants that it concerns (None: all).
Fault = Callable[[Gemma4Target], None]


def _each_attention(change: Callable[[GemmaAttention], None], full: bool | None = None) -> Fault:
    def fault(target: Gemma4Target) -> None:
        for layer in target.model.layers:
            if full is None or full == (layer.window is None):
                change(layer.self_attn)

    return fault


def _resized_window(by: int) -> Fault:
    def fault(target: Gemma4Target) -> None:
        for layer in target.model.layers:
            if layer.window is not None:
                layer.window += by
                layer.self_attn.window += by

    return fault


def _every_norm_plus_one(target: Gemma4Target) -> None:
    for name, module in target.named_modules():
        if name.endswith("norm"):
            module.weight = module.weight + 1


def _lent_by_the_layer_before(target: Gemma4Target) -> None:
    for layer in target.model.layers:
        if layer.lender is not None:
            layer.lender -= 2


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value)


def _rope_of(full: bool, periods: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def change(attention: GemmaAttention) -> None:
        attention.rope = Rope(periods(np.array(attention.rope.periods, dtype=np.float64)))

    return _each_attention(change, full)


def _scaled_scores(attention: GemmaAttention) -> None:
    attention.q_norm.weight = attention.q_norm.weight * attention.q_norm.weight.shape[0] ** -0.5


def _normed_keys_as_values(attention: GemmaAttention) -> None:
    own = attention._keys_and_values
    attention._keys_and_values = lambda x: (own(x)[0], own(x)[0])


def _raw_values(attention: GemmaAttention) -> None:
    own = attention._keys_and_values

    def changed(x: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = own(x)
        source = attention.v_proj if "v_proj" in attention else attention.k_proj
        return keys, source(x).reshape(values.shape)

    attention._keys_and_values = changed


def _router_root(target: Gemma4Target) -> None:
    for layer in target.model.layers:
        layer.router.root = 1.0


def _one_expert_fewer(target: Gemma4Target) -> None:
    for layer in target.model.layers:
        layer.router.top_k -= 1


CAPPED = ("gemma4", "gemma4_shared", "gemma4_unified", "gemma4_moe")
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "no soft-cap": (_set("final_logit_softcapping", None), CAPPED),
    "another soft-cap": (_set("final_logit_softcapping", 6.1), CAPPED),
    "a soft-cap": (_set("final_logit_softcapping", 30.0), ("gemma4_untied",)),
    "no embedding scale": (_set("embed_scale", 1.0), ()),
    "embedding scale of another width": (_set("embed_scale", 47**0.5), ()),
    "window + 1": (_resized_window(1), ()),
    "window - 1": (_resized_window(-1), ()),
    "norms of 1 + w": (_every_norm_plus_one, ()),
    "scores by 1/sqrt(D)": (_each_attention(_scaled_scores), ()),
    "values normed as keys": (_each_attention(_normed_keys_as_values, True), CAPPED),
    "values not normed": (_each_attention(_raw_values), ()),
    "theta of sliding layers": (_rope_of(False, lambda p: p**1.05), ()),
    "theta of full layers": (_rope_of(True, lambda p: p**1.05), ()),
    "all pairs of full layers turn": (
        _rope_of(True, lambda p: 50000.0 ** (np.arange(16) / 16)),
        (),
    ),
    "a rope of the turning dimensions only": (
        _rope_of(True, lambda p: 50000.0 ** (np.arange(4) / 4)),
        (),
    ),
    "another layer lends": (_lent_by_the_layer_before, ("gemma4_shared",)),
    "router without 1/sqrt(H)": (_router_root, ("gemma4_moe",)),
    "one expert fewer": (_one_expert_fewer, ("gemma4_moe",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    fault, variants = FAULTS[name]
    for variant in variants or VARIANTS:
        golden = Golden(variant)
        target = target_of(golden.config)
        fault(target)
        assert off(plain_logits(target, golden.ids), golden.logits) > TEETH, variant


def test_every_tensor_matters(golden: Golden) -> None:
    """One tensor of the first or the last layers replaced shows in the logits.

    All but the last layer's scalar, which the final norm takes out again: it shows in the features.
    """
    weights, seen = gemma_weights(golden.config), 0
    last = golden.config["num_hidden_layers"] - 2
    target, family = target_of(golden.config), family_of(golden.config)

    def load(name: str, array: np.ndarray) -> None:
        named = {name: mx.array(array)}
        family.remap_hf(named, golden.config)
        target.load_weights(list(named.items()), strict=False)

    for name, array in weights.items():
        number = int(name.split(".")[2]) if ".layers." in name else 0
        if 0 < number < last:
            continue
        load(name, 1.5 * array if array.size == 1 else np.roll(array, 1, axis=0))
        logits, features = plain_forward(target, golden.ids, golden.taps)
        if name == f"model.layers.{target.num_layers - 1}.layer_scalar":
            assert off(features, golden.features) > TEETH, name
        else:
            assert off(logits, golden.logits) > TEETH, name
        load(name, array)
        seen += 1
    assert seen >= 35
    assert off(plain_logits(target, golden.ids), golden.logits) <= TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_taps_are_seen(golden: Golden, shift: int) -> None:
    target = target_of(golden.config)
    shifted = [min(max(tap + shift, 0), target.num_layers - 1) for tap in golden.taps]
    assert off(plain_features(target, golden.ids, shifted), golden.features) > TEETH


def test_drafters_borrow_scaled_embeddings_and_the_bare_head() -> None:
    for variant in VARIANTS:
        target, weights = tiny_target(variant), gemma_weights(gemma_config(variant))
        table = weights["model.embed_tokens.weight"]
        rows = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
        embedded = np.array(target.embed(mx.array([[5, 7]]))[0])
        assert off(embedded, table[[5, 7]] * np.float32(48**0.5)) <= 1e-6
        bare = rows @ weights.get("lm_head.weight", table).T
        assert off(np.array(target.head(mx.array(rows))), bare) <= 1e-5
        cap = gemma_config(variant).get("final_logit_softcapping")
        wanted = bare if cap is None else np.tanh(bare / cap) * cap
        assert off(np.array(target.logits(mx.array(rows))), wanted) <= 1e-5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input = 16 (the per-layer inputs"),
    ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input = 256 (the per-layer in"),
    (
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention = 'all' is not supported",
    ),
    ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
    (
        {"layer_types": [SLIDING, FULL]},
        "layer_types is ['sliding_attention', 'full_attention'], no",
    ),
    ({"layer_types": ["conv", *[FULL] * 3]}, "layer_types = 'conv' is not supported"),
    ({"layer_types": [FULL] * 3 + [SLIDING]}, "last of layer_types is 'sliding_attention', not"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, not a whole number below 4"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers 3 leaves no full_attention layer to share"),
    ({"global_head_dim": None}, "no global_head_dim;"),
    ({"sliding_window": 0}, "sliding_window is 0, not a whole number above zero"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, not a number above zero"),
    ({"num_key_value_heads": 3}, "layer 0 3 key/value heads of 16 for 4 query heads"),
    ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config is {'1': {'sliding_win"),
    (
        {"rope_parameters": {SLIDING: {"rope_theta": 1e4}}},
        "not an object with one for full_attention",
    ),
    (
        {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3},
        "top_k_experts 3 is more th",
    ),
    ({"enable_moe_block": True}, "no num_experts;"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[s[:28] for _, s in REFUSED])
def test_unsupported_configs_are_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_target(gemma_config(**change))
    assert sentence in str(caught.value)


def test_unknown_keys_are_named_and_known_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    for variant in VARIANTS:
        build_target(Golden(variant).saved_config)
    assert not caplog.records
    build_target(gemma_config(swirl=2.0))
    assert "swirl" in caplog.text


def test_rope_parameters_left_out_are_those_of_transformers() -> None:
    target = build_target(gemma_config(rope_parameters=None))
    sliding, full = (target.model.layers[i].self_attn.rope for i in (0, 1))
    assert sliding.theta == 10_000.0
    assert np.allclose(np.array(full.periods[:4]), 1e6 ** (np.arange(4) / 16))
    assert np.isinf(np.array(full.periods[4:])).all()
