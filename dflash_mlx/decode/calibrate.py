"""Measures what plain steps and cycles cost, on the pair of models as it will run.

It runs made-up tokens, in chains of steps as the decode loop launches them: the time of a step
does not depend on the tokens, but on what is launched before the step ahead of it is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from dflash_mlx.cache import CacheStack
from dflash_mlx.decode.costs import Costs, HeadCost, Measured
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Guard
from dflash_mlx.decode.step import Chooser, launch
from dflash_mlx.decode.words import sizes
from dflash_mlx.draft.base import DraftCache, Drafter, ReducedHead
from dflash_mlx.features import Features
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

FIRST_CONTEXT, CHUNK = 64, 512
#: steps timed of a kind, behind one that compiles and warms up
REPEATS = 3
#: Rows of which a cycle is measured. MLX's quantized products change their kernel at 6, 10, 12, 13,
#: 14, 15 or 18 rows and beyond, by GPU and size; a step lies between the last row below and the
#: first one there, so both are measured up to 16, or a line would hide which of them pays.
ROWS = (2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 32)

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

    When they are used up within the first context, steps are timed once instead of three times,
    and cycles only with the whole block and with one draft: what lies between is on a line. No
    later context is begun that, by the one before, would not fit into the rest of the time.
    """
    began = clock()
    with guard():
        bench = _Bench(target, drafter, clock, began + seconds)
    context, found, head = FIRST_CONTEXT, [], None
    kinds = sum(rows < block_size for rows in ROWS) + 5
    grown = kinds * (REPEATS + 2)  # rows that measuring needs
    while not found or context + grown + block_size <= target.context_length:
        start = clock()
        with guard():
            bench.fill(context)
            found.append(bench.measure(context, block_size))
            # The head's cost does not depend on the context.
            head = head or bench.measure_head(block_size)
        now = clock()
        context *= 2
        if now - began + 2 * (now - start) > seconds:
            break
    with guard():
        mx.clear_cache()
    return Costs(tuple(found), head)


class _Bench:
    """A sequence of made-up tokens in the caches of both models."""

    def __init__(self, target: Target, drafter: Drafter, clock: Clock, until: float) -> None:
        self.target, self.drafter, self.clock, self.until = target, drafter, clock, until
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
        plain = self._plain()
        cycles = {block_size - 1: self._cycle(block_size - 1)}
        drafting = self._drafting(block_size - 1, None)
        for rows in ROWS:
            # Most of what a curve says is known by its ends.
            if rows < block_size and (rows == 2 or self.clock() < self.until):
                cycles[rows - 1] = self._cycle(rows - 1)
        return Measured(context, plain, cycles, drafting)

    def measure_head(self, block_size: int) -> HeadCost | None:
        """What a head of about a sixth of the rows saves; None where it cannot be reduced."""
        vocab = self.target.vocab_size
        small = [size for size in sizes(vocab) if size <= vocab // 4]
        if self.drafter.head_rows is None or not small:
            return None
        reduced = self.drafter.head_rows.reduced(small[-1])
        saved = {
            drafts: self._drafting(drafts, None) - self._drafting(drafts, reduced)
            for drafts in {1, block_size - 1}
        }
        return HeadCost(vocab, small[-1], saved)

    def _timed(self, step: Callable[[], None]) -> float:
        """Median seconds from one step's end to the next one's; the first step only warms up."""
        step()
        times, before = [], self.clock()
        while len(times) < REPEATS:
            step()
            now = self.clock()
            times.append(now - before)
            before = now
            if now >= self.until:
                break
        return statistics.median(times)

    def _anchor(self) -> mx.array:
        return mx.array([1], mx.int32)

    def _plain(self) -> float:
        """Plain steps, each launched before the one ahead of it is read."""
        features = []

        def start(anchor: mx.array) -> None:
            nonlocal flight
            flight = launch(
                self.target, self.cache, self.drafter, self.draft_cache, self.chooser, anchor, 0
            )

        def step() -> None:
            landing = flight
            self.cache.commit(1)
            features.append(landing.features)
            start(landing.tokens)
            landing.read()

        flight = None
        start(self._anchor())
        seconds = self._timed(step)
        self.cache.commit(0)
        self.drafter.observe(Features.one_behind_another(features), self.draft_cache)
        mx.eval(self.cache.arrays(), self.draft_cache.arrays())
        return seconds

    def _cycle(self, drafts: int) -> float:
        """Whole cycles that keep their anchor's row, which the drafter reads in the next one."""

        def step() -> None:
            flight = launch(
                self.target,
                self.cache,
                self.drafter,
                self.draft_cache,
                self.chooser,
                self._anchor(),
                drafts,
            )
            flight.read()
            assert flight.features is not None
            self.cache.commit(1)
            self.drafter.observe(flight.features.rows(0, 1), self.draft_cache)

        seconds = self._timed(step)
        mx.eval(self.cache.arrays(), self.draft_cache.arrays())
        return seconds

    def _drafting(self, drafts: int, head: ReducedHead | None) -> float:
        def step() -> None:
            sampling = self.chooser.draft_sampling()
            proposal = self.drafter.propose(
                self._anchor(), drafts, sampling, self.draft_cache, head
            )
            mx.eval(proposal.tokens)

        return self._timed(step)
