"""What a cycle of the decode loop costs beyond the forwards of target and drafter.

Cycles of the real loop and the same forwards alone take turns, each with its own caches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager

import mlx.core as mx
from bench_pairs import Seconds, now

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import PREFILL_CHUNK, Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Drafter
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

Guard = Callable[[], AbstractContextManager[object]]


class Forwards:
    """The forwards of one sequence's cycles and nothing else: no verdict, no statistics."""

    def __init__(self, target: Target, drafter: Drafter, guard: Guard) -> None:
        self._target, self._drafter, self._guard = target, drafter, guard
        self._cache, self._context = target.make_cache(), drafter.make_cache()
        self._features: mx.array | None = None

    def prefill(self, prompt: list[int]) -> None:
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
            if self._features is not None:
                self._drafter.observe(self._features, self._context)
            first = mx.array([anchor], mx.int32)
            proposal = self._drafter.propose(first, drafts, None, self._context)
            segment = Segment(mx.concatenate([first, proposal.tokens]), self._cache)
            hidden, features = self._target.forward([segment], self._drafter.taps)
            logits = self._target.logits(hidden[0])
            mx.async_eval(logits)
            mx.eval(logits)
        spent = now().since(start)
        assert features is not None
        self._cache.commit(kept)
        self._features = features[:, :kept]
        return spent


def paired_cycles(
    target: Target, drafter: Drafter, prompt: list[int], max_tokens: int, end_ids: Collection[int]
) -> Iterator[tuple[Seconds, Seconds]]:
    """(a cycle of the real greedy loop, its forwards alone) for every cycle but the last one.

    A cycle is the wait for a launched step and everything from there to the next yield: verdict,
    commit, observe, statistics and the launch behind it.
    """
    stream = mx.new_stream(mx.default_device())

    def guard() -> AbstractContextManager[object]:
        return mx.stream(stream)

    alone = Forwards(target, drafter, guard)
    alone.prefill(prompt)
    stats = GenerationStats()
    run = Session(target, drafter, guard).run(prompt, SamplingParams(), max_tokens, end_ids, stats)
    anchor = next(run)[-1]
    former: tuple[Seconds, int, int, int] | None = None
    while stats.finish_reason == "abandoned":
        start = now()
        mx.synchronize(stream)
        waited = now().since(start)
        if former is not None:  # only now, so that nothing else runs beside the forwards
            cycle, *what = former
            yield cycle, alone.cycle(*what)
        drafted = stats.drafted
        start = now()
        tokens = next(run)
        landed = now().since(start)
        if stats.drafted == drafted:  # the last token, in a plain step
            break
        cycle = Seconds(waited.wall + landed.wall, waited.cpu + landed.cpu)
        former = cycle, anchor, stats.drafted - drafted, len(tokens)
        anchor = tokens[-1]
    run.close()
