"""How many drafts each step of one generation verifies, and with which draft head they are made: a
fixed number with the whole head, or what the policy says.

It sees counts, costs and the seconds of steps; no arrays.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dflash_mlx.decode.costs import Refined
from dflash_mlx.decode.policy import Choice, Head, Policy
from dflash_mlx.decode.words import Words

Trace = Callable[[str], None]

#: the text's own rows of a reduced head are counted in steps of so many
ROW_STEP = 256


class Step(NamedTuple):
    """drafts: 0 is a plain step. rows: frequent tokens of the draft head, None is the whole one."""

    drafts: int
    rows: int | None = None


class Pace(Protocol):
    """Asked before every step that is launched, and told what came of each, in order.

    name: what chooses. calibration: names the stored costs behind the choices, where there are any.
    """

    name: str
    calibration: str | None

    def next(self, context: int, limit: int) -> Step:
        """The next step at this context; limit: how many drafts could still be emitted."""
        ...

    def landed(self, accepted: int, emitted: int, outside: bool = False) -> None:
        """The oldest step asked for that has not landed yet emitted so many tokens.

        outside: the token behind the accepted drafts is none that its draft head knew.
        """
        ...

    def timed(self, seconds: float) -> None:
        """The step that landed last took so long; not told of steps that something else held up."""
        ...


class FixedPace:
    """Always as many drafts as fit into blocks of this size."""

    def __init__(self, block_size: int) -> None:
        self._most = block_size - 1
        self.name, self.calibration = f"blocks of {block_size}", None

    def next(self, context: int, limit: int) -> Step:
        return Step(min(self._most, limit))

    def landed(self, accepted: int, emitted: int, outside: bool = False) -> None:
        pass

    def timed(self, seconds: float) -> None:
        pass


class PolicyPace:
    """What pays, by `Policy`. words: the text so far, where the draft head can be reduced; the
    session keeps it. trace: gets one JSON line a step."""

    def __init__(
        self,
        block_size: int,
        costs: Refined,
        words: Words | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.name, self.calibration = f"auto, blocks of {block_size} at most", costs.costs.digest
        self._policy = Policy(block_size - 1)
        self._costs = costs
        self._words = words
        self._trace = trace
        # contexts, choices and rows of the draft head, of steps under way
        self._asked: deque[tuple[int, Choice, int | None]] = deque()
        self._last: tuple[int, Choice, int | None] | None = None  # of the step that landed last
        self._plain_due = 0  # plain steps that are only there to be timed

    def next(self, context: int, limit: int) -> Step:
        self._plain_due = self._plain_due or self._costs.plain_due(context)
        if self._plain_due:
            self._plain_due -= 1
            choice = Choice(0, 1.0, "timing")
        else:
            choice = self._policy.choose(self._heads(context), limit)
        self._asked.append((context, choice, self._all_rows(choice.rows)))
        return Step(choice.drafts, choice.rows)

    def _heads(self, context: int) -> list[Head]:
        heads = [Head(self._costs.table(context))]
        if self._words is not None and self._costs.costs.head is not None:
            for rows in self._words.sizes:
                costs = self._costs.table(context, self._all_rows(rows))
                heads.append(Head(costs, rows, self._words.covered(rows)))
        return heads

    def _all_rows(self, rows: int | None) -> int | None:
        """Of a draft head: the frequent tokens and those of the text besides."""
        if rows is None or self._words is None:
            return None
        others = len(self._words.others(rows))
        return rows + others - others % ROW_STEP

    def landed(self, accepted: int, emitted: int, outside: bool = False) -> None:
        self._last = context, choice, _ = self._asked.popleft()
        self._policy.record(choice, accepted, emitted, outside)
        if self._trace is None:
            return
        covered = None
        if self._words is not None and choice.rows is not None:
            covered = round(self._words.covered(choice.rows), 4)
        line = {
            "context": context,
            "drafts": choice.drafts,
            "rows": choice.rows,
            "accepted": accepted,
            "emitted": emitted,
            "cost": round(choice.cost, 4),
            "reason": choice.reason,
            "credit": round(self._policy.credit, 4),
            "chances": [round(c, 4) for c in self._policy.acceptance.chances()],
            "covered": covered,
        }
        self._trace(json.dumps(line))

    def timed(self, seconds: float) -> None:
        assert self._last is not None
        context, choice, rows = self._last
        self._costs.timed(context, choice.drafts, seconds, rows)
