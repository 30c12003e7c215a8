"""The loss of DFlash 2's candidate selector against numpy, a row at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_target

from dflash_mlx.draft.dflash2 import CandidateSelector
from dflash_mlx.train.loss import HeadSubset, Labels
from dflash_mlx.train.selector import selector_loss
from dflash_mlx.train.step import Pass

BLOCKS, ROWS, HIDDEN, RANK, TOP = 5, 3, 6, 4, 3
HEAD_IDS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@pytest.fixture(scope="module")
def head():
    return HeadSubset(tiny_target("llama"), HEAD_IDS)


@pytest.fixture
def selector():
    made = CandidateSelector(HIDDEN, 96, RANK, TOP)
    keys = mx.random.split(mx.random.key(1), 3)
    made.predecessor_codebook = mx.random.normal((96, RANK), key=keys[0])
    made.successor_codebook = mx.random.normal((96, RANK), key=keys[1])
    made.hidden_projection.weight = mx.random.normal((RANK, HIDDEN), key=keys[2])
    return made


def expected(selector, rows, logits, hard, previous, weights) -> tuple[float, np.ndarray]:
    """By the definition: candidates, the label in place of the weakest, scores, cross entropy."""
    before, after, turn = (
        np.array(a, np.float64)
        for a in (
            selector.predecessor_codebook,
            selector.successor_codebook,
            selector.hidden_projection.weight,
        )
    )
    total, right = 0.0, np.zeros((BLOCKS, ROWS), bool)
    for n in range(BLOCKS):
        for k in range(ROWS):
            best = np.argsort(-logits[n, k])[:TOP].tolist()
            held = hard[n, k] in best
            if not held:
                best[-1] = hard[n, k]
            query = (turn @ rows[n, k]) * before[previous[n, k]]
            scores = np.array([logits[n, k, c] + after[HEAD_IDS[c]] @ query for c in best])
            chance = np.exp(scores - scores.max())
            total -= weights[n, k] * np.log(chance[best.index(hard[n, k])] / chance.sum())
            right[n, k] = held and best[int(scores.argmax())] == hard[n, k]
    return total, right


def test_the_loss_is_that_of_its_definition(selector, head):
    random = np.random.default_rng(3)
    rows = random.normal(0, 1, (BLOCKS, ROWS, HIDDEN))
    logits = random.normal(0, 2, (BLOCKS, ROWS, len(HEAD_IDS)))
    hard = random.integers(0, len(HEAD_IDS), (BLOCKS, ROWS))
    hard[0] = logits[0].argmax(-1)  # labels among the candidates
    hard[1] = logits[1].argmin(-1)  # labels that take the weakest one's place
    previous = random.integers(0, 96, (BLOCKS, ROWS))
    weights = random.uniform(0, 2, (BLOCKS, ROWS))
    weights[2, 1] = 0
    labels = Labels(
        mx.array(hard.astype(np.int32)),
        mx.ones((BLOCKS, ROWS)) * 7,  # the pass's own weights must not be what counts
        mx.zeros((BLOCKS, ROWS, 0), mx.int32),
        mx.zeros((BLOCKS, ROWS, 0)),
    )
    work = Pass(mx.zeros((BLOCKS,), mx.int32), (), labels, mx.array(previous), weights > 0)
    given = (mx.array(a.astype(np.float32)) for a in (rows, logits))
    loss, correct = selector_loss(
        selector, *given, work, head, mx.array(weights.astype(np.float32))
    )
    total, right = expected(selector, rows, logits, hard, previous, weights)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert np.array_equal(np.array(correct), right)
    assert right[0].any()
    assert not right[1].any()
