"""Which blocks a training step sees: anchors drawn anew every epoch, grouped by text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_mlx.train.corpus import Text


@dataclass(frozen=True)
class Work:
    """Blocks of one text: anchors [A] ascending, positions in the whole text."""

    text: Text
    anchors: np.ndarray


def anchor_candidates(text: Text) -> np.ndarray:
    """Positions an anchor may have: tokens of the answer with one of the answer behind them."""
    first = len(text.prompt_ids)
    return np.arange(first, text.length - 1)


def draw_anchors(text: Text, limit: int, random: np.random.Generator) -> np.ndarray:
    """Up to `limit` distinct anchors, uniformly, in ascending order."""
    candidates = anchor_candidates(text)
    if len(candidates) > limit:
        candidates = random.choice(candidates, limit, replace=False)
    return np.sort(candidates)


def uniform_anchors(text: Text, block_size: int) -> np.ndarray:
    """Anchors a block apart, the same in every epoch: what random anchors are compared with."""
    return anchor_candidates(text)[:: block_size - 1]


#: texts of one step at least, when there are as many
_STEP_TEXTS = 4


def epoch_steps(
    texts: Sequence[Text],
    epoch: int,
    *,
    seed: int,
    anchors: int,
    blocks: int,
) -> list[list[Work]]:
    """The steps of an epoch, `blocks` blocks each but the last, from several texts each.

    A text with many anchors comes in parts, in steps that lie anywhere in the epoch. Depends on
    nothing but the arguments, so a resumed run sees the same steps.
    """
    random = np.random.default_rng([seed, epoch])
    works = [Work(text, draw_anchors(text, anchors, random)) for text in texts]
    return grouped(parted(works, blocks, random), blocks)


def parted(works: Sequence[Work], blocks: int, random: np.random.Generator) -> list[Work]:
    """Works of at most a few texts' share of a step, shuffled; a part's anchors lie anywhere."""
    most = max(1, blocks // _STEP_TEXTS)
    parts = []
    for work in works:
        mixed = random.permutation(work.anchors)
        for start in range(0, len(mixed), most):
            parts.append(Work(work.text, np.sort(mixed[start : start + most])))
    return [parts[index] for index in random.permutation(len(parts))]


def grouped(works: Sequence[Work], blocks: int) -> list[list[Work]]:
    """Works in order, cut into steps of exactly `blocks` blocks, the last one of what is left."""
    return list(passes(works, blocks))


def passes(step: Sequence[Work], blocks: int) -> Iterator[list[Work]]:
    """A step cut into forward passes of at most `blocks` blocks; long texts are split."""
    current: list[Work] = []
    room = blocks
    for work in step:
        anchors = work.anchors
        while len(anchors):
            taken, anchors = anchors[:room], anchors[room:]
            current.append(Work(work.text, taken))
            room -= len(taken)
            if room == 0:
                yield current
                current, room = [], blocks
    if current:
        yield current
