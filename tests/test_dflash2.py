"""The DFlash 2 drafter against goldens of the official torch class, in the loop, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_drafter as tiny
from mlx.utils import tree_flatten
from oracle import plain_greedy
from tiny import tiny_prompt, tiny_target
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.accept import accept_sampled
from dflash_mlx.decode.sampling import SamplingParams, probabilities
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft import dflash2
from dflash_mlx.draft.base import DraftSampling
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash2 import CandidateSelector, DFlash2Drafter, Walk

TOLERANCE = 1e-4
HEAT = 0.7  # temperature of the goldens' sampled drafts
DRAWS = 20_000
GOLDENS = mx.load(str(Path(__file__).parent / "goldens" / "drafters" / "dflash2.safetensors"))


@pytest.fixture
def drafter_of(tmp_path: Path) -> Callable[..., DFlash2Drafter]:
    def opened(variant: str, bits: int | None = None, **overrides: Any) -> DFlash2Drafter:
        config = tiny.drafter_config(variant, **overrides)
        folder = write_drafter(tmp_path, config, tiny.variant_seed(variant))
        drafter = open_drafter(folder, BorrowedTarget(), dtype=mx.float32, bits=bits, group_size=32)
        assert isinstance(drafter, DFlash2Drafter)
        return drafter

    return opened


def second_best(scores: mx.array, _: int) -> mx.array:
    return mx.argsort(-scores)[1]


def best(scores: mx.array, _: int) -> mx.array:
    return mx.argmax(scores)


def replay(drafter: DFlash2Drafter) -> tuple[mx.array, list[Walk], list[Walk]]:
    """Of every proposal of the goldens' sequence: logits, the greedy walk, the second-best walk."""
    features = mx.array(tiny.context_features(tiny.drafter_config(), sum(tiny.CONTEXT_STEPS)))[None]
    cache, start, logits = drafter.make_cache(), 0, []
    walks: tuple[list[Walk], list[Walk]] = ([], [])
    for step, anchor in zip(tiny.CONTEXT_STEPS, tiny.anchors(), strict=True):
        drafter.observe(features[:, start : start + step], cache)
        start += step
        first = mx.array([anchor])
        rows = drafter._rows(first, tiny.BLOCK - 1, cache)
        logits.append(drafter._logits(rows))
        for walked, choose in zip(walks, (best, second_best), strict=True):
            selector = drafter.model.candidate_selector
            walked.append(selector.walk(rows, logits[-1], first, choose))
    return mx.stack(logits), *walks


def logit_gap(variant: str, drafter: DFlash2Drafter) -> float:
    return mx.abs(replay(drafter)[0] - GOLDENS[f"{variant}.logits"]).max().item()


def path_errors(variant: str, drafter: DFlash2Drafter) -> int:
    """How many drafts differ from the official ones, greedy and second-best walk together."""
    wrong = 0
    for name, walked in zip(("path", "other_path"), replay(drafter)[1:], strict=True):
        tokens = mx.stack([walk.tokens for walk in walked])
        wrong += (tokens != GOLDENS[f"{variant}.{name}"]).sum().item()
    return wrong


def on_vocabulary(candidates: mx.array, probs: mx.array) -> mx.array:
    zeros = mx.zeros((*probs.shape[:-1], tiny.VOCAB))
    return mx.put_along_axis(zeros, candidates, probs, axis=-1)


def q_gap(variant: str, drafter: DFlash2Drafter, heat: float = HEAT) -> float:
    walked = replay(drafter)[2]
    probs = mx.softmax(mx.stack([w.scores for w in walked]) / heat, axis=-1)
    ours = on_vocabulary(mx.stack([w.candidates for w in walked]), probs)
    wanted = on_vocabulary(GOLDENS[f"{variant}.candidates"], GOLDENS[f"{variant}.q"])
    return mx.abs(ours - wanted).max().item()


@pytest.mark.parametrize("variant", tiny.DFLASH2_VARIANTS)
def test_drafts_equal_the_official_class(drafter_of: Any, variant: str) -> None:
    drafter = drafter_of(variant)
    assert logit_gap(variant, drafter) <= TOLERANCE
    assert path_errors(variant, drafter) == 0
    assert q_gap(variant, drafter) <= TOLERANCE
    assert q_gap(variant, drafter, heat=1.0) > 20 * TOLERANCE


def flipped_taps(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel = conv.base_kernel[:, ::-1]
            weight = conv.kernel_projection.weight
            split = weight.reshape(2, conv.taps, conv.groups, -1)
            conv.kernel_projection.weight = split[:, ::-1].reshape(weight.shape)


def swapped_sides(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        weight = layer.mlp_conv.kernel_projection.weight
        layer.mlp_conv.kernel_projection.weight = mx.concatenate(mx.split(weight, 2)[::-1])


def swapped_base_sides(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        layer.attention_conv.base_kernel = layer.attention_conv.base_kernel[::-1]


def interleaved_groups(drafter: DFlash2Drafter) -> None:
    """A channel's group is channel % groups instead of channel // group size."""
    for layer in drafter.model.layers:
        conv = layer.attention_conv
        weight = conv.kernel_projection.weight

        def coefficients(x: mx.array, conv=conv, weight=weight) -> tuple[mx.array, mx.array]:
            dynamic = (x[0] @ weight.T).reshape(x.shape[1], 2, conv.taps, conv.groups)
            both = conv.base_kernel + mx.tile(dynamic, (1, 1, 1, x.shape[2] // conv.groups))
            return both[:, 0], both[:, 1]

        conv.coefficients = coefficients


def from_the_convolved_input(drafter: DFlash2Drafter) -> None:
    """The output side's coefficients are computed from the input side's result."""
    for layer in drafter.model.layers:
        conv = layer.mlp_conv
        true = conv.coefficients

        def coefficients(x: mx.array, true=true) -> tuple[mx.array, mx.array]:
            before = true(x)[0]
            return before, true(dflash2.convolve(x, before))[1]

        conv.coefficients = coefficients


def coefficients_of_the_input_row(drafter: DFlash2Drafter) -> None:
    """Row t - k brings the coefficients of tap k, not the row t that is computed."""
    for layer in drafter.model.layers:
        conv = layer.attention_conv
        true = conv.coefficients

        def coefficients(x: mx.array, true=true) -> tuple[mx.array, ...]:
            return tuple(
                mx.concatenate([c[:, :1], mx.roll(c[:, 1:], 1, axis=0)], axis=1) for c in true(x)
            )

        conv.coefficients = coefficients


@pytest.mark.parametrize(
    "fault",
    [
        flipped_taps,
        swapped_sides,
        swapped_base_sides,
        interleaved_groups,
        from_the_convolved_input,
        coefficients_of_the_input_row,
    ],
)
@pytest.mark.parametrize("variant", ["second", "second_three_taps"])
def test_planted_fault_of_the_convolutions_shows(drafter_of: Any, variant: str, fault: Any) -> None:
    drafter = drafter_of(variant)
    fault(drafter)
    assert logit_gap(variant, drafter) > 20 * TOLERANCE


def test_planted_fault_of_the_selector_shows(drafter_of: Any) -> None:
    drafter = drafter_of("second")
    selector = drafter.model.candidate_selector
    predecessor, successor = selector.predecessor_codebook, selector.successor_codebook
    selector.predecessor_codebook, selector.successor_codebook = successor, predecessor
    assert path_errors("second", drafter) > 10
    assert q_gap("second", drafter) > 20 * TOLERANCE
    selector.predecessor_codebook, selector.successor_codebook = predecessor, successor
    assert path_errors("second", drafter) == 0
    true_walk = selector.walk

    def from_nothing(rows: Any, logits: Any, anchor: Any, choose: Any) -> Walk:
        return true_walk(rows, logits, mx.array([0]), choose)

    def always_the_anchor(rows: Any, logits: Any, anchor: Any, choose: Any) -> Walk:
        parts = [
            true_walk(rows[:, i : i + 1], logits[i : i + 1], anchor, choose)
            for i in range(logits.shape[0])
        ]
        return Walk(
            *(mx.concatenate(column) for column in list(zip(*parts, strict=True))[:3]), None
        )

    for wrong in (from_nothing, always_the_anchor):
        selector.walk = wrong
        assert path_errors("second", drafter) > 4, wrong
        assert q_gap("second", drafter) > 20 * TOLERANCE, wrong


def test_released_shape_of_a_block(drafter_of: Any) -> None:
    """Sliding layers that see the whole block, and drafts of fewer rows equal the first ones."""
    drafter = drafter_of("second")
    assert drafter.config.windows == (6,) * 3
    assert drafter.config.causal == (False,) * 3
    cache = drafter.make_cache()
    drafter.observe(mx.array(tiny.context_features(tiny.drafter_config(), 20))[None], cache)
    whole = drafter.propose(mx.array([9]), 4, None, cache)
    assert whole.tokens.dtype == mx.int32
    assert (whole.probs, whole.candidates) == (None, None)
    for n in (1, 2, 3):
        fewer = drafter.propose(mx.array([9]), n, None, cache)
        assert fewer.tokens.tolist() == whole.tokens.tolist()[:n]
        assert drafter._target.head_rows[-1] == n


def test_codebooks_and_convolutions_are_never_quantized(drafter_of: Any) -> None:
    drafter = drafter_of("second", bits=8, intermediate_size=64)
    names = {name for name, _ in tree_flatten(drafter.model.parameters())}
    assert {"fc.scales", "layers.2.self_attn.v_proj.scales"} <= names
    assert not [n for n in names if "scales" in n and ("conv" in n or "selector" in n)]
    assert "candidate_selector.predecessor_codebook" in names
    assert drafter.model.candidate_selector.hidden_projection.weight.dtype == mx.float32


@pytest.mark.parametrize("place", ["features", "selector"])
def test_nan_is_told(drafter_of: Any, place: str) -> None:
    drafter = drafter_of("second")
    features = mx.array(tiny.context_features(tiny.drafter_config(), 6))[None]
    if place == "features":
        features[0, 2, 5] = mx.nan
    else:
        drafter.model.candidate_selector.hidden_projection.weight[1, 1] = mx.nan
    cache = drafter.make_cache()
    drafter.observe(features, cache)
    sampling = DraftSampling(1.0, mx.random.key(0), lambda logits: logits)
    for settings in (None, sampling):
        assert drafter.propose(mx.array([9]), 3, settings, cache).healthy.item() is False


def test_drafts_are_drawn_from_the_stated_probabilities(drafter_of: Any) -> None:
    """Also that the target's other filters are not asked."""
    drafter = drafter_of("second")
    cache = drafter.make_cache()
    drafter.observe(mx.array(tiny.context_features(tiny.drafter_config(), 13))[None], cache)
    rows = drafter._rows(mx.array([9]), 2, cache)
    logits = drafter._logits(rows)
    selector = drafter.model.candidate_selector

    def drawn(key: mx.array) -> tuple[mx.array, ...]:
        sampling = DraftSampling(HEAT, key, None)  # type: ignore[arg-type]
        proposal = selector.propose(rows, logits, mx.array([9]), sampling)
        return proposal.tokens, proposal.probs, proposal.candidates

    keys = mx.random.split(mx.random.key(7), DRAWS)
    tokens, probs, candidates = (np.array(a) for a in mx.vmap(drawn)(keys))
    assert np.abs(probs.sum(-1) - 1).max() < 1e-5
    assert (np.sort(candidates[0], -1) == np.sort(np.array(mx.argsort(-logits)[:, :6]), -1)).all()
    for row in range(2):
        # Row 1's q depends on row 0's draft: every token has the mean of the stated probabilities.
        expected = np.zeros(tiny.VOCAB)
        np.add.at(expected, candidates[:, row], probs[:, row])
        seen = np.bincount(tokens[:, row], minlength=tiny.VOCAB)
        live = expected > 5
        statistic = ((seen - expected)[live] ** 2 / expected[live]).sum()
        assert statistic < 22.46  # 0.1 % point for 6 degrees of freedom, an upper bound of ours


VOCAB = 8
TABLE = np.random.default_rng(2).standard_normal((VOCAB, VOCAB)) * 0.9
#: 0.1 % point of chi-square by degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def chi_square(tokens: Any, p: np.ndarray) -> tuple[float, int]:
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), "a token of probability 0 was drawn"
    live = p > 0
    expected = p[live] * len(tokens)
    return float(((counts[live] - expected) ** 2 / expected).sum()), int(live.sum()) - 1


@pytest.mark.parametrize("kind", ["near", "far"])
@pytest.mark.parametrize("top_p", [1.0, 0.85])
def test_distribution_with_candidates(kind: str, top_p: float) -> None:
    """20,000 blocks: the first token follows p behind the anchor, the second p behind the first."""
    params = SamplingParams(temperature=0.8, top_p=top_p)
    rng = np.random.default_rng(4)
    n, rank, anchor = 3, 5, 2
    selector = CandidateSelector(4, VOCAB, rank, 4)
    selector.predecessor_codebook = mx.array(rng.standard_normal((VOCAB, rank)), mx.float32)
    selector.successor_codebook = mx.array(rng.standard_normal((VOCAB, rank)), mx.float32)
    rows = mx.array(rng.standard_normal((1, n, 4)), mx.float32)
    # The far drafter prefers what the target does not.
    unary = mx.array(TABLE.mean(0) * (1.0 if kind == "near" else -2.0), mx.float32)
    logits = mx.broadcast_to(unary, (n, VOCAB)) + 0.1 * mx.arange(n)[:, None]
    table = probabilities(mx.array(TABLE, mx.float32), params)

    def cycle(key: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        draft_key, accept_key = mx.random.split(key)
        sampling = DraftSampling(params.temperature, draft_key, None)  # type: ignore[arg-type]
        proposal = selector.propose(rows, logits, mx.array([anchor]), sampling)
        target_rows = table[mx.concatenate([mx.array([anchor]), proposal.tokens])]
        verdict = accept_sampled(proposal, target_rows, accept_key)
        return verdict.accepted, verdict.tokens, proposal.tokens

    accepts, texts, drafts = (
        np.array(a) for a in mx.vmap(cycle)(mx.random.split(mx.random.key(11), DRAWS))
    )
    p = np.array(table)
    statistic, freedom = chi_square(texts[:, 0], p[anchor])
    assert statistic < CHI_SQUARE[freedom]
    after = texts[accepts >= 1]
    for first in range(VOCAB):
        second = after[after[:, 0] == first][:, 1]
        if len(second) >= 400:
            statistic, freedom = chi_square(second, p[first])
            assert statistic < CHI_SQUARE[freedom]
    assert 0.02 < accepts.mean() / n < 0.9
    # The test has teeth: the drafts themselves do not have the target's distribution.
    counts = np.bincount(drafts[:, 0], minlength=VOCAB)
    expected = p[anchor] * DRAWS
    assert ((counts - expected) ** 2 / (expected + 1e-9)).sum() > 10 * CHI_SQUARE[7]


class MarkovTarget:
    """A target whose next-token logits depend on the last token only, with features to draft by."""

    num_layers, hidden_size, vocab_size, context_length = 7, 32, VOCAB, 10**6
    dtype = mx.float32

    def __init__(self) -> None:
        self.table = mx.array(TABLE, mx.float32)
        embedding, head = tiny.target_tables(32, VOCAB)
        self.embedding, self.weight = mx.array(embedding), mx.array(head)

    def make_cache(self) -> CacheStack:
        return CacheStack([])

    def forward(self, segments: Any, taps: Any = ()) -> tuple[mx.array, mx.array | None]:
        ids = segments[0].ids
        hidden = self.embedding[ids][None]
        features = mx.concatenate([hidden] * len(taps), axis=-1) if taps else None
        return self.table[ids][None], features

    def logits(self, rows: mx.array) -> mx.array:
        return rows

    def embed(self, ids: mx.array) -> mx.array:
        return self.embedding[ids]

    def head(self, rows: mx.array) -> mx.array:
        return rows @ self.weight.T


def test_whole_loop_has_the_targets_transitions(tmp_path: Path) -> None:
    """A real drafter in the real loop: what follows each token has the table's distribution."""
    nested = tiny.drafter_config("second")["dflash_config"] | {"selector_top_k": 3}
    one_layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    config = tiny.drafter_config("second", vocab_size=VOCAB, dflash_config=nested, **one_layer)
    target = MarkovTarget()
    drafter = open_drafter(write_drafter(tmp_path, config, 3), target, dtype=mx.float32)
    session, stats = Session(target, drafter, nullcontext), GenerationStats()
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    text = [t for step in session.run([1, 2, 3], params, 700, (), stats) for t in step]
    assert len(text) == 700
    assert 0 < stats.accepted < stats.drafted
    p = np.array(probabilities(target.table, params))
    total, freedom = 0.0, 0
    for last in range(VOCAB):
        after = [b for a, b in pairwise(text) if a == last]
        if len(after) >= 60:
            statistic, f = chi_square(after, p[last])
            total, freedom = total + statistic, freedom + f
    assert freedom >= 15
    # Wilson and Hilferty's approximation of the 0.1 % point
    assert total < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("variant", tiny.DFLASH2_VARIANTS)
def test_lossless_in_the_loop(tmp_path: Path, variant: str) -> None:
    target = tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=7)
    folder = write_drafter(tmp_path, tiny.drafter_config(variant), tiny.variant_seed(variant))
    drafter = open_drafter(folder, target, dtype=mx.float32)
    prompt, stats = tiny_prompt(48, 19), GenerationStats()
    session = Session(target, drafter, nullcontext, prefill_chunk=8)
    steps = list(session.run(prompt, SamplingParams(), 24, (), stats))
    assert [t for step in steps for t in step] == plain_greedy(target, prompt, 24)
    assert stats.cycles > 5
    assert stats.drafted > 20
    assert session.cache.length == session.draft_cache.length == len(prompt) + 23
