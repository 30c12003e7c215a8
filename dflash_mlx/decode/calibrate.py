"""Measures what plain steps and cycles cost, on the pair of models as it will run.

It runs made-up tokens: the time of a step does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.costs import Costs, Measured
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Guard
from dflash_mlx.decode.step import Chooser, launch
from dflash_mlx.draft.base import DraftCache, Drafter
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

FIRST_CONTEXT, CHUNK = 64, 512
REPEATS = 3
#: rows of which a cycle is measured: denser where matrix kernels change with the rows
ROWS = (2, 3, 4, 6, 8, 10, 12, 13, 14, 16, 20, 24, 32)

Clock = Callable[[], float]


def calibrate(
    target: Target,
    drafter: Drafter,
    guard: Guard,
    *,
    block_size: int,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Costs at contexts of 64 tokens, then doubling while `seconds` are not used up.

    The first context is always measured; no context is begun that, by the one before, would not
    fit into the rest of the time.
    """
    began = clock()
    with guard():
        bench = _Bench(target, drafter, clock)
    context, found = FIRST_CONTEXT, []
    grown = (len(ROWS) + 1) * (REPEATS + 1) + block_size  # rows that measuring needs
    while not found or context + grown <= target.context_length:
        start = clock()
        with guard():
            bench.fill(context)
            found.append(bench.measure(context, block_size))
        now = clock()
        context *= 2
        if now - began + 2 * (now - start) > seconds:
            break
    with guard():
        mx.clear_cache()
    return Costs(tuple(found))


class _Bench:
    """A sequence of made-up tokens in the caches of both models."""

    def __init__(self, target: Target, drafter: Drafter, clock: Clock) -> None:
        self.target, self.drafter, self.clock = target, drafter, clock
        self.cache: CacheStack = target.make_cache()
        self.draft_cache: DraftCache = drafter.make_cache()
        self.chooser = Chooser(SamplingParams(), mx.random.key(0), target.vocab_size)

    def fill(self, length: int) -> None:
        """Let the sequence grow to this length."""
        while self.cache.length < length:
            start = self.cache.length
            ids = mx.arange(start, min(start + CHUNK, length), dtype=mx.int32)
            segment = Segment(ids % self.target.vocab_size, self.cache)
            _, features = self.target.forward([segment], self.drafter.taps)
            assert features is not None
            self.cache.commit(segment.rows)
            self.drafter.observe(features, self.draft_cache)
            mx.eval(self.cache.arrays(), self.draft_cache.arrays())

    def measure(self, context: int, block_size: int) -> Measured:
        rows = sorted({block_size, *(r for r in ROWS if r < block_size)})
        plain = self._median(self._plain)
        cycles = {r - 1: self._median(lambda r=r: self._cycle(r - 1)) for r in rows}
        drafting = self._median(lambda: self._draft(block_size - 1))
        return Measured(context, plain, cycles, drafting)

    def _median(self, step: Callable[[], None]) -> float:
        step()  # compiles and warms up
        times = []
        for _ in range(REPEATS):
            start = self.clock()
            step()
            times.append(self.clock() - start)
        return statistics.median(times)

    def _plain(self) -> None:
        anchor = mx.array([1], mx.int32)
        flight = launch(self.target, self.cache, None, None, self.chooser, anchor, 0)
        flight.read()
        self.cache.commit(0)

    def _cycle(self, drafts: int) -> None:
        """A whole cycle that keeps its anchor's row."""
        anchor = mx.array([1], mx.int32)
        flight = launch(
            self.target, self.cache, self.drafter, self.draft_cache, self.chooser, anchor, drafts
        )
        flight.read()
        assert flight.features is not None
        self.cache.commit(1)
        self.drafter.observe(flight.features.rows(0, 1), self.draft_cache)
        mx.eval(self.cache.arrays(), self.draft_cache.arrays())

    def _draft(self, drafts: int) -> None:
        anchor = mx.array([1], mx.int32)
        proposal = self.drafter.propose(
            anchor, drafts, self.chooser.draft_sampling(), self.draft_cache
        )
        mx.eval(proposal.tokens)
