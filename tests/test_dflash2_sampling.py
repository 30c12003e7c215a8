"""DFlash 2 under sampling: its drafts have the stated probabilities, the text has the target's."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_drafter as tiny
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.accept import accept_sampled
from dflash_mlx.decode.sampling import SamplingParams, probabilities
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import DraftSampling
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash2 import CandidateSelector, DFlash2Drafter
from dflash_mlx.features import Features

HEAT = 0.7
DRAWS = 20_000


def test_drafts_are_drawn_from_the_stated_probabilities(tmp_path: Path) -> None:
    """Also that the target's other filters are not asked."""
    folder = write_drafter(tmp_path, tiny.drafter_config("second"), 5)
    drafter = open_drafter(folder, BorrowedTarget(), dtype=mx.float32)
    assert isinstance(drafter, DFlash2Drafter)
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
    selector.hidden_projection.weight = mx.array(rng.standard_normal((rank, 4)) / 2, mx.float32)
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

    def forward(self, segments: Any, taps: Any = ()) -> tuple[mx.array, Features | None]:
        ids = segments[0].ids
        hidden = self.embedding[ids][None]
        features = Features([hidden] * len(taps)) if taps else None
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
