"""Training sees what generation sees: the same draft logits, and nothing at or after an anchor."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import tiny_drafter as tiny
from mlx.utils import tree_flatten
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.train import fast_math
from dflash_mlx.train.blocks import BlockGroup, block_rows
from dflash_mlx.train.loss import HeadSubset, draft_logits
from dflash_mlx.train.step import Objective

ANCHORS = (np.array([1, 2, 9, 17, 30]), np.array([4, 23]))
VARIANTS = [*tiny.VARIANTS, *tiny.DFLASH2_VARIANTS]


@pytest.fixture
def opened(tmp_path):
    def of(variant):
        config = tiny.drafter_config(variant)
        folder = write_drafter(tmp_path / variant, config, tiny.variant_seed(variant))
        drafter = open_drafter(folder, BorrowedTarget(), dtype=mx.float32)
        return drafter, [mx.array(tiny.context_features(config, 40 + i)[i:]) for i in range(2)]

    return of


def training_rows(drafter, features, model=None):
    """Hidden states [7, b, H] of the blocks of both sequences, in one pass."""
    groups = [BlockGroup(f[: a.max()], a) for f, a in zip(features, ANCHORS, strict=True)]
    tokens = mx.array((np.concatenate(ANCHORS) * 5 % tiny.VOCAB).astype(np.int32))
    x = Objective(
        model or drafter.model, drafter.config, drafter._target, None, 0.0, mx.float32
    ).embed(tokens)
    return block_rows(model or drafter.model, drafter.config, x, groups)


def generation_logits(drafter, features):
    """Unary draft logits of the same blocks, one sequence and one cache after the other."""
    made = []
    for rows, anchors in zip(features, ANCHORS, strict=True):
        for anchor in anchors.tolist():
            cache = drafter.make_cache()
            drafter.observe(rows[None, :anchor], cache)
            token = mx.array([anchor * 5 % tiny.VOCAB], mx.int32)
            made.append(drafter.draft_logits(token, tiny.BLOCK - 1, cache))
    return mx.stack(made)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_logits_are_those_of_generation(opened, variant):
    drafter, features = opened(variant)
    rows = training_rows(drafter, features)[:, 1:]
    head = HeadSubset(drafter._target, range(tiny.VOCAB))
    ours = draft_logits(drafter.config, rows, head.rows)
    expected = generation_logits(drafter, features)
    assert np.abs(np.array(ours - expected)).max() < 2e-4
    assert np.abs(np.array(expected)).max() > 1


@pytest.mark.parametrize("value", [50.0, -1e6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_does_not_depend_on_features_at_or_after_its_anchor(opened, variant, value):
    drafter, features = opened(variant)
    before = training_rows(drafter, features)
    for block, (sequence, anchor) in enumerate((s, a) for s in range(2) for a in ANCHORS[s]):
        disturbed = list(features)
        later = mx.arange(disturbed[sequence].shape[0])[:, None] >= int(anchor)
        disturbed[sequence] = mx.where(later, value, disturbed[sequence])
        after = training_rows(drafter, disturbed)
        assert mx.array_equal(before[block], after[block])
        # The position right before the anchor does matter.
        disturbed[sequence] = mx.where(
            mx.arange(later.shape[0])[:, None] >= int(anchor) - 1, value, features[sequence]
        )
        assert not mx.array_equal(before[block], training_rows(drafter, disturbed)[block])


def test_blocks_do_not_see_one_another(opened):
    drafter, features = opened("full")
    together = training_rows(drafter, features)
    config, model = drafter.config, drafter.model
    for index, anchor in enumerate(ANCHORS[0]):
        ids = mx.array([[int(anchor) * 5 % tiny.VOCAB] + [config.mask_token_id] * 4], mx.int32)
        group = BlockGroup(features[0][: int(anchor)], np.array([anchor]))
        alone = block_rows(model, config, drafter._target.embed(ids), [group])
        assert np.abs(np.array(alone[0] - together[index])).max() < 1e-4


def test_a_group_with_features_at_its_last_anchor_is_refused():
    with pytest.raises(ValueError, match="must not see"):
        BlockGroup(mx.zeros((8, 4)), np.array([3, 7]))
    with pytest.raises(ValueError, match="before it"):
        BlockGroup(mx.zeros((7, 4)), np.array([0, 7]))


def test_every_weight_gets_a_gradient(opened):
    for variant in ("full", "bias", "second"):
        drafter, features = opened(variant)
        model = drafter.model

        def total(parameters, drafter=drafter, features=features, model=model):
            model.update(parameters)
            return (training_rows(drafter, features, model) ** 2).sum()

        grads = mx.grad(total)(model.trainable_parameters())
        for name, grad in tree_flatten(grads):
            silent = "candidate_selector" in name or name.endswith("k_proj.bias")
            assert silent or mx.abs(grad).max() > 0, name


def test_hidden_scores_weigh_nothing():
    """Not 1e-35 either, which would reach a sum that is nought without it."""
    hidden = mx.full((4, 5), -1e30)
    weights = fast_math.softmax(mx.concatenate([mx.random.normal((4, 3)), hidden], axis=-1))
    assert mx.array_equal(weights[:, 3:], mx.zeros((4, 5)))
    # Nor where everything is hidden but the block's own row.
    assert fast_math.softmax(mx.array([[0.0, -1e30]])).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("width", [1, 7, 64])
def test_fast_functions_and_their_gradients_are_those_of_mlx(width):
    x = mx.random.normal((5, 3, width), key=mx.random.key(0)) * 8
    y = mx.random.normal((5, 3, width), key=mx.random.key(1))

    def compare(ours, theirs, *inputs):
        weight = mx.random.normal(theirs(*inputs).shape, key=mx.random.key(2))
        assert np.allclose(ours(*inputs), theirs(*inputs), rtol=1e-4, atol=1e-5)
        for place in range(len(inputs)):
            grads = [
                mx.grad(lambda *a, f=f: (f(*a) * weight).sum(), argnums=place)(*inputs)
                for f in (ours, theirs)
            ]
            assert np.allclose(*grads, rtol=2e-4, atol=2e-4)

    compare(fast_math.softmax, lambda a: mx.softmax(a, axis=-1), x)
    compare(fast_math.logsumexp, lambda a: mx.logsumexp(a, axis=-1), x)
    compare(fast_math.swiglu, lambda a, b: a * mx.sigmoid(a) * b, x, y)
    masked = mx.where(mx.arange(width) > 0, x, -1e30) if width > 1 else x
    compare(fast_math.softmax, lambda a: mx.softmax(a, axis=-1), masked)
