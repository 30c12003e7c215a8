"""Paired ratios of generations' spans, and what the bounds say of the medians. Knows no model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.bench.spans import Seconds, TimedRun

# name -> (the bound, whether it is a floor)
BOUNDS = {
    "plain_vs_mlx_lm": (0.97, True),
    "prefill_vs_mlx_lm": (0.95, True),
    "cycle_overhead": (0.05, False),
}
AA_LIMIT = 0.01  # beyond it wall time says more about the machine than about the programs


CLOCKS = Seconds._fields


@dataclass
class Pairs:
    """Paired values by what they compare, on both clocks."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, value: Callable[[str], float]) -> None:
        """One pair's value, made once a clock."""
        for clock in CLOCKS:
            self.values.setdefault(name, {}).setdefault(clock, []).append(value(clock))

    def add_round(self, runs: Mapping[str, TimedRun]) -> None:
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
