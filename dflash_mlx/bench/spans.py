"""Spans of one generation as its reader sees it, on two clocks. Knows no model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Seconds(NamedTuple):
    """One span, or one moment: wall seconds, and CPU seconds of all threads of the process."""

    wall: float
    cpu: float

    def since(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class TimedRun:
    """One generation, whoever made it.

    prefill: from the call to the first token. decode: from the first token to the last, in which
    `behind_first` tokens arrived.
    """

    tokens: list[int]
    prefill: Seconds
    decode: Seconds
    behind_first: int

    def rate(self, clock: str) -> float | None:
        """Tokens behind the first one a second; None where there are none."""
        return self.behind_first / getattr(self.decode, clock) if self.behind_first else None


def timed(
    generate: Callable[[], Iterable[Sequence[int]]], clock: Callable[[], Seconds] = now
) -> TimedRun:
    """Read a generation to its end; `generate` yields lists of new tokens, empty ones allowed."""
    gc.collect()
    tokens: list[int] = []
    moments: list[Seconds] = []
    at_first = 0
    start = clock()
    for new in generate():
        if new:
            moments.append(clock())
            tokens += new
            at_first = at_first or len(tokens)
    if not moments:
        raise ValueError("a generation gave no token")
    first, last = moments[0], moments[-1]
    return TimedRun(tokens, first.since(start), last.since(first), len(tokens) - at_first)
