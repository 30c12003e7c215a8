"""How many drafts each step of one generation verifies: a fixed number, or what the policy says.

It sees counts, costs and the seconds of steps; no arrays.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dflash_mlx.decode.costs import Refined
from dflash_mlx.decode.policy import Choice, Policy

Trace = Callable[[str], None]


class Pace(Protocol):
    """Asked before every step that is launched, and told what came of each, in order.

    name: what chooses. calibration: names the stored costs behind the choices, where there are any.
    """

    name: str
    calibration: str | None

    def drafts(self, context: int, limit: int) -> int:
        """Drafts of the next step at this context; limit: how many could still be emitted."""
        ...

    def landed(self, accepted: int, emitted: int) -> None:
        """The oldest step asked for that has not landed yet emitted so many tokens."""
        ...

    def timed(self, context: int, drafts: int, seconds: float) -> None:
        """A step took so long, the reader's own time left out."""
        ...


class FixedPace:
    """Always as many drafts as fit into blocks of this size."""

    def __init__(self, block_size: int) -> None:
        self._most = block_size - 1
        self.name, self.calibration = f"blocks of {block_size}", None

    def drafts(self, context: int, limit: int) -> int:
        return min(self._most, limit)

    def landed(self, accepted: int, emitted: int) -> None:
        pass

    def timed(self, context: int, drafts: int, seconds: float) -> None:
        pass


class PolicyPace:
    """The block that pays, by `Policy`. trace: gets one JSON line a step."""

    def __init__(self, block_size: int, costs: Refined, trace: Trace | None = None) -> None:
        self.name, self.calibration = f"auto, blocks of {block_size} at most", costs.costs.digest
        self._policy = Policy(block_size - 1)
        self._costs = costs
        self._trace = trace
        self._asked: deque[tuple[int, Choice]] = deque()  # contexts and choices under way

    def drafts(self, context: int, limit: int) -> int:
        choice = self._policy.choose(self._costs.table(context), limit)
        self._asked.append((context, choice))
        return choice.drafts

    def landed(self, accepted: int, emitted: int) -> None:
        context, choice = self._asked.popleft()
        self._policy.record(choice, accepted, emitted)
        if self._trace is None:
            return
        line = {
            "context": context,
            "drafts": choice.drafts,
            "accepted": accepted,
            "emitted": emitted,
            "cost": round(choice.cost, 4),
            "reason": choice.reason,
            "credit": round(self._policy.credit, 4),
            "chances": [round(c, 4) for c in self._policy.acceptance.chances()],
        }
        self._trace(json.dumps(line))

    def timed(self, context: int, drafts: int, seconds: float) -> None:
        self._costs.timed(context, drafts, seconds)
