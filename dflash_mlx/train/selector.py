"""The loss of DFlash 2's candidate selector: the true token among the best, given the one before.

As the decoder's loss, it is summed with the weights along the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from dflash_mlx.draft.dflash2 import CandidateSelector
from dflash_mlx.train.loss import HeadSubset

if TYPE_CHECKING:
    from dflash_mlx.train.step import Pass


def selector_loss(
    selector: CandidateSelector,
    rows: mx.array,
    logits: mx.array,
    work: Pass,
    head: HeadSubset,
    weights: mx.array,
) -> tuple[mx.array, mx.array]:
    """(Σ weight · CE over the candidates, correct [N, b-1]) from rows [N, b-1, H].

    weights [N, b-1].

    Candidates are the unary logits' best; the true token takes the place of the weakest when it is
    not among them. The predecessor is the true one.
    """
    top = min(selector.top_k, logits.shape[-1])
    fixed = mx.stop_gradient(logits)
    places = mx.argpartition(-fixed, top - 1, axis=-1)[..., :top]
    unary = mx.take_along_axis(logits, places, axis=-1)
    label = work.labels.hard[..., None]
    found = (places == label).any(axis=-1, keepdims=True)
    weakest = mx.argmin(mx.stop_gradient(unary), axis=-1, keepdims=True)
    swapped = mx.arange(top)[None, None] == weakest
    swapped = mx.logical_and(swapped, mx.logical_not(found))
    candidates = mx.where(swapped, label, places)
    unary = mx.where(swapped, mx.take_along_axis(logits, label, axis=-1), unary)
    ids = mx.array(head.ids.astype("int32"))[candidates]
    hidden = selector.hidden_projection(rows).astype(mx.float32)
    query = hidden * selector.predecessor_codebook[work.previous].astype(mx.float32)
    follows = (selector.successor_codebook[ids].astype(mx.float32) * query[..., None, :]).sum(-1)
    scores = unary + follows
    at = mx.argmax(candidates == label, axis=-1)[..., None]
    picked = mx.take_along_axis(scores, at, axis=-1)[..., 0]
    loss = ((mx.logsumexp(scores, axis=-1) - picked) * weights).sum()
    # Correct as a greedy walk behind true predecessors would be; a swapped-in label never counts.
    best = mx.argmax(mx.stop_gradient(scores), axis=-1)[..., None]
    right = mx.take_along_axis(candidates, best, axis=-1)[..., 0] == work.labels.hard
    return loss, mx.logical_and(right, found[..., 0])
