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


def epoch_steps(
    texts: Sequence[Text],
    epoch: int,
    *,
    seed: int,
    anchors: int,
    blocks: int,
) -> list[list[Work]]:
    """The steps of an epoch: texts shuffled, at most `blocks` blocks a step, no text split.

    Depends on nothing but the arguments, so a resumed run sees the same steps.
    """
    random = np.random.default_rng([seed, epoch])
    steps: list[list[Work]] = []
    current: list[Work] = []
    held = 0
    for index in random.permutation(len(texts)):
        work = Work(texts[index], draw_anchors(texts[index], anchors, random))
        if current and held + len(work.anchors) > blocks:
            steps.append(current)
            current, held = [], 0
        current.append(work)
        held += len(work.anchors)
    if current:
        steps.append(current)
    return steps


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
