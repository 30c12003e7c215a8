"""The DFlash v1 drafter against goldens of the official torch classes, and its own promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_drafter as tiny
from mlx.utils import tree_flatten
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.cache.context import ContextCache
from dflash_mlx.draft.base import DraftSampling
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.errors import UsageError
from dflash_mlx.layers.rope import Rope

TOLERANCE = 1e-4
GOLDENS = mx.load(str(Path(__file__).parent / "goldens" / "drafters" / "draft_logits.safetensors"))


@pytest.fixture
def drafter_of(tmp_path: Path) -> Callable[..., DFlashDrafter]:
    def opened(variant: str = "full", bits: int | None = None, **overrides: Any) -> DFlashDrafter:
        config = tiny.drafter_config(variant, **overrides)
        folder = write_drafter(tmp_path, config, tiny.variant_seed(variant))
        target = BorrowedTarget()
        return open_drafter(folder, target, dtype=mx.float32, bits=bits, group_size=32)

    return opened


def features_of(drafter: DFlashDrafter, rows: int) -> mx.array:
    config = {
        "hidden_size": drafter.config.hidden_size,
        "dflash_config": {"target_layer_ids": drafter.taps},
    }
    return mx.array(tiny.context_features(config, rows))[None]


def replay(
    drafter: DFlashDrafter,
    *,
    swap_taps: bool = False,
    shift: int = 0,
    chunk: int | None = None,
) -> mx.array:
    """Logits of every proposal of the goldens' sequence: [proposals, block - 1, V]."""
    features = features_of(drafter, sum(tiny.CONTEXT_STEPS))
    if swap_taps:
        width = drafter.config.hidden_size
        first, second, rest = mx.split(features, [width, 2 * width], axis=-1)
        features = mx.concatenate([second, first, rest], axis=-1)
    cache = drafter.make_cache()
    out, start = [], 0
    for step, anchor in zip(tiny.CONTEXT_STEPS, tiny.anchors(), strict=True):
        for at in range(start, start + step, chunk or step):
            stop = min(at + (chunk or step), start + step)
            moved_observe(drafter, features[:, at:stop], cache, shift)
        start += step
        assert cache.length == start
        out.append(drafter.draft_logits(mx.array([anchor]), drafter.block_size - 1, cache))
        mx.eval(out[-1])
    return mx.stack(out)


def moved_observe(
    drafter: DFlashDrafter, features: mx.array, cache: ContextCache, shift: int
) -> None:
    """`observe`, with context keys rotated as if they stood `shift` positions further on."""
    if shift == 0:
        drafter.observe(features, cache)
        return
    true_rope = drafter.config.rope
    moved = Rope(np.array(true_rope.periods), true_rope.magnitude)
    rotate = moved.__call__
    drafter.config = replace(drafter.config, rope=lambda x, at: rotate(x, at + shift))
    drafter.observe(features, cache)
    drafter.config = replace(drafter.config, rope=true_rope)


def gap(variant: str, logits: mx.array) -> float:
    return mx.abs(logits - GOLDENS[variant]).max().item()


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_equal_the_official_classes(drafter_of: Any, variant: str) -> None:
    assert mx.std(GOLDENS[variant]).item() >= 1.0
    assert gap(variant, replay(drafter_of(variant))) <= TOLERANCE


@pytest.mark.parametrize("variant", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_context_may_arrive_in_chunks(drafter_of: Any, variant: str, chunk: int) -> None:
    assert gap(variant, replay(drafter_of(variant), chunk=chunk)) <= TOLERANCE


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "taps swapped": ("full", {}, {"swap_taps": True}),
    "context one position late": ("full", {}, {"shift": 1}),
    "context one position early": ("sliding", {}, {"shift": -1}),
    "eps": ("full", {"rms_norm_eps": 1e-6}, {}),
    "rope theta": ("full", {"rope_theta": 1500.0}, {}),
    "window + 1": ("sliding", {"sliding_window": 7}, {}),
    "window - 1": ("sliding", {"sliding_window": 5}, {}),
    "window + 1, bidirectional": ("sliding_bidirectional", {"sliding_window": 7}, {}),
    "window - 1, mixed layers": ("mixed", {"sliding_window": 5}, {}),
    "layer types rotated": (
        "mixed",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {},
    ),
    "causal sliding taken for bidirectional": ("sliding", {"is_causal": False}, {}),
    "bidirectional sliding taken for causal": ("sliding_bidirectional", {"is_causal": True}, {}),
    "bidirectional full taken for causal": ("full", {"is_causal": True}, {}),
    "causal full taken for bidirectional": ("causal", {"is_causal": False}, {}),
    "yarn taken for plain rope": ("yarn", {"rope_parameters": {"rope_theta": 1000.0}}, {}),
    "llama3 taken for plain rope": ("llama3", {"rope_scaling": None}, {}),
    "linear taken for plain rope": ("linear", {"rope_scaling": None}, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_shows(drafter_of: Any, fault: str) -> None:
    variant, overrides, how = FAULTS[fault]
    assert gap(variant, replay(drafter_of(variant, **overrides), **how)) > 20 * TOLERANCE


def test_missing_hidden_norm_shows(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    drafter.model.hidden_norm = nn.Identity()
    assert gap("full", replay(drafter)) > 20 * TOLERANCE


def test_missing_bias_shows(drafter_of: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        drafter = drafter_of("bias")
        projection = drafter.model.layers[1].self_attn[name]
        projection.bias = mx.zeros_like(projection.bias)
        assert gap("bias", replay(drafter)) > 20 * TOLERANCE, name


@pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier"])
def test_ignored_scale_shows(drafter_of: Any, key: str) -> None:
    nested = tiny.VARIANTS["scaled"]["dflash_config"] | {key: 1.0}
    assert gap("scaled", replay(drafter_of("scaled", dflash_config=nested))) > 20 * TOLERANCE


def test_ignored_soft_cap_shows(drafter_of: Any) -> None:
    nested = tiny.VARIANTS["scaled"]["dflash_config"] | {"final_logit_softcapping": 0}
    assert gap("scaled", replay(drafter_of("scaled", dflash_config=nested))) > 20 * TOLERANCE


@pytest.mark.parametrize("variant", ["full", "causal", "sliding", "sliding_bidirectional", "mixed"])
def test_fewer_drafts_are_the_first_of_a_whole_block(drafter_of: Any, variant: str) -> None:
    drafter = drafter_of(variant)
    cache = drafter.make_cache()
    drafter.observe(features_of(drafter, 20), cache)
    whole = drafter.draft_logits(mx.array([9]), 4, cache)
    for n in (1, 2, 3):
        fewer = drafter.draft_logits(mx.array([9]), n, cache)
        assert fewer.shape == (n, tiny.VOCAB)
        assert mx.abs(fewer - whole[:n]).max().item() <= 1e-5
        assert drafter._target.head_rows[-1] == n  # the head runs on the rows asked for only
    for n in (0, 5):
        with pytest.raises(ValueError, match="block of 5"):
            drafter.draft_logits(mx.array([9]), n, cache)


def test_greedy_proposal_is_the_argmax(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    cache = drafter.make_cache()
    drafter.observe(features_of(drafter, 13), cache)
    proposal = drafter.propose(mx.array([tiny.anchors()[0]]), 4, None, cache)
    assert proposal.tokens.dtype == mx.int32
    assert proposal.tokens.tolist() == mx.argmax(GOLDENS["full"][0], axis=-1).tolist()
    assert proposal.probs is None
    assert proposal.healthy.item() is True


def test_sampled_proposal_draws_each_row_from_its_filtered_probabilities(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    cache = drafter.make_cache()
    drafter.observe(features_of(drafter, 13), cache)

    def three_best(logits: mx.array, ids: mx.array | None = None) -> mx.array:
        floor = mx.sort(logits, axis=-1)[:, -3:-2]
        return mx.softmax(mx.where(logits >= floor, logits / 2.0, -mx.inf), axis=-1)

    draws = []
    for seed in range(150):
        sampling = DraftSampling(2.0, mx.random.key(seed), three_best)
        proposal = drafter.propose(mx.array([tiny.anchors()[0]]), 4, sampling, cache)
        draws.append(proposal.tokens)
    expected = np.array(three_best(GOLDENS["full"][0]))
    assert np.abs(np.array(proposal.probs) - expected).max() <= TOLERANCE
    tokens = np.array(mx.stack(draws))
    for row in range(4):
        seen = np.bincount(tokens[:, row], minlength=tiny.VOCAB) / len(tokens)
        assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected[row]))
        assert np.abs(seen - expected[row]).max() < 0.18  # over 4 standard deviations
    # Rows are drawn independently: equal ranks all along the block would be a shared draw.
    order = np.argsort(-expected, axis=-1)[:, :2]
    best = np.stack([tokens[:, row] == order[row, 0] for row in range(4)], axis=1)
    assert abs(np.corrcoef(best[:, 0], best[:, 1])[0, 1]) < 0.4


def test_nan_features_are_told(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    cache = drafter.make_cache()
    features = features_of(drafter, 6)
    features[0, 2, 5] = mx.nan
    drafter.observe(features, cache)
    assert drafter.propose(mx.array([9]), 3, None, cache).healthy.item() is False


def test_context_length_is_the_committed_length_and_memory_is_bounded(drafter_of: Any) -> None:
    drafter = drafter_of("sliding")
    cache = drafter.make_cache()
    features = features_of(drafter, 5)
    length, sizes = 0, []
    for cycle in range(200):
        rows = 1 + cycle * 7 % drafter.block_size
        drafter.observe(features[:, :rows], cache)
        length += rows
        mx.eval(drafter.propose(mx.array([cycle % 40]), 4, None, cache).tokens, cache.arrays())
        assert cache.length == length
        sizes.append(cache.nbytes)
    assert length > 500
    assert max(sizes) == sizes[0]


def test_proposing_leaves_the_context_alone(drafter_of: Any) -> None:
    drafter = drafter_of("mixed")
    cache = drafter.make_cache()
    drafter.observe(features_of(drafter, 9), cache)
    first = drafter.draft_logits(mx.array([9]), 4, cache)
    drafter.draft_logits(mx.array([30]), 4, cache)
    assert cache.length == 9
    assert mx.array_equal(first, drafter.draft_logits(mx.array([9]), 4, cache)).item()


@pytest.mark.parametrize("variant", ["full", "sliding"])
def test_rewound_context_drafts_as_a_fresh_one(drafter_of: Any, variant: str) -> None:
    drafter = drafter_of(variant)
    features = features_of(drafter, 40)
    cache, fresh = drafter.make_cache(), drafter.make_cache()
    drafter.observe(features[:, :40], cache)
    drafter.draft_logits(mx.array([9]), 4, cache)
    assert cache.rewind(23)
    drafter.observe(features[:, 23:26], cache)
    drafter.observe(features[:, :26], fresh)
    both = [drafter.draft_logits(mx.array([9]), 4, c) for c in (cache, fresh)]
    assert mx.abs(both[0] - both[1]).max().item() <= 1e-5


def test_long_chunk_projects_only_the_rows_that_stay(drafter_of: Any) -> None:
    drafter = drafter_of("sliding")
    seen: list[int] = []
    made = drafter._projections
    (whole,) = made.heads

    def counted(x: mx.array) -> mx.array:
        seen.append(x.shape[1])
        return whole.keys(x)

    made.heads[0] = made.whole = replace(whole, keys=counted)
    features = features_of(drafter, 300)
    cache, fresh = drafter.make_cache(), drafter.make_cache()
    drafter.observe(features, cache)
    assert max(seen) < 100
    for start in range(0, 300, 60):
        drafter.observe(features[:, start : start + 60], fresh)
    both = [drafter.draft_logits(mx.array([9]), 4, c) for c in (cache, fresh)]
    assert cache.length == fresh.length == 300
    assert mx.abs(both[0] - both[1]).max().item() <= 1e-5


def test_two_drafters_share_one_target(tmp_path: Path) -> None:
    target = BorrowedTarget()
    other_taps = tiny.drafter_config("full") | {
        "dflash_config": {"target_layer_ids": [0, 6], "mask_token_id": 5, "block_size": 4}
    }
    first = write_drafter(tmp_path / "a", tiny.drafter_config("full"), tiny.variant_seed("full"))
    second = write_drafter(tmp_path / "b", other_taps)
    drafters = [open_drafter(folder, target, dtype=mx.float32) for folder in (first, second)]
    assert [d.taps for d in drafters] == [(1, 3, 6), (0, 6)]
    caches = [d.make_cache() for d in drafters]
    for _ in range(3):
        for drafter, cache in zip(drafters, caches, strict=True):
            drafter.observe(features_of(drafter, 3), cache)
            mx.eval(drafter.propose(mx.array([7]), 3, None, cache).tokens)
    assert gap("full", replay(drafters[0])) <= TOLERANCE


def test_features_of_another_width_are_refused(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    with pytest.raises(ValueError, match="96"):
        drafter.observe(mx.zeros((1, 2, 64)), drafter.make_cache())


def test_joined_projections_hold_no_second_copy(drafter_of: Any) -> None:
    drafter = drafter_of("full")
    attention = drafter.model.layers[1].self_attn
    before = mx.get_active_memory()
    assert mx.array_equal(
        drafter._projections.whole.keys.weight[32:64], attention.k_proj.weight
    ).item()
    assert mx.get_active_memory() - before < attention.k_proj.weight.nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_drafter_stays_near(drafter_of: Any, bits: int) -> None:
    drafter = drafter_of("full", bits=bits, intermediate_size=64)
    plain = drafter_of("full", intermediate_size=64)
    names = {name for name, _ in tree_flatten(drafter.model.parameters())}
    assert {"fc.scales", "layers.2.self_attn.v_proj.scales", "layers.0.mlp.up_proj.scales"} <= names
    both = [replay(d) for d in (drafter, plain)]
    error = mx.abs(both[0] - both[1]).mean().item()
    assert 1e-4 < error < {4: 1.0, 8: 0.1}[bits]


def test_quantizing_rows_that_do_not_divide_is_refused(drafter_of: Any) -> None:
    with pytest.raises(UsageError, match=r"down_proj has 40 inputs.*group size 32"):
        drafter_of("full", bits=4)
    with pytest.raises(UsageError, match="3 bits"):
        drafter_of("full", bits=3)
