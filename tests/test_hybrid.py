"""Hybrids against transformers, with planted faults; their segments, rollback and sessions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_hybrid
from oracle import OracleDrafter, plain_features, plain_forward, plain_logits
from tiny import target_of, target_with, tiny_prompt, tiny_target, tiny_weights

from dflash_mlx.cache import DeltaRows, KVCache, RecurrentCache
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.kernels import gated_delta
from dflash_mlx.layers.gated_attention import GatedAttention
from dflash_mlx.models import FAMILIES, build_target, hybrid
from dflash_mlx.segment import Segment

FOLDER = Path(__file__).parent / "goldens" / "hybrid"
NAMES = sorted(file.stem for file in FOLDER.glob("*.npz"))
TOLERANCE = 1e-4
TEETH = 20 * TOLERANCE
CHUNK = 16
TAPS = (0, 1)


class Golden:
    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as stored:
            self.config: dict[str, Any] = json.loads(str(stored["config"]))
            self.ids: list[int] = stored["ids"].tolist()
            self.taps: list[int] = stored["taps"].tolist()
            self.logits: np.ndarray = stored["logits"]
            self.features: np.ndarray = stored["features"]

    def off(self, target: Any = None) -> float:
        """How far a target's logits are from transformers'."""
        return off(plain_logits(target or target_of(self.config), self.ids), self.logits)


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def segment(ids: list[int], cache: Any) -> Segment:
    return Segment(mx.array(ids, dtype=mx.int32), cache)


def in_parts(target: Any, ids: list[int], sizes: list[int], taps: Any) -> tuple[Any, Any]:
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


def test_goldens_cover_every_kind_and_have_spread_logits() -> None:
    configs = [Golden(name).config for name in NAMES]
    assert {c["model_type"] for c in configs} == tiny_hybrid.MODEL_TYPES
    assert FAMILIES.keys() >= tiny_hybrid.FAMILIES
    grouped = {c["linear_num_value_heads"] > c["linear_num_key_heads"] for c in configs}
    assert grouped == {c["tie_word_embeddings"] for c in configs} == {True, False}
    assert all(Golden(name).logits.std() >= 1.0 for name in NAMES)


@pytest.mark.parametrize("sizes", [[20], [7, 1, 12], [1] * 20], ids=["whole", "chunks", "steps"])
def test_equals_transformers(golden: Golden, sizes: list[int]) -> None:
    logits, features = in_parts(target_of(golden.config), golden.ids, sizes, golden.taps)
    assert off(logits, golden.logits) <= TOLERANCE
    assert off(features, golden.features) <= TOLERANCE


def test_layers_are_of_the_kinds_the_config_says(golden: Golden) -> None:
    kinds = [type(layer) for layer in target_of(golden.config).make_cache()]
    linear = [tiny_hybrid.is_linear(golden.config, i) for i in range(len(kinds))]
    assert kinds == [RecurrentCache if is_linear else KVCache for is_linear in linear]


class TestFaultsAreSeen:
    @pytest.mark.parametrize("name", ["qwen3_5_tied", "qwen3_5_moe", "qwen3_next_moe"])
    def test_in_any_tensor(self, name: str) -> None:
        """A neutral vector or a shifted matrix of the first or last layer shows in the logits."""
        golden = Golden(name)
        weights, seen = tiny_weights(golden.config), 0
        for name, array in weights.items():
            if ".layers.1." in name or ".layers.2." in name:
                continue
            if array.ndim == 1:
                neutral = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
                fault = np.full_like(array, neutral)
            else:  # taps of a convolution by one; rows or experts of anything else
                fault = np.roll(array, 1, axis=2 if "conv1d" in name else 0)
                if name.endswith("shared_expert_gate.weight"):  # one row
                    fault = -array
            assert golden.off(target_with(golden.config, {**weights, name: fault})) > TEETH, name
            seen += 1
        assert seen >= 24

    def test_in_the_sign_of_the_decay(self, golden: Golden) -> None:
        weights = tiny_weights(golden.config)
        turned = {k: -w if k.endswith("A_log") else w for k, w in weights.items()}
        assert golden.off(target_with(golden.config, turned)) > TEETH

    def test_in_settings(self, golden: Golden) -> None:
        config, weights = golden.config, tiny_weights(golden.config)
        rope = dict(config.get("rope_parameters") or {})
        flat = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if k in config}
        rope = {**flat, **rope}
        faults: list[dict[str, Any]] = [
            {"rms_norm_eps": 0.9 * config["rms_norm_eps"]},
            {"rope_parameters": {**rope, "rope_theta": 1.5 * rope["rope_theta"]}},
            {"rope_parameters": {**rope, "partial_rotary_factor": 0.25}},
        ]
        if "factor" in rope:
            faults.append({"rope_parameters": {**rope, "attention_factor": 1.0}})
        for fault in faults:
            target = target_with({**config, **fault}, weights)
            assert golden.off(target) > TEETH, fault

    def test_in_norms_taken_as_factors(self, golden: Golden, monkeypatch: Any) -> None:
        monkeypatch.setattr(hybrid, "_CENTRED_NORMS", (".input_layernorm.weight",))
        assert golden.off() > TEETH

    def test_in_a_missing_output_gate(self, golden: Golden, monkeypatch: Any) -> None:
        monkeypatch.setattr(GatedAttention, "__call__", _ungated)
        assert golden.off() > TEETH

    def test_in_the_grouping_of_heads(self, golden: Golden, monkeypatch: Any) -> None:
        monkeypatch.setattr(gated_delta, "_operations", _tiled)
        grouped = golden.config["linear_num_value_heads"] > golden.config["linear_num_key_heads"]
        assert (golden.off() > TEETH) == grouped

    def test_in_a_state_left_behind(self, golden: Golden, monkeypatch: Any) -> None:
        """The teeth of rollback: a commit that keeps the end state of all rows is seen."""
        monkeypatch.setattr(DeltaRows, "first", lambda rows, n: rows)
        target, cache = target_of(golden.config), None
        cache = target.make_cache()
        target.forward([segment(golden.ids[:9], cache)])
        cache.commit(6)
        hidden, _ = target.forward([segment(golden.ids[6:], cache)])
        assert off(np.array(target.logits(hidden)[0]), golden.logits[6:]) > TEETH


def _ungated(self: GatedAttention, x: mx.array, segments: Any, caches: Any) -> mx.array:
    projected = self.q_proj(x).reshape(1, x.shape[1], self.heads, -1)
    return self.o_proj(self.attend(x, mx.split(projected, 2, axis=-1)[0], segments, caches))


def _tiled(rows: DeltaRows, state: mx.array | None) -> Any:
    """Value head h reads key head h mod Hk instead of h // (Hv / Hk)."""
    times = rows.values.shape[2] // rows.keys.shape[2]
    queries = mx.concatenate([rows.queries] * times, axis=2)
    keys = mx.concatenate([rows.keys] * times, axis=2)
    return mx.fast.gated_delta_update(queries, keys, *rows[2:], initial_state=state)


@pytest.fixture(scope="module", params=sorted(tiny_hybrid.VARIANTS))
def target(request: pytest.FixtureRequest) -> Any:
    """One layer of each kind."""
    return tiny_target(request.param, num_hidden_layers=2)


def test_two_segments_equal_two_runs(target: Any) -> None:
    a, b = tiny_prompt(96, 9, 1), tiny_prompt(96, 30, 2)
    cache_a, cache_b = target.make_cache(), target.make_cache()
    seen_a, seen_b = [], []
    # Prefill of both, then blocks side by side of which a part is kept, then the rest.
    parts = [((0, 4, 4), (0, 20, 20)), ((4, 8, 1), (20, 27, 5)), ((5, 9, 4), (25, 30, 5))]
    for (a0, a1, keep_a), (b0, b1, keep_b) in parts:
        segments = [segment(a[a0:a1], cache_a), segment(b[b0:b1], cache_b)]
        hidden, features = target.forward(segments, TAPS)
        rows = np.concatenate([np.array(target.logits(hidden)[0]), np.array(features[0])], -1)
        seen_a.append(rows[:keep_a])
        seen_b.append(rows[a1 - a0 :][:keep_b])
        cache_a.commit(keep_a)
        cache_b.commit(keep_b)
    for ids, seen in ((a, seen_a), (b, seen_b)):
        alone = np.concatenate(plain_forward(target, ids, TAPS), axis=-1)
        assert off(np.concatenate(seen), alone) == 0.0


def test_commit_of_any_count_equals_a_fresh_run_to_the_bit(target: Any) -> None:
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
        assert off(np.array(target.logits(hidden)[0]), fresh[-len(tail) :]) == 0.0


def test_chunked_prefill_equals_whole_and_rows_never_see_later_ones(target: Any) -> None:
    ids = tiny_prompt(96, 150)
    logits, features = plain_forward(target, ids, TAPS)
    parts = in_parts(target, ids, [64, 64, 21, 1], TAPS)
    assert off(parts[0], logits) == off(parts[1], features) == 0.0
    changed = [*ids[:-1], (ids[-1] + 1) % 96]
    assert off(plain_logits(target, changed)[:-1], logits[:-1]) == 0.0


def decode(session: Session, prompt: list[int], n: int) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    steps = list(session.run(prompt, SamplingParams(), n, (), stats))
    return [token for step in steps for token in step], stats


def greedy(target: Any, prompt: list[int], n: int) -> list[int]:
    """The n greedy tokens: found step by step, judged by one forward over all without a cache."""
    tokens, _ = decode(Session(target, None, nullcontext, prefill_chunk=CHUNK), prompt, n)
    logits = plain_logits(target, prompt + tokens)
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == tokens
    assert len(set(tokens)) >= n // 3
    return tokens


def oracle(target: Any, prompt: list[int], text: list[int], plan: list[int], **kw: Any) -> Any:
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    return OracleDrafter(len(prompt), text, block_size=8, taps=TAPS, plan=plan, **sizes, **kw)


def test_drafts_never_change_the_text_whatever_is_accepted(target: Any) -> None:
    """Brute-force greedy text with every accept length of a block, one at a time."""
    prompt, n = tiny_prompt(96, CHUNK + 1), 24
    truth = greedy(target, prompt, n)
    features = plain_features(target, prompt + truth, TAPS)
    for accepts in range(8):
        drafter = oracle(target, prompt, truth, [accepts], features=features)
        session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
        tokens, stats = decode(session, prompt, n)
        assert tokens == truth, accepts
        kept, left = [], n - 1  # accepted by cycle; the last token is a plain step's
        while left > 1:
            kept.append(min(accepts, 7, left - 1))
            left -= kept[-1] + 1
        assert stats.cycles == len(kept) > 1
        assert stats.accepted == sum(kept) == drafter.planned_accepts
        assert session.cache.length == len(session.ids) == len(prompt) + n - 1


def test_a_second_turn_feeds_only_the_new_tokens(target: Any) -> None:
    prompt = tiny_prompt(96, 20)
    truth = greedy(target, prompt, 30)
    drafter = oracle(target, prompt, truth, [2], check_growth=False)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    decode(session, prompt, 12)
    tokens, stats = decode(session, prompt + truth[:16], 10)
    assert tokens == truth[16:26]
    assert stats.cached_tokens == len(prompt) + 11
    assert stats.cycles > 0


def test_a_changed_history_is_prefilled_afresh(target: Any) -> None:
    prompt = tiny_prompt(96, 20)
    truth = greedy(target, prompt, 20)
    drafter = oracle(target, prompt, truth, [2], check_growth=False)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    decode(session, prompt, 12)
    other = prompt[:15] + tiny_prompt(96, 9, seed=5)
    wanted = greedy(target, other, 8)
    session.drafter = oracle(target, other, wanted, [1])
    tokens, stats = decode(session, other, 8)
    assert tokens == wanted
    assert stats.cached_tokens == 0


def test_a_stopped_run_keeps_the_sequence_usable(target: Any) -> None:
    prompt = tiny_prompt(96, 20)
    truth = greedy(target, prompt, 30)
    for drafter in (None, oracle(target, prompt, truth, [2], check_growth=False)):
        session = Session(target, drafter, nullcontext)
        run = session.run(prompt, SamplingParams(), 30, (), GenerationStats())
        got = [t for _, step in zip(range(3), run, strict=False) for t in step]
        run.close()
        session.time_plain_step()
        tokens, stats = decode(session, prompt + got, 6)
        assert tokens == truth[len(got) : len(got) + 6]
        assert stats.cached_tokens == len(prompt) + len(got) - 1


def test_a_target_is_built_in_mlx_s_layout() -> None:
    layers = build_target(tiny_hybrid.hybrid_config("qwen3_5")).model.layers
    assert layers[0].linear_attn.conv1d.weight.shape == (2 * 16 + 72, 4, 1)
    assert layers[1].self_attn.q_proj.weight.shape == (2 * 64, 48)
