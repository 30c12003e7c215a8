"""The policy on scripted acceptance and costs: its clock is the sum of the costs it was given."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from dflash_mlx.decode.policy import (
    LONGEST_REST,
    LOSS,
    LOSS_SPAN,
    MOST_CREDIT,
    PRIOR,
    PRIOR_TRIALS,
    Acceptance,
    Choice,
    Head,
    Policy,
)

Accepts = Callable[[int], int]  # drafts verified -> drafts accepted


def rising(rows: int, draft: float, row: float, jump_at: int = 99, jump: float = 0) -> list[float]:
    """Costs of cycles with 0 .. rows - 1 drafts; `jump` where a matrix kernel's row limit lies."""
    dear = [jump if n + 1 >= jump_at else 0.0 for n in range(rows)]
    return [1.0] + [1 + draft + row * n + dear[n] for n in range(1, rows)]


# ten shapes: costs, and the chance of each draft given the ones before it
SHAPES = {
    "rows cost nothing": (rising(16, 0.2, 0.02), [0.9] * 15),
    "mathematics": (rising(16, 0.3, 0.05), [0.92, 0.9, 0.88, 0.86, 0.85, 0.84] + [0.8] * 9),
    "quantized": (rising(16, 0.3, 0.25), [0.85] * 15),
    "mixture": (rising(16, 0.3, 0.35), [0.9] * 15),
    "row limit": (rising(16, 0.2, 0.06, jump_at=13, jump=1.2), [0.93] * 15),
    "cliff": (rising(16, 0.2, 0.1), [0.9] * 3 + [0.1] * 12),
    "fading": (rising(8, 0.15, 0.08), [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    "first is hard": (rising(16, 0.3, 0.04), [0.6] + [0.95] * 14),
    "prose": (rising(16, 0.5, 0.15), [0.35] * 15),
    "rows cost much": (rising(8, 0.3, 0.35), [0.5] * 7),
}


def speeds(costs: Sequence[float], chances: Sequence[float]) -> list[float]:
    """True tokens a plain step's time of every static block."""
    expected, reached, found = 1.0, 1.0, [1.0]
    for chance, cost in zip(chances, costs[1:], strict=True):
        reached *= chance
        expected += reached
        found.append(expected / cost)
    return found


def chance(chances: Sequence[float], seed: int) -> Accepts:
    source = random.Random(seed)

    def accepts(drafts: int) -> int:
        accepted = 0
        while accepted < drafts and source.random() < chances[accepted]:
            accepted += 1
        return accepted

    return accepts


def evenly(chances: Sequence[float]) -> Accepts:
    """Acceptance without luck: every position agrees as often as its chance says, evenly spread."""
    due = [0.5] * len(chances)

    def accepts(drafts: int) -> int:
        for i in range(drafts):
            due[i] += chances[i]
            if due[i] < 1:
                return i
            due[i] -= 1
        return drafts

    return accepts


@dataclass
class Played:
    policy: Policy
    clock: float = 0.0
    steps: list[tuple[int, float, int]] = field(default_factory=list)  # drafts, cost, tokens so far

    def play(
        self, costs: Sequence[float], accepts: Accepts, *, steps: int = 0, tokens: int = 0
    ) -> Played:
        goal, heads = len(self.steps) + steps, [Head(costs)]
        while len(self.steps) < goal or self.policy.tokens < tokens:
            choice = self.policy.choose(heads, 99)
            accepted = accepts(choice.drafts)
            self.policy.record(choice, accepted, accepted + 1)
            self.clock += costs[choice.drafts]
            self.steps.append((choice.drafts, costs[choice.drafts], self.policy.tokens))
        return self

    def regret(self, true: Sequence[float], start: int, stop: int) -> float:
        """Share of the best static block's tokens that was missed, in expectation."""
        span = self.steps[start:stop]
        made = sum(true[drafts] * cost for drafts, cost, _ in span)
        return 1 - made / (sum(cost for _, cost, _ in span) * max(true))

    def lowest(self, tokens: int) -> float:
        """Lowest speed to plain decoding's over the whole text so far, from that length on."""
        clock, lowest = 0.0, float("inf")
        for _, cost, length in self.steps:
            clock += cost
            if length >= tokens:
                lowest = min(lowest, length / clock)
        return lowest

    def changes(self, start: int, stop: int) -> int:
        drafts = [d for d, _, _ in self.steps[start:stop]]
        return sum(a != b for a, b in itertools.pairwise(drafts))


def play(costs: Sequence[float], accepts: Accepts, **length: int) -> Played:
    return Played(Policy(len(costs) - 1)).play(costs, accepts, **length)


SEEDS = 20


@cache
def games(shape: str) -> list[Played]:
    costs, chances = SHAPES[shape]
    return [play(costs, chance(chances, seed), steps=300) for seed in range(SEEDS)]


def nearly_all(values: Sequence[float]) -> float:
    """The second worst of 20: 95 % are at least as good.

    A generation must not fall below 0.97 of plain decoding. A drafter whose first drafts are
    refused by bad luck looks like one that never pays, and once the first 64 tokens' allowance is
    gone nothing can be tried before they are over. So the worst seeds of any policy that keeps
    this promise lose more where drafting pays, the fewer the longer the quantile is made.
    """
    return sorted(values)[-2]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_luck_the_best_block_is_found_kept_and_hardly_missed(shape: str) -> None:
    costs, chances = SHAPES[shape]
    true = speeds(costs, chances)
    played = play(costs, evenly(chances), steps=300)
    assert played.regret(true, 20, 40) < 0.03
    assert played.regret(true, 0, 200) < 0.03
    assert played.regret(true, 200, 300) < 0.03


@pytest.mark.parametrize("shape", SHAPES)
def test_with_luck_too(shape: str) -> None:
    true = speeds(*SHAPES[shape])
    played = games(shape)
    assert nearly_all([g.regret(true, 200, 300) for g in played]) < 0.03
    assert nearly_all([g.regret(true, 0, 200) for g in played]) < 0.05
    assert sorted(g.regret(true, 0, 200) for g in played)[SEEDS // 2] < 0.02
    assert sorted(g.regret(true, 20, 40) for g in played)[SEEDS // 2] < 0.03
    assert max(g.changes(200, 300) for g in played) <= 8  # looks, visits to later positions


@pytest.mark.parametrize("shape", SHAPES)
def test_no_generation_falls_below_what_it_may_lose(shape: str) -> None:
    """Every seed of every shape, from the first token for which 0.97 is promised."""
    assert min(g.lowest(LOSS_SPAN) for g in games(shape)) >= 0.97


def test_the_promise_begins_as_early_as_a_look_allows() -> None:
    """A refused cycle of cost c leaves 0.97 at t tokens only if t >= (c - 1) / (1 / 0.97 - 1)."""
    assert LOSS_SPAN <= 64
    assert LOSS <= 1 / 0.97 - 1 < LOSS + 1e-4  # all of it may be used
    dear = rising(8, 1.5, 0.5)  # 2 plain steps lost with one draft: 64.7 tokens
    played = play(dear, lambda drafts: 0, tokens=400)
    first = next(i for i, (drafts, _, _) in enumerate(played.steps) if drafts)
    assert 64 <= played.steps[first][2] <= 67
    assert played.lowest(1) >= 0.97


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("costs", "likely"),
    [
        (rising(16, 0.5, 0.15), 0.35),
        (rising(16, 2.0, 0.3), 0.3),  # a look costs more than two plain steps
        (rising(8, 3.0, 0.5), 0.05),
        (rising(16, 0.1, 0.02), 0.0),
        (rising(16, 0.3, 0.05), 0.2),
    ],
)
def test_prose_is_never_much_slower_than_plain(
    costs: list[float], likely: float, seed: int
) -> None:
    played = play(costs, chance([likely] * (len(costs) - 1), seed), tokens=400)
    assert any(drafts for drafts, _, _ in played.steps)  # it did look
    assert played.lowest(LOSS_SPAN) >= 0.97
    true = speeds(costs, [likely] * (len(costs) - 1))
    assert played.regret(true, 200, len(played.steps)) < 0.05


def test_looks_become_rare_and_stay_bounded() -> None:
    played = play(rising(8, 0.3, 0.1), lambda drafts: 0, tokens=4000)
    pairs = zip(played.steps, played.steps[1:], strict=False)
    looks = [tokens for (before, _, _), (now, _, tokens) in pairs if now and not before]
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert gaps[0] <= LOSS_SPAN
    assert LONGEST_REST <= gaps[-1] < LONGEST_REST + 20
    assert len(looks) <= 4000 // LONGEST_REST + 5


def test_drafting_resumes_and_stands_down_as_the_text_changes() -> None:
    costs = rising(16, 0.3, 0.1)
    true = speeds(costs, [0.9] * 15)
    for seed in range(5):
        game = play(costs, chance([0.2] * 15, seed), tokens=300)
        at = len(game.steps)
        game.play(costs, chance([0.9] * 15, seed), tokens=300 + LONGEST_REST + 650)
        assert game.regret(true, len(game.steps) - 60, len(game.steps)) < 0.05
        assert game.policy.tokens / game.clock > 1.1
        before, at = game.clock, game.policy.tokens
        game.play(costs, chance([0.1] * 15, seed), tokens=at + 256)
        assert (game.clock - before) - (game.policy.tokens - at) < MOST_CREDIT + 256 * LOSS + 4


def test_a_refused_cycle_is_never_run_beyond_the_credit() -> None:
    policy, heads = Policy(15), [Head(rising(16, 2.5, 0.4))]
    for step in range(2000):
        choice = policy.choose(heads, 15)
        assert choice.cost - 1 <= policy.credit
        policy.record(choice, 0, 1)
        assert policy.credit >= -1e-9, step


def heads_of(saved: float, covered: float) -> list[Head]:
    whole = rising(8, 0.5, 0.05)
    return [Head(whole), Head([1.0, *(cost - saved for cost in whole[1:])], 4096, covered)]


def play_heads(
    heads: Sequence[Head], likely: float, covered: float, seed: int, steps: int
) -> list[Choice]:
    """The choices where the text's tokens are in the reduced head with chance `covered`."""
    policy, source, choices = Policy(7), random.Random(seed), []
    for _ in range(steps):
        choice = policy.choose(heads, 99)
        accepted, outside = 0, False
        for _ in range(choice.drafts):
            outside = choice.rows is not None and source.random() >= covered
            if outside or source.random() >= likely:
                break
            accepted += 1
        policy.record(choice, accepted, accepted + 1, outside)
        choices.append(choice)
    return choices


@pytest.mark.parametrize(
    ("saved", "covered", "reduced"),
    [
        (0.3, 0.99, True),  # saves a sixth of a cycle, loses little
        (0.3, 0.7, False),
        (0.02, 0.9, False),
        (-0.1, 1.0, False),  # a smaller head that is dearer
    ],
)
def test_a_reduced_head_is_used_where_its_saving_beats_what_it_loses(
    saved: float, covered: float, reduced: bool
) -> None:
    for seed in range(4):
        late = play_heads(heads_of(saved, covered), 0.85, covered, seed, 120)[40:]
        share = sum(c.rows == 4096 for c in late) / sum(c.drafts > 0 for c in late)
        assert share > 0.9 if reduced else share < 0.1


def test_the_head_may_make_drafting_pay() -> None:
    """With the whole head no block pays; the reduced one's cycles are cheaper."""
    heads = heads_of(0.45, 0.98)
    late = play_heads(heads, 0.4, 0.98, 1, 400)[200:]
    assert max(speeds(heads[0].costs, [0.4] * 7)[1:]) < 1.05
    assert sum(c.rows == 4096 for c in late) > 100


def test_a_correction_that_the_head_did_not_know_is_no_refusal() -> None:
    acceptance = Acceptance(4)
    before = acceptance.chances()
    acceptance.record(4, 0, outside=True)
    assert acceptance.chances() == pytest.approx(before)
    acceptance.record(4, 2, outside=True)
    assert [
        round(t - p) for t, p in zip(acceptance.tried, (PRIOR_TRIALS, 0, 0, 0), strict=True)
    ] == [1, 1, 0, 0]
    assert acceptance.tokens(0.5)[1] == 1 + 0.5 * acceptance.chances()[0]


def test_positions_behind_the_first_correction_are_not_judged() -> None:
    acceptance = Acceptance(4)
    acceptance.record(4, 1)
    known = PRIOR_TRIALS * 0.98
    assert acceptance.tried == pytest.approx([1 + known, 1, 0, 0])
    assert acceptance.agreed == pytest.approx([1 + known * PRIOR, 0, 0, 0])
    acceptance.record(2, 2)  # all of two: the third was not drafted, so it says nothing of it
    assert [round(t) for t in acceptance.tried] == [6, 2, 0, 0]
    chances = acceptance.chances()
    assert chances[0] > chances[1]
    assert chances[2] == chances[3] == chances[1]  # nothing known: like the one before
    tokens = acceptance.tokens()
    assert tokens[:2] == [1.0, 1 + chances[0]]
    assert tokens[4] == pytest.approx(
        1 + chances[0] + chances[0] * chances[1] * (1 + chances[2] + chances[2] ** 2)
    )


def test_old_counts_fade() -> None:
    acceptance = Acceptance(1)
    for _ in range(300):
        acceptance.record(1, 1)
    assert acceptance.chances()[0] > 0.95
    for _ in range(60):
        acceptance.record(1, 0)
    assert acceptance.chances()[0] < 0.4


def test_the_limit_and_a_short_cost_table_bound_the_block() -> None:
    policy = Policy(15)
    policy.record(Choice(15, 1.0, "look"), 15, 16)
    assert policy.choose([Head(rising(16, 0.1, 0.01))], 3).drafts == 3
    assert policy.choose([Head(rising(6, 0.1, 0.01))], 15).drafts == 5
    assert policy.choose([Head(rising(16, 0.1, 0.01))], 0) == Choice(0, 1.0, "plain")


def test_choices_are_functions_of_counts_and_costs() -> None:
    costs, chances = SHAPES["quantized"]
    first, second = (play(costs, chance(chances, 3), steps=300).steps for _ in range(2))
    assert first == second
