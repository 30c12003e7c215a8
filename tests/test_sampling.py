"""Sampling has the target's own filtered distribution, whatever the drafter proposes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.accept import accept_greedy, accept_sampled
from dflash_mlx.decode.sampling import (
    LEAST_TEMPERATURE,
    History,
    SamplingParams,
    draw,
    penalise,
    probabilities,
)
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Proposal
from dflash_mlx.errors import UsageError
from dflash_mlx.features import Features

VOCAB = 7
DRAWS = 20_000
#: 0.1 % point of chi-square by degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}
LOGITS = np.array([2.0, 1.1, 0.4, 0.0, -0.7, -1.5, 1.1])
FILTERS = {
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.6},
    "all": {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
    },
}
SEEN = np.array([True, False, False, True, True, False, False])


def reference(logits: np.ndarray, params: SamplingParams, seen: np.ndarray | None) -> np.ndarray:
    """The filtered distribution of one row, written from its definition in float64."""
    row = logits.astype(np.float64)
    if seen is not None:
        r = params.repetition_penalty
        row = np.where(seen, np.where(row > 0, row / r, row * r), row)
    row = row / params.temperature
    if 0 < params.top_k < len(row):
        row[np.argsort(-row, kind="stable")[params.top_k :]] = -np.inf
    p = np.exp(row - row.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    mass = 0.0
    for rank, token in enumerate(order):
        if rank and mass >= params.top_p:
            p[order[rank:]] = 0
            break
        mass += p[token]
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def chi_square(tokens: Sequence[int], p: np.ndarray) -> tuple[float, int]:
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), "a token of probability 0 was drawn"
    live = p > 0
    expected = p[live] * len(tokens)
    return float(((counts[live] - expected) ** 2 / expected).sum()), int(live.sum()) - 1


def filtered(params: SamplingParams, logits: mx.array) -> mx.array:
    if params.repetition_penalty != 1:
        seen = mx.array(SEEN)[None]
        logits = penalise(logits, seen, params.repetition_penalty)
    return probabilities(logits, params)


@pytest.mark.parametrize("name", FILTERS)
def test_probabilities_equal_their_definition(name):
    params = SamplingParams(**FILTERS[name])
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, VOCAB)).astype(np.float32) * 2
    seen = SEEN if params.repetition_penalty != 1 else None
    wanted = np.stack([reference(row, params, seen) for row in rows])
    np.testing.assert_allclose(np.array(filtered(params, mx.array(rows))), wanted, atol=1e-6)


@pytest.mark.parametrize("drafter", ["good", "bad"])
@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name, drafter):
    """20,000 emitted tokens of rejection sampling follow p; a good and a bad drafter differ only
    in how many drafts are accepted."""
    params = SamplingParams(**FILTERS[name])
    seen = SEEN if params.repetition_penalty != 1 else None
    p = reference(LOGITS, params, seen)
    # The bad drafter likes what the target does not, and never proposes token 0.
    bad = np.where(np.arange(VOCAB) == 0, -30, -LOGITS)
    n = 3
    q_row = filtered(params, mx.array(LOGITS * 0.97 if drafter == "good" else bad)[None])
    q, rows = (
        mx.repeat(q_row, n, axis=0),
        mx.repeat(filtered(params, mx.array(LOGITS)[None]), n + 1, axis=0),
    )

    def cycle(key):
        draft_key, accept_key = mx.random.split(key)
        verdict = accept_sampled(Proposal(draw(q, draft_key), q, mx.array(True)), rows, accept_key)
        return verdict.accepted, verdict.tokens

    accepts, texts = mx.vmap(cycle)(mx.random.split(mx.random.key(11), DRAWS))
    accepts, texts = np.array(accepts), np.array(texts)
    # The first tokens of 20,000 blocks, and as many tokens of the blocks strung together.
    emitted = np.concatenate([row[: a + 1] for a, row in zip(accepts, texts, strict=True)])
    for tokens in (texts[:, 0], emitted[:DRAWS]):
        statistic, freedom = chi_square(tokens, p)
        assert statistic < CHI_SQUARE[freedom]
    rate = accepts.mean() / n
    assert rate > 0.7 if drafter == "good" else rate < 0.6
    # The test has teeth: the drafter's own distribution would fail it.
    if drafter == "bad":
        wrong = np.array(draw(mx.repeat(q_row, DRAWS, axis=0), mx.random.key(1)))
        counts = np.bincount(wrong, minlength=VOCAB)
        assert ((counts - p * DRAWS) ** 2 / (p * DRAWS + 1e-9)).sum() > 10 * CHI_SQUARE[6]


class MarkovTarget:
    """A target whose next-token logits depend on the last token only: a table [V, V]."""

    num_layers, hidden_size, vocab_size, context_length = 1, VOCAB, VOCAB, 10**6

    def __init__(self, table: np.ndarray) -> None:
        self.table = mx.array(table, mx.float32)

    def make_cache(self) -> CacheStack:
        return CacheStack([])

    def forward(self, segments, taps=()):
        rows = self.table[segments[0].ids][None]
        return rows, Features([rows]) if taps else None

    def logits(self, rows):
        return rows


class TableDrafter:
    """Draws every draft of a block from one fixed distribution, through the target's filters."""

    taps = (0,)
    head_rows = None
    block_size = 4

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = mx.array(logits, mx.float32)

    def make_cache(self):
        return type("Empty", (), {"arrays": lambda s: [], "nbytes": 0, "length": 0})()

    def observe(self, features, cache):
        pass

    def propose(self, anchor, n, sampling, cache, head=None):
        q = sampling.probabilities(mx.broadcast_to(self.logits, (n, VOCAB)))
        return Proposal(draw(q, sampling.key), q, mx.array(True))


@pytest.mark.parametrize("drafter", [None, "good", "bad"])
@pytest.mark.parametrize("name", ["top_p", "penalty"])
def test_whole_loop_has_the_targets_transitions(name, drafter):
    """End to end: what follows each token in a long text has the table's filtered distribution."""
    params = SamplingParams(**FILTERS[name], seed=5)
    table = np.random.default_rng(2).standard_normal((VOCAB, VOCAB)) * 0.8
    draft = {"good": table.mean(0), "bad": -3 * table.mean(0)}.get(drafter)
    session = Session(MarkovTarget(table), TableDrafter(draft) if drafter else None, nullcontext)
    stats = GenerationStats()
    prompt = list(range(VOCAB))  # so that the penalty has seen every token from the start
    run = session.run(prompt, params, 2000, (), stats)
    text = [t for step in run for t in step]
    assert len(text) == 2000
    if drafter:
        assert stats.cycles > 300
        assert 0 < stats.accepted < stats.drafted
    seen = np.ones(VOCAB, bool) if name == "penalty" else None
    total, freedom = 0.0, 0
    for last in range(VOCAB):
        after = [b for a, b in pairwise(text) if a == last]
        if len(after) >= 100:
            statistic, f = chi_square(after, reference(table[last], params, seen))
            total, freedom = total + statistic, freedom + f
    assert freedom >= 4
    # Wilson and Hilferty's approximation of the 0.1 % point
    assert total < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_nan_proposal_leaves_the_distribution():
    """Tokens behind a NaN proposal come from p itself: its q is ignored, nothing is accepted."""
    params = SamplingParams(temperature=1.0)
    p = probabilities(mx.array(LOGITS, mx.float32)[None], params)
    rows = mx.concatenate([p, p])
    sick = Proposal(mx.array([0]), mx.full((1, VOCAB), mx.nan), mx.array(False))
    keys = mx.random.split(mx.random.key(0), DRAWS)
    tokens = np.array(mx.vmap(lambda k: accept_sampled(sick, rows, k).tokens)(keys))[:, 0]
    statistic, freedom = chi_square(tokens, reference(LOGITS, params, None))
    assert statistic < CHI_SQUARE[freedom]
    assert accept_sampled(sick, rows, mx.random.key(1)).accepted.item() == 0


def test_a_draft_of_probability_zero_is_never_accepted(monkeypatch):
    """The comparison is strict: u = 0 does not accept p = 0."""
    monkeypatch.setattr(mx.random, "uniform", lambda shape, key: mx.zeros(shape))
    p = mx.array([[0.0, 1.0]] * 2)
    proposal = Proposal(mx.array([0], mx.int32), mx.array([[1.0, 0.0]]), mx.array(True))
    verdict = accept_sampled(proposal, p, mx.random.key(0))
    assert verdict.accepted.item() == 0
    assert verdict.tokens.tolist()[0] == 1


def test_the_coldest_temperature_is_greedy():
    params = SamplingParams(temperature=LEAST_TEMPERATURE)
    rows = mx.array(np.random.default_rng(0).standard_normal((20, VOCAB)) * 100, mx.float32)
    probs = np.array(probabilities(rows, params))
    assert np.isfinite(probs).all()
    assert (probs.argmax(-1) == np.array(rows).argmax(-1)).all()
    assert probs.max(-1).min() == 1


def test_candidates_are_spread_over_the_vocabulary():
    """A drafter that draws from K candidates: q outside of them is 0 in the residual."""
    p = mx.array([[0.5, 0.0, 0.5, 0.0]] * 2)
    proposal = Proposal(
        mx.array([1], mx.int32), mx.array([[1.0, 0.0]]), mx.array(True), mx.array([[1, 3]])
    )
    tokens = {accept_sampled(proposal, p, mx.random.key(s)).tokens.tolist()[0] for s in range(40)}
    assert tokens == {0, 2}


def test_greedy_drafts_under_sampling_have_a_point_distribution():
    p = mx.array([[0.3, 0.7]] * 2)
    proposal = Proposal(mx.array([1], mx.int32), None, mx.array(True))
    keys = mx.random.split(mx.random.key(3), DRAWS)
    firsts = np.array(mx.vmap(lambda k: accept_sampled(proposal, p, k).tokens)(keys))[:, 0]
    statistic, freedom = chi_square(firsts, np.array([0.3, 0.7]))
    assert statistic < CHI_SQUARE[freedom]


def test_draw_never_leaves_the_support():
    """Also where the uniform number rounds up to the whole mass."""
    probs = mx.array([[0.0, 0.5, 0.0, 0.1, 0.0]] * DRAWS)
    tokens = np.array(draw(probs, mx.random.key(0)))
    assert set(tokens.tolist()) == {1, 3}
    edge = mx.array([[0.3333333, 0.3333333, 0.3333333, 0.0]])
    real = mx.random.uniform
    mx.random.uniform = lambda shape, key: mx.full(shape, 1 - 2**-24)
    try:
        assert draw(edge, mx.random.key(0)).tolist() == [2]
    finally:
        mx.random.uniform = real


def test_accept_greedy_takes_the_longest_prefix():
    choices = mx.array([4, 2, 9, 7])
    for drafts, count in [([4, 2, 9], 3), ([4, 2, 1], 2), ([4, 0, 9], 1), ([0, 2, 9], 0)]:
        verdict = accept_greedy(mx.array(drafts), choices)
        assert verdict.accepted.item() == count
        assert verdict.tokens.tolist() == [4, 2, 9, 7]


def test_history_rows_know_only_the_drafts_before_them():
    history = History(6)
    history.add(mx.array([5]))
    rows = history.rows(mx.array([1, 3], mx.int32)).tolist()
    sets = [{i for i, hit in enumerate(row) if hit} for row in rows]
    assert sets == [{5}, {5, 1}, {5, 1, 3}]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-39}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        *[
            ({name: value}, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            for value in ("0.5", None, True, [1])
        ],
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, name):
    with pytest.raises(UsageError, match=f"^{name} is "):
        SamplingParams(**settings)
