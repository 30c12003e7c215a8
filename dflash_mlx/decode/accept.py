"""Which drafts the target accepts. Pure functions: arrays in, a lazy verdict out.

rows of the verify pass   0        1        ...  n
input token               anchor   d_1      ...  d_n
judges                    d_1      d_2      ...  (bonus only)
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.decode.sampling import draw
from dflash_mlx.draft.base import Proposal


class Verdict(NamedTuple):
    """accepted: scalar int32 a in 0..n. tokens: [n+1] int32, of which the first a+1 are emitted:
    the accepted drafts and one token of the target's own (the bonus)."""

    accepted: mx.array
    tokens: mx.array


def _prefix_length(agrees: mx.array) -> mx.array:
    return mx.cumprod(agrees.astype(mx.int32)).sum().astype(mx.int32)


def accept_greedy(drafts: mx.array, choices: mx.array) -> Verdict:
    """Accept while the draft is the target's own choice.

    drafts [n], choices [n+1] (the target's argmax of every row). Accepted drafts equal the choices
    of their rows, so the choices are what is emitted.
    """
    return Verdict(_prefix_length(drafts == choices[:-1]), choices)


def accept_sampled(proposal: Proposal, probs: mx.array, key: mx.array) -> Verdict:
    """Rejection sampling: emitted tokens have exactly the target's distribution.

    probs [n+1, V]: the target's filtered distribution of every row. Draft i is accepted when
    u·q(d) < p(d) with u uniform in [0, 1). At the first rejection the token comes from the
    residual max(p - q, 0), or from p where the residual is empty; behind n accepted drafts it
    comes from p. A proposal that is not healthy is rejected whole and its q ignored.
    """
    drafts = proposal.tokens
    n, vocab = drafts.shape[0], probs.shape[-1]
    chance, residual_key = mx.random.split(key)
    q = _dense(proposal, vocab)
    at = drafts[:, None]
    p_draft = mx.take_along_axis(probs[:-1], at, axis=-1)[:, 0]
    q_draft = mx.take_along_axis(q, at, axis=-1)[:, 0]
    u = mx.random.uniform(shape=(n,), key=chance)
    accepted = _prefix_length((u * q_draft < p_draft) & proposal.healthy)

    row = mx.take(probs, accepted, axis=0)
    no_draft = mx.zeros((1, vocab), q.dtype)  # the row behind n accepted drafts has no q
    q_row = mx.take(mx.concatenate([q, no_draft]), accepted, axis=0)
    residual = mx.where(proposal.healthy, mx.maximum(row - q_row, 0.0), row)
    residual = mx.where(residual.sum() > 0, residual, row)
    bonus = draw(residual[None], residual_key)
    padded = mx.concatenate([drafts, bonus])
    return Verdict(accepted, mx.where(mx.arange(n + 1) < accepted, padded, bonus))


def _dense(proposal: Proposal, vocab: int) -> mx.array:
    """The drafts' distribution over the whole vocabulary [n, V].

    A proposal without probabilities was drawn greedily: its distribution is a point.
    """
    n = proposal.tokens.shape[0]
    zeros = mx.zeros((n, vocab), mx.float32)
    if proposal.probs is None:
        return mx.put_along_axis(zeros, proposal.tokens[:, None], mx.array(1.0), axis=-1)
    if proposal.candidates is None:
        return proposal.probs
    return mx.put_along_axis(zeros, proposal.candidates, proposal.probs, axis=-1)
