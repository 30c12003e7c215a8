"""Labels, weights and losses against plain numpy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_target

from dflash_mlx.train import loss
from dflash_mlx.train.batches import Work, anchor_candidates, draw_anchors, epoch_steps, passes
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import FeatureSpec, compute
from dflash_mlx.train.loss import (
    HeadSubset,
    cross_entropy,
    default_gamma,
    dpace_weights,
    position_weights,
)
from dflash_mlx.train.step import build_pass

TEXT = Text("a", (5, 6, 7), (8, 9, 10, 11, 12))


def texts(count: int = 9) -> list[Text]:
    random = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt, answer = random.integers(2, 9), random.integers(2, 40)
        ids = random.integers(0, 96, prompt + answer).tolist()
        made.append(Text(f"t{index}", tuple(ids[:prompt]), tuple(ids[prompt:])))
    return made


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def seen(target):
    return compute(target, FeatureSpec("tiny", (1, 2), 6, "float32"), [TEXT])[0]


def test_rows_predict_the_tokens_at_their_own_positions(target, seen):
    head = HeadSubset(target, range(target.vocab_size))
    made = build_pass([Work(TEXT, np.array([3, 6]))], [seen], head, position_weights(4, 4.0))
    assert made.anchors.tolist() == [8, 11]
    assert head.ids[made.labels.hard[0].tolist()].tolist() == [9, 10, 11]
    assert made.previous[0].tolist() == [8, 9, 10]
    # The block at 6 has one row inside the text.
    assert made.counted.tolist() == [[True, True, True], [True, False, False]]
    assert head.ids[made.labels.hard[1, 0].item()] == 12
    expected = np.exp(-np.arange(3) / 4)
    assert np.allclose(made.labels.weights[0], expected)
    assert made.labels.weights[1].tolist() == pytest.approx([1, 0, 0])
    assert made.groups[0].features.shape[0] == 6


def test_tokens_outside_the_heads_subset_have_no_weight(target, seen):
    head = HeadSubset(target, [8, 9, 11, 12, 50])
    made = build_pass([Work(TEXT, np.array([3]))], [seen], head, position_weights(4, 4.0))
    assert made.counted.tolist() == [[True, False, True]]
    assert made.labels.weights[0, 1].item() == 0


@pytest.mark.parametrize("units", [48, 7])
def test_head_rows_are_the_targets_own(target, units, monkeypatch):
    """However few of its columns are read at a time."""
    monkeypatch.setattr(loss, "_HEAD_NUMBERS", units * target.vocab_size)
    rows = mx.random.normal((4, target.hidden_size), key=mx.random.key(0))
    head = HeadSubset(target, [90, 3, 3, 17])
    assert head.ids.tolist() == [3, 17, 90]
    ours = rows @ head.rows.T
    assert np.allclose(ours, target.head(rows)[:, [3, 17, 90]], atol=1e-5)
    assert head.place[[3, 17, 90, 4]].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("soft", [0.0, 0.4, 1.0])
def test_cross_entropy_is_that_of_numpy(target, seen, soft):
    head = HeadSubset(target, range(target.vocab_size))
    works = [Work(TEXT, np.array([3, 4, 6]))]
    made = build_pass(works, [seen], head, position_weights(4, 2.0))
    logits = mx.random.normal((3, 3, target.vocab_size), key=mx.random.key(4)) * 3
    loss, weights, correct = cross_entropy(logits, made.labels, soft)
    assert mx.array_equal(weights, made.labels.weights)
    ours = np.array(logits, np.float64)
    log = ours - np.log(np.exp(ours).sum(-1, keepdims=True))
    total = 0.0
    for block, anchor in enumerate((3, 4, 6)):
        for k in range(1, 4):
            at = anchor + k
            if at >= TEXT.length:
                continue
            label = TEXT.ids[at]
            row = at - len(TEXT.prompt_ids)
            ids, probs = np.array(seen.ids[row]), np.exp(np.array(seen.logprobs[row], np.float64))
            target_log = (probs / probs.sum() * log[block, k - 1, ids]).sum()
            mixed = (1 - soft) * log[block, k - 1, label] + soft * target_log
            total -= np.exp(-(k - 1) / 2) * mixed
            assert bool(correct[block, k - 1]) == (np.argmax(ours[block, k - 1]) == label)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def dpace(probs: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Weights of one block's rows by their definition, a product and a sum at a time."""
    sure = [(1 + p) / 2 if here else 1.0 for p, here in zip(probs, there, strict=True)]
    reached = [np.prod(sure[: k + 1]) * there[k] for k in range(len(sure))]
    return np.array([sum(reached[k:]) * there[k] for k in range(len(sure))])


def test_dpace_weights_are_those_of_their_definition(target, seen):
    head = HeadSubset(target, range(target.vocab_size))
    works = [Work(TEXT, np.array([3, 4, 6]))]
    labels = build_pass(works, [seen], head, position_weights(4, 2.0)).labels
    logits = mx.random.normal((3, 3, target.vocab_size), key=mx.random.key(4)) * 3
    loss, weights, _ = cross_entropy(logits, labels, 0.0, dpace_weights)
    ours = np.array(logits, np.float64)
    probs = np.exp(ours) / np.exp(ours).sum(-1, keepdims=True)
    right = np.take_along_axis(probs, np.array(labels.hard)[..., None], -1)[..., 0]
    there = np.array(labels.weights) > 0
    assert there.sum(-1).tolist() == [3, 3, 1]  # the last block ends behind the text
    expected = np.stack([dpace(right[i], there[i]) for i in range(3)])
    assert np.allclose(weights, expected, rtol=1e-4)
    assert loss.item() == pytest.approx(-(expected * np.log(right)).sum(), rel=1e-4)


def test_no_gradient_flows_through_dpace_weights(target, seen):
    """A drafter must not learn to be unsure of rows that it gets wrong."""
    head = HeadSubset(target, range(target.vocab_size))
    labels = build_pass(
        [Work(TEXT, np.array([3, 4]))], [seen], head, position_weights(4, 2.0)
    ).labels
    logits = mx.random.normal((2, 3, target.vocab_size), key=mx.random.key(4)) * 3
    _, weights, _ = cross_entropy(logits, labels, 0.0, dpace_weights)
    fixed = replace(labels, weights=weights)
    ours = mx.grad(lambda x: cross_entropy(x, labels, 0.0, dpace_weights)[0])(logits)
    theirs = mx.grad(lambda x: cross_entropy(x, fixed, 0.0)[0])(logits)
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not np.allclose(weights, labels.weights)


def test_the_targets_distribution_is_that_of_the_token_at_each_position(target, seen):
    for row in range(len(TEXT.answer_ids)):
        alone = mx.array(TEXT.ids[: len(TEXT.prompt_ids) + row], mx.int32)
        from dflash_mlx.segment import Segment

        hidden, features = target.forward([Segment(alone, target.make_cache())], (1, 2))
        log = np.array(target.logits(hidden)[0, -1], np.float64)
        log -= np.log(np.exp(log).sum())
        best = np.argsort(-log)[:6]
        order = np.argsort(-np.array(seen.logprobs[row]))
        assert np.array(seen.ids[row])[order].tolist() == best.tolist()
        assert np.allclose(np.array(seen.logprobs[row])[order], log[best], atol=1e-4)
        assert np.allclose(features[0, -1], seen.features[alone.shape[0] - 1], atol=1e-4)


def test_a_tiny_gamma_leaves_the_first_row(recwarn):
    assert position_weights(4, 1e-320).tolist() == [1, 0, 0]
    assert not recwarn.list


def test_gamma_is_the_papers_for_its_block_sizes():
    assert [default_gamma(b) for b in (8, 10, 16)] == [4, 5, 7]


def test_anchors_are_answer_tokens_with_one_behind_them():
    random = np.random.default_rng(0)
    drawn = {a for _ in range(60) for a in draw_anchors(TEXT, 2, random).tolist()}
    assert drawn == {3, 4, 5, 6}  # the first token of the answer to the last but one
    assert draw_anchors(TEXT, 512, random).tolist() == [3, 4, 5, 6]


def test_an_epoch_holds_every_anchor_once_and_differs_from_the_next():
    given = texts()
    epochs = [epoch_steps(given, e, seed=1, anchors=10, blocks=24) for e in range(2)]
    for steps in epochs:
        seen = [(w.text.name, a) for step in steps for w in step for a in w.anchors.tolist()]
        assert len(seen) == len(set(seen))
        expected = {text.name: min(10, len(anchor_candidates(text))) for text in given}
        assert Counter(name for name, _ in seen) == expected
        counts = [sum(len(w.anchors) for w in step) for step in steps]
        assert set(counts[:-1]) == {24}
        assert all(len({w.text.name for w in step}) >= 4 for step in steps[:-1])
        assert all((np.diff(w.anchors) > 0).all() for step in steps for w in step)
    shown = [[(w.text.name, w.anchors.tolist()) for s in e for w in s] for e in epochs]
    # Other anchors, not the same ones in another order.
    chosen = [{(name, anchor) for name, anchors in e for anchor in anchors} for e in shown]
    assert chosen[0] != chosen[1]
    again = epoch_steps(given, 0, seed=1, anchors=10, blocks=24)
    assert shown[0] == [(w.text.name, w.anchors.tolist()) for s in again for w in s]


def test_passes_hold_the_same_blocks_in_smaller_parts():
    step = epoch_steps(texts(), 0, seed=1, anchors=30, blocks=200)[0]
    parts = list(passes(step, 7))
    assert all(sum(len(w.anchors) for w in part) == 7 for part in parts[:-1])
    whole = [(w.text.name, a) for w in step for a in w.anchors.tolist()]
    assert whole == [(w.text.name, a) for part in parts for w in part for a in w.anchors.tolist()]
