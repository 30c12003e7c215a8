"""The two forwards of a DFlash cycle and nothing else: no verdict, no statistics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.bench.spans import Seconds, now
from dflash_mlx.decode.session import PREFILL_CHUNK, Guard
from dflash_mlx.draft.base import Drafter
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

#: cycles of which the drafter's share is the median, behind one that warms up
SHARE_CYCLES = 5


class Forwards:
    """Drafting and verifying of one sequence, with caches of its own."""

    def __init__(self, target: Target, drafter: Drafter, guard: Guard) -> None:
        self._target, self._drafter, self._guard = target, drafter, guard
        self._cache, self._context = target.make_cache(), drafter.make_cache()
        self._features: mx.array | None = None

    def prefill(self, prompt: Sequence[int]) -> None:
        with self._guard():
            for start in range(0, len(prompt), PREFILL_CHUNK):
                ids = mx.array(prompt[start : start + PREFILL_CHUNK], mx.int32)
                segment = Segment(ids, self._cache)
                _, features = self._target.forward([segment], self._drafter.taps)
                self._cache.commit(segment.rows)
                assert features is not None
                self._drafter.observe(features, self._context)
                mx.eval(self._cache.arrays(), self._context.arrays())

    def cycle(self, anchor: int, drafts: int, kept: int) -> Seconds:
        """Observe what the last cycle kept, propose, verify; then `kept` rows are committed."""
        start = now()
        with self._guard():
            logits = self._verify(self._draft(anchor, drafts))
            mx.async_eval(logits)
            mx.eval(logits)
        spent = now().since(start)
        self._keep(kept)
        return spent

    def halves(self, anchor: int, drafts: int) -> tuple[Seconds, Seconds]:
        """A cycle whose halves wait for each other: drafting alone, verifying alone."""
        start = now()
        with self._guard():
            block = self._draft(anchor, drafts)
            mx.eval(block, self._context.arrays())
            between = now()
            mx.eval(self._verify(block))
        end = now()
        self._keep(1)
        return between.since(start), end.since(between)

    def _draft(self, anchor: int, drafts: int) -> mx.array:
        """The block's tokens [1 + drafts]."""
        if self._features is not None:
            self._drafter.observe(self._features, self._context)
        first = mx.array([anchor], mx.int32)
        proposal = self._drafter.propose(first, drafts, None, self._context)
        return mx.concatenate([first, proposal.tokens])

    def _verify(self, block: mx.array) -> mx.array:
        """The target's logits [rows, V]."""
        segment = Segment(block, self._cache)
        hidden, self._features = self._target.forward([segment], self._drafter.taps)
        return self._target.logits(hidden.squeeze(0))

    def _keep(self, rows: int) -> None:
        assert self._features is not None
        self._cache.commit(rows)
        self._features = self._features[:, :rows]


def drafter_share(
    target: Target, drafter: Drafter, guard: Guard, prompt: Sequence[int], drafts: int
) -> float:
    """Share of a cycle's wall time behind `prompt` that drafting takes: the median of some cycles.

    Tokens of the prompt stand in for what would be generated: time does not depend on them.
    """
    forwards = Forwards(target, drafter, guard)
    forwards.prefill(prompt)
    shares = []
    for number in range(SHARE_CYCLES + 1):
        draft, verify = forwards.halves(prompt[-1], drafts)
        if number:
            shares.append(draft.wall / (draft.wall + verify.wall))
    return statistics.median(shares)
