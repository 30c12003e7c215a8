"""What a cycle costs on this machine, in plain steps: a table by context and by drafts.

It knows numbers only; `decode.calibrate` measures them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

#: share of a newly timed step in what is known of the speed of its kind
NEW_TIMING = 0.1
#: a step's time counts for at most this many times what is known, and at least for its inverse
OUTLIER = 2.0


@dataclass(frozen=True)
class Measured:
    """Seconds at one context length: of a plain step, of a cycle by number of drafts, and of
    drafting alone (the whole block)."""

    context: int
    plain: float
    cycles: Mapping[int, float]  # drafts >= 1
    drafting: float

    def cycle(self, drafts: int) -> float:
        """Seconds of a cycle; between the measured numbers of drafts by straight lines."""
        known = sorted(self.cycles)
        after = bisect_left(known, drafts)
        if after == len(known):
            return self.cycles[known[-1]]
        right = known[after]
        if right == drafts or not after:
            return self.cycles[right]
        left = known[after - 1]
        share = (drafts - left) / (right - left)
        return self.cycles[left] + share * (self.cycles[right] - self.cycles[left])


@dataclass(frozen=True)
class Costs:
    """Measurements at one or more contexts, ascending."""

    measured: tuple[Measured, ...]

    def table(self, context: int) -> list[float]:
        """Costs of cycles with 0, 1, ... drafts in plain steps, 0 being a plain step.

        Between measured contexts by straight lines, beyond them as at the nearest.
        """
        contexts = [m.context for m in self.measured]
        after = bisect_left(contexts, context)
        if after == len(contexts) or not after:
            return _relative(self.measured[min(after, len(contexts) - 1)])
        left, right = self.measured[after - 1], self.measured[after]
        share = (context - left.context) / (right.context - left.context)
        pairs = zip(_relative(left), _relative(right), strict=True)
        return [a + share * (b - a) for a, b in pairs]

    @property
    def digest(self) -> str:
        """Names these very numbers."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "context": m.context,
                "plain": m.plain,
                "cycles": {str(n): seconds for n, seconds in sorted(m.cycles.items())},
                "drafting": m.drafting,
            }
            for m in self.measured
        ]

    @classmethod
    def from_json(cls, document: object) -> Costs:
        """Raises CheckpointError where the document is not what `to_json` makes."""
        try:
            measured = tuple(_measured(entry) for entry in document)  # type: ignore[attr-defined]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"A stored calibration is damaged ({error}). Run `dflash-mlx calibrate` again."
            ) from None
        contexts = [m.context for m in measured]
        blocks = {_most(m) for m in measured}
        if not measured or contexts != sorted(set(contexts)) or len(blocks) > 1:
            raise CheckpointError(
                "A stored calibration has no contexts in order. Run `dflash-mlx calibrate` again."
            )
        return cls(measured)


class Refined:
    """Costs corrected by how long steps take while running; frozen, it stays as calibrated."""

    def __init__(self, costs: Costs, *, frozen: bool = False) -> None:
        self.costs = costs
        self.frozen = frozen
        self._plain: float | None = None  # seconds of a plain step and of a cycle, each relative
        self._cycle: float | None = None  # to the calibration

    def table(self, context: int) -> list[float]:
        table = self.costs.table(context)
        if self._cycle is None:
            return table
        # Without plain steps so far the machine is taken to be as fast as it was.
        ratio = self._cycle / (self._plain or 1.0)
        return [table[0], *(cost * ratio for cost in table[1:])]

    def timed(self, context: int, drafts: int, seconds: float) -> None:
        """A step of this many drafts took so long."""
        if self.frozen:
            return
        known = self._nearest(context)
        if drafts:
            expected = self.costs.table(context)[drafts] * known.plain
            self._cycle = _moved(self._cycle, seconds / expected)
        else:
            self._plain = _moved(self._plain, seconds / known.plain)

    def _nearest(self, context: int) -> Measured:
        return min(self.costs.measured, key=lambda m: abs(m.context - context))


def _moved(known: float | None, ratio: float) -> float:
    before = 1.0 if known is None else known
    ratio = min(max(ratio, before / OUTLIER), before * OUTLIER)
    return before + NEW_TIMING * (ratio - before)


def _most(measured: Measured) -> int:
    return max(measured.cycles)


def _relative(measured: Measured) -> list[float]:
    cycles = range(1, _most(measured) + 1)
    return [1.0, *(measured.cycle(n) / measured.plain for n in cycles)]


def _measured(entry: Mapping[str, Any]) -> Measured:
    cycles = {int(n): float(seconds) for n, seconds in entry["cycles"].items()}
    found = Measured(int(entry["context"]), float(entry["plain"]), cycles, float(entry["drafting"]))
    seconds: Sequence[float] = [found.plain, found.drafting, *cycles.values()]
    if not cycles or min(cycles) < 1 or not all(0 < s < float("inf") for s in seconds):
        raise ValueError("times are positive numbers of seconds")
    return found
