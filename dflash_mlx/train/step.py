"""One optimizer step: forward and backward passes over its blocks, spread over CPU streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.dflash import DFlashModel
from dflash_mlx.draft.dflash2 import DFlash2Model
from dflash_mlx.models.base import Target
from dflash_mlx.train.batches import Work
from dflash_mlx.train.blocks import BlockGroup, block_rows
from dflash_mlx.train.features import Seen
from dflash_mlx.train.loss import (
    HeadSubset,
    Labels,
    Reweighed,
    cross_entropy,
    dpace_weights,
    draft_logits,
)
from dflash_mlx.train.selector import selector_loss

Tree = Any


@dataclass(frozen=True)
class Pass:
    """Everything a forward pass reads, as evaluated arrays."""

    anchors: mx.array  # [N] int32 token ids
    groups: tuple[BlockGroup, ...]
    labels: Labels
    previous: mx.array  # [N, b-1] int32, the true token before each predicted one
    counted: np.ndarray  # [N, b-1] bool: rows with a label


def build_pass(
    works: Sequence[Work], seen: Sequence[Seen], head: HeadSubset, weights: np.ndarray
) -> Pass:
    """Inputs and labels of the blocks of `works`; weights [b-1] along the block.

    Rows behind the end of their text, and tokens outside the head's subset, have weight 0.
    """
    size = len(weights)
    tokens, previous, there, soft_ids, soft_probs = [], [], [], [], []
    groups, anchors = [], []
    for work, known in zip(works, seen, strict=True):
        ids = np.array(work.text.ids, np.int32)
        at = work.anchors[:, None] + np.arange(1, size + 1)[None]
        inside = at < len(ids)
        at = np.minimum(at, len(ids) - 1)
        tokens.append(ids[at])
        previous.append(ids[at - 1])
        there.append(inside)
        anchors.append(ids[work.anchors])
        row = at - len(work.text.prompt_ids)
        soft_ids.append(head.place[np.array(known.ids)][row])
        soft_probs.append(np.exp(np.array(known.logprobs))[row])
        groups.append(BlockGroup(known.features[: int(work.anchors.max())], work.anchors))
    hard = head.place[np.concatenate(tokens)]
    counted = np.concatenate(there) & (hard >= 0)
    ids, probs = np.concatenate(soft_ids), np.concatenate(soft_probs)
    probs = np.where(ids >= 0, probs, 0)
    probs = probs / np.maximum(probs.sum(-1, keepdims=True), 1e-9)
    labels = Labels(
        mx.array(np.maximum(hard, 0)),
        mx.array(np.where(counted, weights[None], 0).astype(np.float32)),
        mx.array(np.maximum(ids, 0)),
        mx.array(probs.astype(np.float32)),
    )
    built = Pass(
        mx.array(np.concatenate(anchors)),
        tuple(groups),
        labels,
        mx.array(np.concatenate(previous)),
        counted,
    )
    mx.eval(built.anchors, built.previous, list(vars(labels).values()))
    return built


@dataclass(frozen=True)
class Objective:
    """What is minimised, and the frozen parts of the target that it reads."""

    model: DFlashModel
    config: DFlashConfig
    target: Target
    head: HeadSubset
    soft_share: float
    dtype: mx.Dtype  # of the forward pass; parameters are float32 masters
    reweighed: Reweighed = dpace_weights
    # Another one in comparisons: the drafter's pass.
    rows: Callable[..., mx.array] = block_rows

    def __call__(
        self, parameters: Tree, work: Pass
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(Σ weight · loss, Σ weight · CE, Σ weight, correct [N, b-1])."""
        self.model.update(tree_map(lambda p: p.astype(self.dtype), parameters))
        x = self.embed(work.anchors)
        rows = self.rows(self.model, self.config, x, work.groups)[:, 1:]
        logits = draft_logits(self.config, rows, self.head.rows.astype(self.dtype))
        loss, weights, correct = cross_entropy(logits, work.labels, self.soft_share, self.reweighed)
        total = loss
        if isinstance(self.model, DFlash2Model):
            extra, correct = selector_loss(
                self.model.candidate_selector, rows, logits, work, self.head, weights
            )
            total = total + extra
        return total, loss, weights.sum(), correct

    def embed(self, anchors: mx.array) -> mx.array:
        """[N] anchors -> [N, b, H]: their embeddings, then the mask's."""
        block = self.config.block_size
        masks = mx.full((block - 1,), self.config.mask_token_id, mx.int32)
        ids = mx.concatenate(
            [anchors[:, None], mx.broadcast_to(masks, (anchors.shape[0], block - 1))], axis=1
        )
        x = self.target.embed(ids).astype(self.dtype)
        scale = self.config.input_embedding_scale
        return x if scale == 1.0 else x * scale


def clipped(grads: Tree, weight: float, most: float) -> Tree:
    """Gradients of a sum divided by its weight, and scaled down to the norm `most` if larger."""
    weight = max(weight, 1e-9)
    squares = [mx.square(g).sum() for _, g in tree_flatten(grads)]
    norm = mx.sqrt(mx.stack(squares).sum()) / weight
    factor = mx.minimum(most / (norm + 1e-6), 1.0) / weight
    return tree_map(lambda g: g * factor, grads)


@dataclass
class StepResult:
    """Sums over a step's blocks."""

    loss: float  # mean weighted CE
    weight: float  # of all rows
    correct: np.ndarray  # [b-1] rows whose best token was the label
    counted: np.ndarray  # [b-1] rows with a label


class Streams:
    """Where passes run: MLX's CPU back-end has one thread a stream, so passes go round them."""

    def __init__(self, count: int) -> None:
        device = mx.default_device()
        self.streams = [mx.new_stream(device) for _ in range(count)]


def gradients(
    objective: Objective, parameters: Tree, work: Sequence[Pass], streams: Streams
) -> tuple[Tree, StepResult]:
    """Gradient of Σ weight · loss over all passes, and what to report, with Σ weight.

    Sums are made in the order of passes; whoever takes a step divides by the weight.
    """
    compute = mx.value_and_grad(objective)
    size = work[0].counted.shape[1]
    result = StepResult(0.0, 0.0, np.zeros(size, np.int64), np.zeros(size, np.int64))
    total: Tree = None
    width = len(streams.streams)
    for start in range(0, len(work), width):
        now = work[start : start + width]
        made = []
        for item, stream in zip(now, streams.streams, strict=False):
            with mx.stream(stream):
                made.append(compute(parameters, item))
        mx.async_eval(*[x for m in made for x in (*m[0][1:], m[1])])
        for item, ((_, loss, weight, correct), grads) in zip(now, made, strict=True):
            result.loss += float(loss)
            result.weight += float(weight)
            hit = np.array(correct) & item.counted
            result.correct += hit.sum(0)
            result.counted += item.counted.sum(0)
            total = grads if total is None else tree_map(mx.add, total, grads)
        mx.eval(total)
    result.loss /= max(result.weight, 1e-9)
    return total, result
