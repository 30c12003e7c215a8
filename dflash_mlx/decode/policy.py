"""How many drafts the next cycle verifies, so that the most tokens come out a second.

It knows counts and stored costs only: no clock, no arrays. Every decision is a function of them,
so that a seed reproduces a run. A plain step is the unit of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Acceptance expected of the first draft before anything is known, and how many trials that is
#: worth: enough that a first refusal, which happens to good drafters too, is no verdict.
PRIOR, PRIOR_TRIALS = 0.8, 4.0
#: Trials that the acceptance of the position before is worth to a position.
LIKE_BEFORE = 3.0
#: What a trial keeps of the trials before it at the same position: about 50 count.
KEPT = 0.98
#: What a cycle keeps of the counts of positions it did not reach, so that they are tried again.
KEPT_UNTRIED = 0.985
#: Another block or head is taken when it is expected to be this much faster: neighbours often tie.
GAIN = 1.02
#: What a generation may take more than plain decoding in all, a token: 1 / 0.97 - 1, rounded down.
#: It is granted in advance for this many tokens, so from there on no less than 0.97 is possible.
LOSS, LOSS_SPAN = 0.0309, 64
#: Share of the advance, and of what drafting has earned beyond it, that one cycle may lose. A
#: cycle that stakes all of it can leave nothing to look with for the next 64 tokens.
STAKE, EARNED_STAKE = 0.2, 0.6
#: Savings kept to pay for unlucky cycles; more of them would make a change of text cost more.
MOST_CREDIT = 16.0
#: What a run of cycles has gained lately counts up to this; while it does, the run goes on.
MOST_RUN = 1.5
#: Plain steps before drafting is looked at again: at first, and at most after doubling.
FIRST_REST, LONGEST_REST = 12, 256
#: Cycles of a look where the credit allows: one refusal is common where drafting pays, too.
LOOK_CYCLES = 2
#: Plain steps that a run of cycles has to gain for its rest to be a short one again.
WORTH_IT = 1.0
#: Trials a look leaves of the past, so that a changed text shows at once.
LOOK_TRIALS = 4.0


class Acceptance:
    """Chance that a draft is accepted, given that the drafts before it were, for each position.

    A cycle that accepted a of n drafts says something of positions 1..a+1 only: the target has
    not judged the drafts behind its first correction.
    """

    def __init__(self, drafts: int) -> None:
        self.tried = [0.0] * drafts
        self.agreed = [0.0] * drafts
        self.tried[0], self.agreed[0] = PRIOR_TRIALS, PRIOR_TRIALS * PRIOR

    def record(self, drafts: int, accepted: int, outside: bool = False) -> None:
        """outside: the correction was a token the draft head did not know, so it says nothing."""
        judged = accepted if outside else min(accepted + 1, drafts)
        for i in range(len(self.tried)):
            kept = KEPT if i < judged else KEPT_UNTRIED
            self.tried[i] = self.tried[i] * kept + (i < judged)
            self.agreed[i] = self.agreed[i] * kept + (i < accepted)

    def forget(self, trials: float) -> None:
        """Keep the rates and at most this many trials behind each."""
        for i, tried in enumerate(self.tried):
            if tried > trials:
                self.agreed[i] *= trials / tried
                self.tried[i] = trials

    def chances(self) -> list[float]:
        """By position; where trials are few, a position is expected to be like the one before."""
        found: list[float] = []
        before = PRIOR
        for tried, agreed in zip(self.tried, self.agreed, strict=True):
            like_before = LIKE_BEFORE if found else 0.0
            before = (agreed + like_before * before) / (tried + like_before)
            found.append(before)
        return found

    def tokens(self, covered: float = 1.0) -> list[float]:
        """Tokens expected of a cycle with n drafts, bonus included, for n = 0, 1, ...

        covered: chance that the draft head knows the token at all.
        """
        expected, reached = [1.0], 1.0
        for chance in self.chances():
            reached *= chance * covered
            expected.append(expected[-1] + reached)
        return expected


@dataclass(frozen=True)
class Head:
    """A draft head to choose.

    costs[n]: of a cycle with n drafts, in plain steps. rows: None is the whole head.
    covered: chance that it knows the next token.
    """

    costs: Sequence[float]
    rows: int | None = None
    covered: float = 1.0


@dataclass(frozen=True)
class Choice:
    """drafts: how many to verify, 0 is a plain step. cost: of that in plain steps. rows: of the
    draft head, None is the whole one."""

    drafts: int
    cost: float
    reason: str  # "drafting", "look", "resting", "plain", "timing"
    rows: int | None = None


class _Plan(NamedTuple):
    speed: float  # expected tokens a plain step's time
    drafts: int
    head: Head

    def choice(self, reason: str) -> Choice:
        return Choice(self.drafts, self.head.costs[self.drafts], reason, self.head.rows)


class Policy:
    """The choice of each step of one generation.

    drafts: most drafts a cycle may verify. A cycle runs only while `credit` covers its loss if all
    its drafts are refused; this bounds what a generation can lose against plain decoding.
    """

    def __init__(self, drafts: int) -> None:
        self.acceptance = Acceptance(drafts)
        self.block = 0  # drafts of the cycles in use, 0 while resting
        self.tokens = 0  # emitted by recorded steps
        self.credit = LOSS * LOSS_SPAN  # plain steps that may be lost now
        self._rows: int | None = None  # of the head in use
        self._rest = FIRST_REST
        self._look_at = 0  # tokens emitted when drafting is looked at next
        # plain steps gained since the last look, lately and in all, and its cycles
        self._run, self._gained, self._cycles = 0.0, 0.0, 0

    def choose(self, heads: Sequence[Head], limit: int) -> Choice:
        """The next step. heads: the whole one first; limit: drafts still useful."""
        if not self.block and self.tokens < self._look_at:
            return Choice(0, 1.0, "resting")
        if not self.block:
            self.acceptance.forget(LOOK_TRIALS)
        speeds = [self._speeds(head) for head in heads]
        plans = self._affordable(heads, speeds, min(limit, len(self.acceptance.tried)))
        if not plans:
            return Choice(0, 1.0, "plain")
        best = max(plans, key=lambda plan: plan.speed)
        if not self.block:
            self._run, self._gained, self._cycles = 0.0, 0.0, 0
            self.block, self._rows = best.drafts, best.head.rows
            return best.choice("look")
        at = next(i for i, head in enumerate(heads) if head.rows == self._rows)
        here = speeds[at][min(self.block, len(speeds[at]) - 1)]
        losing = max(here, best.speed) < 1
        looked = self._cycles >= LOOK_CYCLES or self.credit < LOSS * LOSS_SPAN
        if losing and self._run <= 0 and looked:
            self._stand_down()
            return Choice(0, 1.0, "resting")
        kept = [p for p in plans if p.head is heads[at] and p.drafts <= self.block]
        if not kept or best.speed > GAIN * kept[-1].speed:
            self.block, self._rows = best.drafts, best.head.rows
            return best.choice("drafting")
        return kept[-1].choice("drafting")

    def record(self, choice: Choice, accepted: int, emitted: int, outside: bool = False) -> None:
        """What came of a choice: drafts accepted, tokens emitted; outside as in `Acceptance`."""
        before = max(self.tokens, LOSS_SPAN)
        self.tokens += emitted
        granted = LOSS * (max(self.tokens, LOSS_SPAN) - before)
        gain = emitted - choice.cost
        self.credit = min(self.credit + granted + gain, MOST_CREDIT)
        if choice.drafts:
            self._run = min(self._run + gain, MOST_RUN)
            self._gained += gain
            self._cycles += 1
            self.acceptance.record(choice.drafts, accepted, outside)

    def _affordable(
        self, heads: Sequence[Head], speeds: Sequence[Sequence[float]], most: int
    ) -> list[_Plan]:
        """Cycles that may run now, by head and then by drafts; the cheapest may stake all."""
        advance = LOSS * LOSS_SPAN
        stake = STAKE * min(self.credit, advance) + EARNED_STAKE * max(0.0, self.credit - advance)
        cheapest = min((cost - 1 for head in heads for cost in head.costs[1:2]), default=0.0)
        stake = min(max(stake, cheapest), self.credit)
        return [
            _Plan(speed, drafts, head)
            for head, found in zip(heads, speeds, strict=True)
            for drafts, speed in enumerate(found[: most + 1])
            if drafts and head.costs[drafts] - 1 <= stake
        ]

    def _stand_down(self) -> None:
        """Rest, and longer each time that drafting gained nothing."""
        self.block = 0
        if self._gained > WORTH_IT:
            self._rest = FIRST_REST
        self._look_at = self.tokens + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    def _speeds(self, head: Head) -> list[float]:
        """Expected tokens a plain step's time, by drafts."""
        tokens = self.acceptance.tokens(head.covered)
        return [a / b for a, b in zip(tokens, head.costs, strict=False)]
