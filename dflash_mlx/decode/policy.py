"""How many drafts the next cycle verifies, so that the most tokens come out a second.

It knows counts and stored costs only: no clock, no arrays. Every decision is a function of them,
so that a seed reproduces a run. A plain step is the unit of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Acceptance expected of a position nothing is known about, and how many trials that is worth.
PRIOR, PRIOR_TRIALS = 0.7, 3.0
#: What a trial keeps of the trials before it at the same position: about 50 count.
KEPT = 0.98
#: What a cycle keeps of the counts of positions it did not reach, so that they are tried again.
KEPT_UNTRIED = 0.985
#: Another block is taken when it is expected to be this much faster: neighbours often tie.
GAIN = 1.02
#: Share of plain decoding's time that may be lost in all, over this many tokens or more.
LOSS, LOSS_SPAN = 0.025, 128
#: Savings kept to pay for unlucky cycles; more of them would make a change of text cost more.
MOST_CREDIT = 12.0
#: Plain steps before drafting is looked at again: at first, and at most after doubling.
FIRST_REST, LONGEST_REST = 16, 512
#: Expected speed, plain being 1, above which a rest is short: little is lost either way.
NEAR = 0.95
#: Trials a look leaves of the past, so that a changed text shows at once.
LOOK_TRIALS = 5.0


class Acceptance:
    """Chance that a draft is accepted, given that the drafts before it were, for each position.

    A cycle that accepted a of n drafts says something of positions 1..a+1 only: the target has
    not judged the drafts behind its first correction.
    """

    def __init__(self, drafts: int) -> None:
        self.tried = [0.0] * drafts
        self.agreed = [0.0] * drafts

    def record(self, drafts: int, accepted: int) -> None:
        judged = min(accepted + 1, drafts)
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
        found, before = [], PRIOR
        for tried, agreed in zip(self.tried, self.agreed, strict=True):
            before = (agreed + PRIOR_TRIALS * before) / (tried + PRIOR_TRIALS)
            found.append(before)
        return found

    def tokens(self) -> list[float]:
        """Tokens expected of a cycle with n drafts, bonus included, for n = 0, 1, ..."""
        expected, reached = [1.0], 1.0
        for chance in self.chances():
            reached *= chance
            expected.append(expected[-1] + reached)
        return expected


@dataclass(frozen=True)
class Choice:
    """drafts: how many to verify, 0 is a plain step. cost: of that in plain steps."""

    drafts: int
    cost: float
    reason: str  # "drafting", "look", "resting", "plain"


class Policy:
    """The choice of each step of one generation.

    drafts: most drafts a cycle may verify. While `credit` covers the loss of a cycle whose drafts
    are all refused, it may run; this bounds what a generation can lose against plain decoding.
    """

    def __init__(self, drafts: int) -> None:
        self.acceptance = Acceptance(drafts)
        self.block = 0  # drafts of the cycles in use, 0 while resting
        self.tokens = 0  # emitted by recorded steps
        self.credit = LOSS * LOSS_SPAN  # plain steps that may be lost now
        self._rest = FIRST_REST
        self._credit_at_look = self.credit
        self._look_at = 0  # tokens emitted when drafting is looked at next

    def choose(self, costs: Sequence[float], limit: int) -> Choice:
        """The next step. costs[n]: of a cycle with n drafts here; limit: drafts still useful."""
        if not self.block and self.tokens < self._look_at:
            return Choice(0, 1.0, "resting")
        most = min(limit, len(costs) - 1, len(self.acceptance.tried))
        affordable = [n for n in range(1, most + 1) if costs[n] - 1 <= self.credit]
        if not affordable:
            return Choice(0, 1.0, "plain")
        if self.block:
            self._steer(costs, affordable)
            if self.block:
                drafts = min(self.block, affordable[-1])
                return Choice(drafts, costs[drafts], "drafting")
            return Choice(0, 1.0, "resting")
        return self._look(costs, affordable)

    def record(self, choice: Choice, accepted: int, emitted: int) -> None:
        """What came of a choice: drafts accepted, tokens emitted."""
        before = max(self.tokens, LOSS_SPAN)
        self.tokens += emitted
        granted = LOSS * (max(self.tokens, LOSS_SPAN) - before)
        self.credit = min(self.credit + granted + emitted - choice.cost, MOST_CREDIT)
        if choice.drafts:
            self.acceptance.record(choice.drafts, accepted)

    def _steer(self, costs: Sequence[float], affordable: Sequence[int]) -> None:
        """Keep the block in use, take a better one, or stand down."""
        speeds = self._speeds(costs)
        best = max(affordable, key=lambda n: speeds[n])
        here = speeds[min(self.block, len(speeds) - 1)]
        if max(here, speeds[best]) < 1:
            self._stand_down(max(here, speeds[best]))
        elif speeds[best] > GAIN * here:
            self.block = best

    def _stand_down(self, speed: float) -> None:
        """Rest, and longer each time that drafting was clearly slower or gained nothing."""
        self.block = 0
        if self.credit > self._credit_at_look or speed > NEAR:
            self._rest = FIRST_REST
        self._look_at = self.tokens + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    def _look(self, costs: Sequence[float], affordable: Sequence[int]) -> Choice:
        """One cycle to see whether drafting pays now; what it finds steers the next step."""
        self.acceptance.forget(LOOK_TRIALS)
        self._credit_at_look = self.credit
        speeds = self._speeds(costs)
        self.block = max(affordable, key=lambda n: speeds[n])
        return Choice(self.block, costs[self.block], "look")

    def _speeds(self, costs: Sequence[float]) -> list[float]:
        """Expected tokens a plain step's time, by drafts."""
        tokens = self.acceptance.tokens()
        return [a / b for a, b in zip(tokens, costs, strict=False)]
