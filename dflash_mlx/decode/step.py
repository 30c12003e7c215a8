"""One step of decoding as a lazy graph: draft, verify, accept; with no drafts a plain step.

    anchor -propose-> d_1..d_n;  [anchor d_1..d_n] -verify-> rows 0..n -accept-> verdict
Nothing here reads an array: `Flight.read` is the one host synchronisation of a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.accept import Verdict, accept_greedy, accept_sampled
from dflash_mlx.decode.sampling import History, SamplingParams, draw, penalise, probabilities
from dflash_mlx.draft.base import DraftCache, Drafter, DraftSampling, Proposal, ReducedHead
from dflash_mlx.errors import CheckpointError
from dflash_mlx.features import Features
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment


@dataclass(frozen=True)
class Flight:
    """A launched step. The target's cache holds its drafted + 1 rows as pending."""

    drafted: int
    tokens: mx.array  # [drafted + 1] int32, lazy
    packed: mx.array  # [accepted, healthy, sound, tokens...] int32: everything the host reads
    features: Features | None  # [1, drafted + 1, T·H]
    head: ReducedHead | None = None  # that drafted, None is the whole one

    def read(self) -> tuple[int, bool, list[int]]:
        """Wait for the step: drafts accepted, proposal healthy, the accepted + 1 emitted tokens.

        CheckpointError when the target's logits were no numbers.
        """
        accepted, healthy, sound, *tokens = self.packed.tolist()
        if not sound:
            raise unsound()
        return accepted, bool(healthy), tokens[: accepted + 1]


class Chooser:
    """Turns the target's logits into tokens under one generation's settings."""

    def __init__(self, params: SamplingParams, key: mx.array, vocab_size: int) -> None:
        self.params = params
        self._key = key
        penalised = params.repetition_penalty != 1
        self.history = History(vocab_size) if penalised else None

    def next_key(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def draft_sampling(self) -> DraftSampling | None:
        """Drafts are drawn through the target's own filters; penalties see the text so far."""
        params = self.params
        if params.greedy:
            return None
        seen = self.history.rows(None) if self.history else None

        def filtered(logits: mx.array, ids: mx.array | None = None) -> mx.array:
            if seen is not None:
                known = seen if ids is None else mx.take(seen, ids, axis=-1)
                logits = penalise(logits, known, params.repetition_penalty)
            return probabilities(logits, params)

        return DraftSampling(params.temperature, self.next_key(), filtered)

    def judge(self, logits: mx.array, proposal: Proposal | None) -> tuple[Verdict, mx.array]:
        """logits [n+1, V] of the verified rows -> verdict over the proposal's n drafts, and
        whether the numbers that chose the emitted tokens are finite (a lazy bool)."""
        if self.history is not None:
            drafts = proposal.tokens if proposal else None
            seen = self.history.rows(drafts)
            logits = penalise(logits, seen, self.params.repetition_penalty)
        if self.params.greedy:
            choices = mx.argmax(logits, axis=-1).astype(mx.int32)
            if proposal is None:
                verdict = Verdict(mx.array(0, mx.int32), choices)
            else:
                verdict = accept_greedy(proposal.tokens, choices)
            return verdict, _sound(logits, verdict)
        probs = probabilities(logits, self.params)
        if proposal is None:
            verdict = Verdict(mx.array(0, mx.int32), draw(probs, self.next_key()))
        else:
            verdict = accept_sampled(proposal, probs, self.next_key())
        return verdict, _sound(probs, verdict)


def _sound(values: mx.array, verdict: Verdict) -> mx.array:
    """Whether logits or probabilities [n+1, V] are finite at the emitted tokens.

    One number a row suffices: where a NaN keeps a token from being chosen, it does no harm, and
    where nothing can be chosen, the number at the token that comes out is none.
    """
    chosen = mx.take_along_axis(values, verdict.tokens[:, None], axis=-1)[:, 0]
    emitted = mx.arange(chosen.shape[0]) <= verdict.accepted
    return mx.all(mx.isfinite(chosen) | ~emitted)


def unsound() -> CheckpointError:
    """The error for logits that are NaN or infinite."""
    return CheckpointError(
        "The model's logits are NaN or infinite, so that no token can be chosen; its weights are "
        "broken or too large for this number type: fetch it again, or load it with another --dtype."
    )


def launch(
    target: Target,
    cache: CacheStack,
    drafter: Drafter | None,
    draft_cache: DraftCache | None,
    chooser: Chooser,
    anchor: mx.array,
    drafts: int,
    head: ReducedHead | None = None,
) -> Flight:
    """Build one step behind `anchor` ([1] int32, lazy allowed) and start it.

    `drafts` 0 is a plain step; features are still tapped while there is a drafter, so that its
    context stays complete. head: what to draft with, None is the drafter's whole one.
    """
    proposal = None
    ids = anchor
    if drafts:
        assert drafter is not None
        assert draft_cache is not None
        proposal = drafter.propose(anchor, drafts, chooser.draft_sampling(), draft_cache, head)
        # An unhealthy proposal may hold any integer; the target must still read a real embedding.
        clipped = mx.clip(proposal.tokens, 0, target.vocab_size - 1)
        proposal = Proposal(clipped, proposal.probs, proposal.healthy, proposal.candidates)
        ids = mx.concatenate([anchor, clipped])
    hidden, features = target.forward([Segment(ids, cache)], drafter.taps if drafter else ())
    verdict, sound = chooser.judge(target.logits(hidden.squeeze(0)), proposal)
    healthy = proposal.healthy if proposal else mx.array(True)
    flags = mx.stack([verdict.accepted, healthy.astype(mx.int32), sound.astype(mx.int32)])
    packed = mx.concatenate([flags, verdict.tokens])
    mx.async_eval(packed)
    return Flight(drafts, verdict.tokens, packed, features, head if drafts else None)
