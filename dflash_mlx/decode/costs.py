"""What a cycle costs on this machine, in plain steps: a table by context and by drafts.

It knows numbers only; `decode.calibrate` measures them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

#: share of a newly timed step in what is known of the speed of its kind
NEW_TIMING = 0.1
#: a step's time counts for at most this many times what is known, and at least for its inverse
OUTLIER = 2.0
#: timed plain steps with which cycles are compared: the last ones, and how many it takes
PLAIN_TIMINGS, ENOUGH_TIMINGS = 9, 3
#: they stand for contexts up to this factor away, and for this many steps to come
NEARBY, LASTING = 1.25, 256
#: steps without them, or with none near, before plain steps are asked for, and until the next time
RECENT = 64
#: tables kept: contexts and rows of heads come and go
TABLES = 256
#: no step takes less, and no block has more rows
LEAST_SECONDS, MOST_ROWS = 1e-9, 1024
#: plain steps that a cycle costs at least, whatever was measured: it is one, and drafts besides
LEAST_CYCLE = 1.02


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
        return _between(self.cycles, drafts)


@dataclass(frozen=True)
class HeadCost:
    """What it saves to draft with `reduced` of the `whole` rows of the output head.

    saved: seconds by number of drafts. The head's cost grows evenly with its rows.
    """

    whole: int
    reduced: int
    saved: Mapping[int, float]

    def saving(self, rows: int, drafts: int) -> float:
        """Seconds that a head of `rows` rows saves in a cycle."""
        share = (self.whole - rows) / (self.whole - self.reduced)
        return _between(self.saved, drafts) * share


def _between(points: Mapping[int, float], at: int) -> float:
    """The value at a place, by straight lines; beyond the points as at the nearest."""
    known = sorted(points)
    after = bisect_left(known, at)
    if after == len(known):
        return points[known[-1]]
    right = known[after]
    if right == at or not after:
        return points[right]
    left = known[after - 1]
    share = (at - left) / (right - left)
    return points[left] + share * (points[right] - points[left])


@dataclass(frozen=True)
class Costs:
    """Measurements at one or more contexts, ascending."""

    measured: tuple[Measured, ...]
    head: HeadCost | None = None  # None: the drafter's head is always whole

    def table(self, context: int, rows: int | None = None) -> list[float]:
        """Costs of cycles with 0, 1, ... drafts in plain steps, 0 being a plain step.

        Between measured contexts by straight lines, beyond them as at the nearest.
        rows: of a reduced draft head; None is the whole one.
        """
        left, right, share = self._around(context)
        pairs = zip(self._relative(left, rows), self._relative(right, rows), strict=True)
        return [a + share * (b - a) for a, b in pairs]

    def plain(self, context: int) -> float:
        """Seconds of a plain step, by the same lines."""
        left, right, share = self._around(context)
        return left.plain + share * (right.plain - left.plain)

    def _around(self, context: int) -> tuple[Measured, Measured, float]:
        """The measured contexts on both sides, and the way from the first to the second."""
        contexts = [m.context for m in self.measured]
        after = bisect_left(contexts, context)
        if after == len(contexts) or not after:
            nearest = self.measured[min(after, len(contexts) - 1)]
            return nearest, nearest, 0.0
        left, right = self.measured[after - 1], self.measured[after]
        return left, right, (context - left.context) / (right.context - left.context)

    def _relative(self, measured: Measured, rows: int | None) -> list[float]:
        found = [1.0]
        for drafts in range(1, _most(measured) + 1):
            seconds = measured.cycle(drafts)
            if rows is not None and self.head is not None:
                # What is saved is part of drafting, whatever the clock's noise says.
                seconds -= min(self.head.saving(rows, drafts), measured.drafting)
            found.append(max(seconds / measured.plain, LEAST_CYCLE))
        return found

    @property
    def digest(self) -> str:
        """Names these very numbers."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        measured = [
            {
                "context": m.context,
                "plain": m.plain,
                "cycles": {str(n): seconds for n, seconds in sorted(m.cycles.items())},
                "drafting": m.drafting,
            }
            for m in self.measured
        ]
        if self.head is None:
            return {"measured": measured, "head": None}
        saved = {str(n): seconds for n, seconds in sorted(self.head.saved.items())}
        head = {"whole": self.head.whole, "reduced": self.head.reduced, "saved": saved}
        return {"measured": measured, "head": head}

    @classmethod
    def from_json(cls, document: object) -> Costs:
        """Raises CheckpointError where the document is not what `to_json` makes."""
        try:
            measured = tuple(_measured(m) for m in document["measured"])  # type: ignore[index]
            head = _head(document["head"])  # type: ignore[index]
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"A stored calibration is damaged ({error}). Run `dflash-mlx calibrate` again."
            ) from None
        contexts = [m.context for m in measured]
        blocks = {_most(m) for m in measured}
        if not measured or contexts != sorted(set(contexts)) or len(blocks) > 1:
            raise CheckpointError(
                "A stored calibration has no contexts in order. Run `dflash-mlx calibrate` again."
            )
        return cls(measured, head)


class Refined:
    """Costs corrected by how long steps take while running; frozen, it stays as calibrated.

    What is corrected is the ratio of cycles to plain steps. A cycle's time tells it only beside
    plain steps timed lately near its context: else a context that has grown, or a machine that
    has slowed down, would look like drafting that has become dear.
    """

    def __init__(self, costs: Costs, *, frozen: bool = False) -> None:
        self.costs = costs
        self.frozen = frozen
        self._ratio = 1.0  # of cycles' cost in plain steps to the calibrated one
        self._plain: deque[float] = deque(maxlen=PLAIN_TIMINGS)  # seconds to the calibrated ones
        self._plain_context, self._since_plain, self._since_asked = 0, 0, 0
        self._tables: dict[tuple[int, int | None], list[float]] = {}

    def table(self, context: int, rows: int | None = None) -> list[float]:
        """`Costs.table`, corrected; the context in steps of 64, since it is asked every step."""
        key = context - context % 64, rows
        if key not in self._tables:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            self._tables[key] = self.costs.table(*key)
        plain, *cycles = self._tables[key]
        return [plain, *(max(cost * self._ratio, LEAST_CYCLE) for cost in cycles)]

    def plain_due(self, context: int) -> int:
        """Plain steps to run now, only to be timed: where all steps are cycles, their times tell
        nothing. They are not asked for again at once, whether they could be timed or not.
        """
        if self.frozen or min(self._since_plain, self._since_asked) <= RECENT:
            return 0
        known = self._near(context) and len(self._plain) >= ENOUGH_TIMINGS
        if known and self._since_plain <= LASTING:
            return 0
        self._since_asked = 0
        return ENOUGH_TIMINGS + 1  # the first one waits for what was under way

    def _near(self, context: int) -> bool:
        return self._plain_context / NEARBY <= context <= self._plain_context * NEARBY

    def timed(self, context: int, drafts: int, seconds: float, rows: int | None = None) -> None:
        """A step of this many drafts, with a head of this many rows, took so long."""
        if self.frozen:
            return
        expected = self.costs.plain(context)
        near = self._near(context)
        self._since_plain += 1
        self._since_asked += 1
        if not drafts:
            if not near or self._since_plain > LASTING:
                self._plain.clear()
            self._plain.append(seconds / expected)
            self._plain_context, self._since_plain = context, 0
        elif near and self._since_plain <= LASTING and len(self._plain) >= ENOUGH_TIMINGS:
            expected *= self.costs.table(context, rows)[drafts] * statistics.median(self._plain)
            self._ratio = _moved(self._ratio, seconds / expected)


def _moved(known: float, ratio: float) -> float:
    ratio = min(max(ratio, known / OUTLIER), known * OUTLIER)
    return known + NEW_TIMING * (ratio - known)


def _most(measured: Measured) -> int:
    return max(measured.cycles)


def _measured(entry: Mapping[str, Any]) -> Measured:
    cycles = {int(n): float(seconds) for n, seconds in entry["cycles"].items()}
    found = Measured(int(entry["context"]), float(entry["plain"]), cycles, float(entry["drafting"]))
    seconds: Sequence[float] = [found.plain, found.drafting, *cycles.values()]
    if not all(LEAST_SECONDS < s < float("inf") for s in seconds):
        raise ValueError("times are positive numbers of seconds")
    if not cycles or not 1 <= min(cycles) <= max(cycles) < MOST_ROWS or found.context < 0:
        raise ValueError("cycles have drafts, and contexts rows")
    return found


def _head(entry: Mapping[str, Any] | None) -> HeadCost | None:
    if entry is None:
        return None
    saved = {int(n): float(seconds) for n, seconds in entry["saved"].items()}
    found = HeadCost(int(entry["whole"]), int(entry["reduced"]), saved)
    if not saved or not 0 < found.reduced < found.whole:
        raise ValueError("a reduced head has fewer rows than the whole one")
    if min(saved) < 1 or not all(abs(s) < float("inf") for s in saved.values()):
        raise ValueError("what a head saves is a number of seconds by drafts")
    return found
