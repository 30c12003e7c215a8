"""The training loss: same-position labels, weights along the block, hard and soft labels.

The head is restricted to the tokens of the training texts and a fresh sample of the others, which
keep them from winning at run time over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.models.base import Target
from dflash_mlx.train.fast_math import logsumexp

#: hidden units whose head rows are read in one go: at most, and by the numbers that come back
_HEAD_CHUNK, _HEAD_NUMBERS = 512, 1 << 24


def head_rows(target: Target, ids: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Rows `ids` of the bare output head, [len(ids), H], whatever form the target keeps it in.

    The head is linear, so its columns are its answers to unit vectors.
    """
    wanted = mx.array(ids.astype(np.int32))
    columns = []
    chunk = max(1, min(_HEAD_CHUNK, _HEAD_NUMBERS // target.vocab_size))
    for start in range(0, target.hidden_size, chunk):
        count = min(chunk, target.hidden_size - start)
        units = np.zeros((count, target.hidden_size), np.float32)
        units[np.arange(count), start + np.arange(count)] = 1
        columns.append(target.head(mx.array(units).astype(target.dtype))[:, wanted].T.astype(dtype))
        mx.eval(columns[-1])
    rows = mx.concatenate(columns, axis=1)
    mx.eval(rows)
    return rows


class HeadSubset:
    """The tokens a loss is computed over, and their rows of the target's head.

    ids [V'] ascending; `place` maps a token to its index among them, -1 elsewhere.
    """

    def __init__(self, target: Target, ids: Iterable[int], dtype: mx.Dtype = mx.float32) -> None:
        self.ids = np.unique(np.fromiter(ids, np.int64))
        self.place = np.full(target.vocab_size, -1, np.int32)
        self.place[self.ids] = np.arange(len(self.ids), dtype=np.int32)
        self.rows = head_rows(target, self.ids, dtype)


@dataclass(frozen=True)
class Labels:
    """What N blocks of b rows are to predict; row 0, the anchor, is left out everywhere.

    hard [N, b-1] int32: places among the head's tokens. weights [N, b-1] float32, 0 where a row
    has no label. soft_ids [N, b-1, K] int32 places, soft_probs [N, b-1, K] float32, which sum to 1
    in a row or are all 0.
    """

    hard: mx.array
    weights: mx.array
    soft_ids: mx.array
    soft_probs: mx.array


#: the labels' log-probabilities [N, b-1] and labels -> the same labels with other weights
Reweighed = Callable[[mx.array, Labels], Labels]


def position_weights(block_size: int, gamma: float) -> np.ndarray:
    """[b-1] float32: exp(-(k-1)/γ) of the rows k = 1 .. b-1."""
    with np.errstate(over="ignore"):  # of a tiny gamma: the first row alone counts
        return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)


def given_weights(logprobs: mx.array, labels: Labels) -> Labels:
    """Labels with the weights they have."""
    return labels


def dpace_weights(logprobs: mx.array, labels: Labels) -> Labels:
    """Labels with the weights of D-PACE (arXiv 2605.18810, with α = 1/2).

    A row weighs what its being right adds to the expected accepted length: with c = (1 + p(label))
    / 2 of each row and π the product of c up to a row, row k weighs Σ π over the rows k and behind.
    logprobs [N, b-1]: of the labels; they get no gradient through the weights.
    """
    counted = labels.weights > 0
    sure = mx.where(counted, 0.5 + 0.5 * mx.exp(mx.stop_gradient(logprobs)), 1.0)
    reached = mx.cumprod(sure, axis=-1) * counted
    return replace(labels, weights=mx.cumsum(reached, axis=-1, reverse=True) * counted)


def default_gamma(block_size: int) -> float:
    """γ of the paper for blocks of 8, 10 and 16; in between by interpolation."""
    return float(np.interp(block_size, [2, 8, 10, 16, 32], [2, 4, 5, 7, 12]))


def draft_logits(config: DFlashConfig, rows: mx.array, head: mx.array) -> mx.array:
    """[N, H] and head rows [V', H] -> float32 logits [N, V'], multiplier and soft-cap on."""
    logits = (rows @ head.T).astype(mx.float32)
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else mx.tanh(logits / cap) * cap


def cross_entropy(
    logits: mx.array,
    labels: Labels,
    soft_share: float,
    reweighed: Reweighed = given_weights,
) -> tuple[mx.array, mx.array, mx.array]:
    """(Σ weight · CE, weights [N, b-1], correct [N, b-1] bool) from logits [N, b-1, V'].

    soft_share: 0 takes the tokens themselves as labels, 1 the target's distribution at each
    position (its most likely tokens), between them a mixture. reweighed: the labels' weights from
    the log-probabilities of the tokens.
    """
    total = logsumexp(logits)
    picked = mx.take_along_axis(logits, labels.hard[..., None], axis=-1)[..., 0]
    labels = reweighed(picked - total, labels)
    if soft_share:
        soft = mx.take_along_axis(logits, labels.soft_ids, axis=-1) * labels.soft_probs
        # Rows whose likely tokens all lie outside the head's subset have hard labels only.
        share = soft_share * labels.soft_probs.sum(axis=-1)
        picked = (1 - share) * picked + soft_share * soft.sum(axis=-1)
    loss = ((total - picked) * labels.weights).sum()
    return loss, labels.weights, mx.argmax(mx.stop_gradient(logits), axis=-1) == labels.hard
