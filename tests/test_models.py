"""Targets against transformers: logits and layer outputs of tiny random models, and their teeth."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_gemma
import tiny_hybrid
from oracle import checked_greedy, plain_features, plain_forward, plain_greedy, plain_logits
from tiny import target_of, target_with, tiny_config, tiny_prompt, tiny_target, tiny_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import FAMILIES, build_target
from dflash_mlx.segment import Segment

GOLDENS = sorted((Path(__file__).parent / "goldens" / "targets").glob("*.npz"))
TOLERANCE = 1e-4
TEETH = 20 * TOLERANCE


class Golden:
    def __init__(self, name: str) -> None:
        with np.load(Path(__file__).parent / "goldens" / "targets" / f"{name}.npz") as stored:
            self.config: dict[str, Any] = json.loads(str(stored["config"]))
            self.ids: list[int] = stored["ids"].tolist()
            self.taps: list[int] = stored["taps"].tolist()
            self.logits: np.ndarray = stored["logits"]
            self.features: np.ndarray = stored["features"]


@pytest.fixture(params=[g.stem for g in GOLDENS])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def segment(ids: list[int], cache: Any) -> Segment:
    return Segment(mx.array(ids, dtype=mx.int32), cache)


def run_in_parts(target: Any, ids: list[int], sizes: list[int], taps: list[int]) -> Any:
    """Logits and features of ids fed in parts of the given sizes, each part committed whole."""
    cache, start, logits, features = target.make_cache(), 0, [], []
    for size in sizes:
        hidden, tapped = target.forward([segment(ids[start : start + size], cache)], taps)
        logits.append(np.array(target.logits(hidden)[0]))
        features.append(np.array(tapped[0]))
        cache.commit(size)
        start += size
    assert start == len(ids) == cache.length
    return np.concatenate(logits), np.concatenate(features)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def test_there_are_goldens_of_every_family_with_spread_logits() -> None:
    seen = {Golden(g.stem).config["model_type"] for g in GOLDENS}
    assert seen == set(FAMILIES) - tiny_hybrid.FAMILIES - tiny_gemma.FAMILIES
    assert all(Golden(g.stem).logits.std() >= 1.0 for g in GOLDENS)


@pytest.mark.parametrize("sizes", [[24], [7, 16, 1], [1] * 24], ids=["whole", "chunks", "steps"])
def test_equals_transformers(golden: Golden, sizes: list[int]) -> None:
    logits, features = run_in_parts(target_of(golden.config), golden.ids, sizes, golden.taps)
    assert off(logits, golden.logits) <= TOLERANCE
    assert off(features, golden.features) <= TOLERANCE


def faulty_logits(golden: Golden, weights: dict[str, np.ndarray], **changes: Any) -> np.ndarray:
    return plain_logits(target_with({**golden.config, **changes}, weights), golden.ids)


def test_wrong_settings_are_seen(golden: Golden) -> None:
    weights = tiny_weights(golden.config)
    theta, eps = golden.config["rope_theta"], golden.config["rms_norm_eps"]
    faults: list[dict[str, Any]] = [{"rope_theta": 1.5 * theta}, {"rms_norm_eps": 0.9 * eps}]
    if scaling := golden.config.get("rope_scaling"):
        faults += [
            {"rope_scaling": {"rope_type": "default"}},
            {"rope_scaling": {**scaling, "factor": 6.0}},
        ]
    for fault in faults:
        assert off(faulty_logits(golden, weights, **fault), golden.logits) > TEETH, fault


def test_every_tensor_matters(golden: Golden) -> None:
    """A norm left out, or one tensor of the first or last layer replaced, shows in the logits."""
    weights, last = tiny_weights(golden.config), golden.config["num_hidden_layers"] - 1
    seen = 0
    for name, array in weights.items():
        if ".layers." in name and not name.startswith(("model.layers.0.", f"model.layers.{last}.")):
            continue
        replaced = np.ones_like(array) if array.ndim == 1 else np.roll(array, 1, axis=0)
        assert off(faulty_logits(golden, {**weights, name: replaced}), golden.logits) > TEETH, name
        seen += 1
    assert seen >= 20


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_taps_are_seen(golden: Golden, shift: int) -> None:
    target = target_of(golden.config)
    layers = target.num_layers
    shifted = [min(max(tap + shift, 0), layers - 1) for tap in golden.taps]
    assert off(plain_features(target, golden.ids, shifted), golden.features) > TEETH
    swapped = golden.taps[::-1]
    assert off(plain_features(target, golden.ids, swapped), golden.features) > TEETH


def test_last_tap_is_before_the_final_norm(golden: Golden) -> None:
    target = target_of(golden.config)
    hidden, features = target.forward(
        [segment(golden.ids, target.make_cache())], [target.num_layers - 1]
    )
    width = golden.config["hidden_size"]
    assert off(np.array(features[0]), golden.features[:, -width:]) <= TOLERANCE
    assert off(np.array(hidden[0]), golden.features[:, -width:]) > TEETH


def test_positions_and_causality_are_seen(golden: Golden) -> None:
    """The second half run behind one row too few differs; rows never see later tokens."""
    target = target_of(golden.config)
    cache = target.make_cache()
    target.forward([segment(golden.ids[:12], cache)])
    cache.commit(11)
    hidden, _ = target.forward([segment(golden.ids[12:], cache)])
    assert off(np.array(target.logits(hidden)[0]), golden.logits[12:]) > TEETH
    changed = [*golden.ids[:-1], (golden.ids[-1] + 1) % 96]
    assert off(plain_logits(target, changed)[:-1], golden.logits[:-1]) <= TOLERANCE


@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() - tiny_hybrid.FAMILIES - tiny_gemma.FAMILIES)
)
class TestSegments:
    def test_two_segments_equal_two_runs(self, family: str) -> None:
        target = tiny_target(family)
        a, b = tiny_prompt(96, 9, 1), tiny_prompt(96, 30, 2)
        cache_a, cache_b = target.make_cache(), target.make_cache()
        taps, seen_a, seen_b = [1, 3], [], []
        # Prefill of both, then single steps and blocks side by side at different lengths.
        for (a0, a1), (b0, b1) in [((0, 4), (0, 20)), ((4, 5), (20, 27)), ((5, 9), (27, 30))]:
            segments = [segment(a[a0:a1], cache_a), segment(b[b0:b1], cache_b)]
            hidden, features = target.forward(segments, taps)
            rows = np.concatenate([np.array(target.logits(hidden)[0]), np.array(features[0])], -1)
            seen_a.append(rows[: a1 - a0])
            seen_b.append(rows[a1 - a0 :])
            cache_a.commit(a1 - a0)
            cache_b.commit(b1 - b0)
        for ids, seen in ((a, seen_a), (b, seen_b)):
            alone = np.concatenate(plain_forward(target, ids, taps), axis=-1)
            assert off(np.concatenate(seen), alone) <= 1e-5

    def test_commit_of_any_count_equals_a_fresh_run(self, family: str) -> None:
        target = tiny_target(family)
        prompt, block, tail = tiny_prompt(96, 11, 3), tiny_prompt(96, 6, 4), tiny_prompt(96, 3, 5)
        for n in range(len(block) + 1):
            cache = target.make_cache()
            target.forward([segment(prompt, cache)])
            cache.commit(len(prompt))
            target.forward([segment(block, cache)])
            assert cache.pending == len(block)
            cache.commit(n)
            assert cache.length == len(prompt) + n
            hidden, _ = target.forward([segment(tail, cache)])
            fresh = plain_logits(target, prompt + block[:n] + tail)
            assert off(np.array(target.logits(hidden)[0]), fresh[-len(tail) :]) <= 1e-5

    def test_rewind_equals_a_fresh_run(self, family: str) -> None:
        target, prompt, tail = tiny_target(family), tiny_prompt(96, 20, 6), tiny_prompt(96, 4, 7)
        cache = target.make_cache()
        target.forward([segment(prompt, cache)])
        cache.commit(len(prompt))
        for length in (17, 5, 0):
            assert cache.rewind(length)
            hidden, _ = target.forward([segment(tail, cache)])
            fresh = plain_logits(target, prompt[:length] + tail)
            assert off(np.array(target.logits(hidden)[0]), fresh[length:]) <= 1e-5

    def test_greedy_text_of_the_tiny_models_is_not_degenerate(self, family: str) -> None:
        for tied in (False, True):
            target = tiny_target(family, tie_word_embeddings=tied)
            text = checked_greedy(target, tiny_prompt(96, 5), 40)
            assert len(set(text)) >= 12
            assert plain_logits(target, text).std() >= 1.0

    def test_runs_in_another_thread_than_the_one_that_made_it(self, family: str) -> None:
        target, ids, seen = tiny_target(family), tiny_prompt(96, 8), []
        expected = plain_greedy(target, ids, 3)

        def run() -> None:
            seen.append(plain_greedy(target, ids, 3))

        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert seen == [expected, expected]

    @pytest.mark.parametrize("tap", [-1, 4])
    def test_taps_outside_the_layers_are_refused(self, family: str, tap: int) -> None:
        target = tiny_target(family)
        with pytest.raises(ValueError, match=f"tap {tap} "):
            target.forward([segment([1], target.make_cache())], [0, tap])


def test_drafters_borrow_the_embedding_and_the_bare_head() -> None:
    for tied in (False, True):
        target = tiny_target("llama", tie_word_embeddings=tied)
        weights = tiny_weights(tiny_config("llama", tie_word_embeddings=tied))
        table = weights["model.embed_tokens.weight"]
        assert off(np.array(target.embed(mx.array([[5, 7]]))[0]), table[[5, 7]]) == 0.0
        rows = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
        matrix = table if tied else weights["lm_head.weight"]
        assert off(np.array(target.head(mx.array(rows))), rows @ matrix.T) <= 1e-5
        assert off(np.array(target.logits(mx.array(rows))), rows @ matrix.T) <= 1e-5


REFUSED = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; use a model of one of llama, "),
    ({"hidden_size": None}, "no hidden_size;"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a number above zero;"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', not a whole number above zero;"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false;"),
    ({"rope_theta": None}, "no rope_theta;"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of its num_key_value_heads"),
    ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported;"),
    ({"rope_interleaved": True}, "rope_interleaved = True is not supported;"),
    ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window = True is not supp"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = 'sliding_attention'"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported;"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported;"),
    ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported; use a check"),
    ({"rope_scaling": {"type": "linear"}}, "rope scaling has no factor;"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1, not a positive numb"),
    ({"rope_scaling": "yarn"}, "rope_scaling is no object;"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "yarn"}},
        "rope_parameters say 'yarn' and its rope_scaling 'linear';",
    ),
    ({"rope_freq_factors": [1.0]}, "1 rope frequency factors for"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[s[:24] for _, s in REFUSED])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_unsupported_configs_are_refused_by_name(family: str, change: Any, sentence: str) -> None:
    config = {k: v for k, v in tiny_config(family, **change).items() if v is not None}
    with pytest.raises(CheckpointError) as caught:
        build_target(config)
    assert sentence in str(caught.value)


def test_qwen3_needs_its_head_dim() -> None:
    config = tiny_config("qwen3")
    del config["head_dim"]
    with pytest.raises(CheckpointError, match="no head_dim"):
        build_target(config)


def test_unknown_keys_are_named_and_known_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    build_target(tiny_config("llama", torch_dtype="bfloat16", pretraining_tp=1, is_llama=None))
    assert not caplog.records
    build_target(tiny_config("llama", swirl=2.0))
    assert "swirl" in caplog.text


def test_rope_parameters_replace_theta_and_scaling() -> None:
    """The nested form of transformers 5 means the same as the older flat form."""
    golden = Golden("llama_llama3")
    nested = {**golden.config.pop("rope_scaling"), "rope_theta": golden.config.pop("rope_theta")}
    target = target_of({**golden.config, "rope_parameters": nested})
    assert off(plain_logits(target, golden.ids), golden.logits) <= TOLERANCE


def test_frequency_factors_of_gguf_divide_the_frequencies() -> None:
    """The factors that llama3 scaling amounts to, given as a list, give the same logits."""
    golden = Golden("llama_llama3")
    plain = build_target({**golden.config, "rope_scaling": None})
    scaled = build_target(golden.config)

    def periods(target: Any) -> np.ndarray:
        return np.array(target.model.layers[0].self_attn.rope.periods)

    factors = (periods(scaled) / periods(plain)).tolist()
    assert max(factors) > 2 * min(factors)
    target = target_of({**golden.config, "rope_scaling": None, "rope_freq_factors": factors})
    assert off(plain_logits(target, golden.ids), golden.logits) <= TOLERANCE
