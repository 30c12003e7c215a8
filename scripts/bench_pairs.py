"""Spans of generations, paired ratios of them, and what the bounds say of the medians.

Knows no model. Clocks: wall seconds, and CPU seconds of all threads of the process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# name -> (the bound, whether it is a floor)
BOUNDS = {
    "plain_vs_mlx_lm": (0.97, True),
    "prefill_vs_mlx_lm": (0.95, True),
    "cycle_overhead": (0.05, False),
}
AA_LIMIT = 0.01  # beyond it wall time says more about the machine than about the programs


class Seconds(NamedTuple):
    """One span, or one moment, on both clocks."""

    wall: float
    cpu: float

    def since(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


CLOCKS = Seconds._fields


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Run:
    """One generation as its reader sees it, whoever made it.

    prefill: from the call to the first token. decode: from the first token to the last, in which
    `behind_first` tokens arrived.
    """

    tokens: list[int]
    prefill: Seconds
    decode: Seconds
    behind_first: int

    def rate(self, clock: str) -> float:
        """Tokens behind the first one a second."""
        return self.behind_first / getattr(self.decode, clock)


def timed(
    generate: Callable[[], Iterable[Sequence[int]]], clock: Callable[[], Seconds] = now
) -> Run:
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
    return Run(tokens, first.since(start), last.since(first), len(tokens) - at_first)


@dataclass
class Pairs:
    """Paired values by what they compare, on both clocks."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, value: Callable[[str], float]) -> None:
        """One pair's value, made once a clock."""
        for clock in CLOCKS:
            self.values.setdefault(name, {}).setdefault(clock, []).append(value(clock))

    def add_round(self, runs: Mapping[str, Run]) -> None:
        """Ratios of one round: plain twice (`plain` and `again`), mlx_lm and dflash where present.

        A ratio above 1 means that the one named first is faster.
        """
        plains = [runs["plain"], runs["again"]]
        self.add("aa", lambda c: plains[0].rate(c) / plains[1].rate(c))
        if other := runs.get("mlx_lm"):
            self.add("plain_vs_mlx_lm", lambda c: _mean(p.rate(c) / other.rate(c) for p in plains))
            self.add(
                "prefill_vs_mlx_lm",
                lambda c: _mean(getattr(other.prefill, c) / getattr(p.prefill, c) for p in plains),
            )
        if own := runs.get("dflash"):
            self.add("dflash_vs_plain", lambda c: _mean(own.rate(c) / p.rate(c) for p in plains))

    def add_cycle(self, cycle: Seconds, forwards: Seconds) -> None:
        """The share of a cycle that is not spent in the forwards."""
        self.add("cycle_overhead", lambda c: 1 - getattr(forwards, c) / getattr(cycle, c))

    def median(self, name: str, clock: str) -> float | None:
        found = self.values.get(name, {}).get(clock)
        return statistics.median(found) if found else None

    def quartiles(self, name: str, clock: str) -> tuple[float, float]:
        found = self.values[name][clock]
        if len(found) == 1:
            return found[0], found[0]
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
        return low, high


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def deciding_clock(pairs: Pairs) -> str:
    """Wall time, unless plain decoding against itself already shows that it cannot be trusted."""
    aa = pairs.median("aa", "wall")
    return "wall" if aa is not None and abs(aa - 1) <= AA_LIMIT else "cpu"


def steady(pairs: Pairs) -> bool:
    """Whether the deciding clock finds plain decoding as fast as itself."""
    aa = pairs.median("aa", deciding_clock(pairs))
    return aa is not None and abs(aa - 1) <= AA_LIMIT


def judge(pairs: Pairs, wanted: Iterable[str] = BOUNDS) -> dict[str, dict[str, Any]]:
    """The wanted bounds, each with its value and whether it is kept; without a value it is not."""
    clock, verdicts = deciding_clock(pairs), {}
    for name in wanted:
        bound, floor = BOUNDS[name]
        value = pairs.median(name, clock)
        kept = value is not None and (value >= bound if floor else value <= bound)
        verdicts[name] = {"value": value, "at_least" if floor else "at_most": bound, "pass": kept}
    return verdicts
