"""Costs while running: what the clock says of cycles, and what it must not be taken to say."""

from __future__ import annotations

import pytest

from dflash_mlx.decode.costs import (
    ENOUGH_TIMINGS,
    LASTING,
    OUTLIER,
    PLAIN_TIMINGS,
    RECENT,
    TABLES,
    Costs,
    HeadCost,
    Measured,
    Refined,
)
from dflash_mlx.decode.pace import PolicyPace

DRAFTS = 7  # of a block
CHEAP = Costs((Measured(64, 1.0, {1: 1.1, 7: 1.4}, 0.1),))


def test_costs_follow_the_clock_unless_frozen() -> None:
    moving, frozen = Refined(CHEAP), Refined(CHEAP, frozen=True)
    for _ in range(60):
        for costs in (moving, frozen):
            costs.timed(64, 0, 1.0)
            costs.timed(64, 7, 2.8)  # twice the calibration's 1.4
    assert frozen.table(64) == CHEAP.table(64)
    assert moving.table(64)[7] == pytest.approx(2.8, rel=0.01)
    assert moving.table(64)[0] == 1
    before = moving.table(64)[7]
    moving.timed(64, 7, 1000.0)  # the machine slept
    assert moving.table(64)[7] < before * (1 + 0.11 * OUTLIER)


def test_a_grown_context_is_not_taken_for_dear_drafting() -> None:
    """Everything takes three times as long at 4096 tokens, where nothing was calibrated."""
    costs = Refined(CHEAP)
    for _ in range(PLAIN_TIMINGS):
        costs.timed(64, 0, 1.0)
    for context in range(65, 4097):
        costs.timed(context, 7, 1.4 * (1 + 2 * (context - 64) / 4032))
    assert costs.table(4096)[7] == pytest.approx(1.4, rel=0.1)
    for _ in range(ENOUGH_TIMINGS):
        costs.timed(4096, 0, 3.0)
    before = costs.table(4096)[7]
    costs.timed(4096, 7, 4.2)
    assert abs(costs.table(4096)[7] - 1.4) <= abs(before - 1.4) + 1e-9
    for _ in range(60):
        costs.timed(4096, 0, 3.0)
        costs.timed(4096, 7, 8.4)  # now drafting has really become dear
    assert costs.table(4096)[7] == pytest.approx(2.8, rel=0.01)


def test_a_machine_that_slows_down_is_not_taken_for_dear_drafting() -> None:
    costs = Refined(CHEAP)
    for _ in range(ENOUGH_TIMINGS):
        costs.timed(64, 0, 1.0)
    for _ in range(LASTING):
        costs.timed(64, 7, 1.4)
    for _ in range(400):
        costs.timed(64, 7, 5.0)  # hot: no plain step was timed for long
    assert costs.table(64)[7] == pytest.approx(1.4)


def test_steady_drafting_that_is_dearer_than_calibrated_is_found_out() -> None:
    """All drafts of two in three cycles are refused, and a cycle costs 3.6 instead of 1.4."""
    costs = Refined(CHEAP)
    pace = PolicyPace(DRAFTS + 1, costs)
    seconds = tokens = 0.0
    for step in range(3000):
        drafts = pace.next(64, DRAFTS).drafts
        accepted = drafts if step % 3 == 0 else 0
        pace.landed(accepted, accepted + 1)
        took = 3.6 if drafts else 1.0
        pace.timed(took)
        if step >= 1000:
            seconds, tokens = seconds + took, tokens + accepted + 1
    assert costs.table(64)[DRAFTS] > 3
    assert tokens / seconds > 0.97


def test_no_cycle_is_cheaper_than_a_plain_step() -> None:
    """Whatever a loaded machine made of the calibration: else drafting would never lose."""
    head = HeadCost(50_000, 8000, {1: 0.9, 7: 3.0})
    costs = Costs((Measured(64, 1.0, {1: 0.7, 7: 1.2}, 1.5),), head)
    refined = Refined(costs)
    for _ in range(20):
        refined.timed(64, 0, 1.0)
        refined.timed(64, 7, 0.4)
    for rows in (None, 2048, 8000):
        for table in (costs.table(64, rows), refined.table(64, rows)):
            assert table[0] == 1
            assert min(table[1:]) > 1


def test_frozen_costs_ask_for_no_plain_steps() -> None:
    costs = Refined(CHEAP, frozen=True)
    for _ in range(2 * LASTING):
        costs.timed(64, 7, 5.0)
    assert costs.plain_due(64) == 0


def test_plain_steps_that_cannot_be_timed_do_not_stop_drafting() -> None:
    """A reader holds plain steps up, which are short, and cycles not."""
    costs = Refined(CHEAP)
    pace = PolicyPace(DRAFTS + 1, costs)
    plain = 0
    for _ in range(2000):
        drafts = pace.next(64, DRAFTS).drafts
        pace.landed(drafts, drafts + 1)
        plain += not drafts
        if drafts:
            pace.timed(1.4)
    assert 0 < plain < 2000 / RECENT * (ENOUGH_TIMINGS + 2)


def test_tables_do_not_pile_up() -> None:
    costs = Refined(CHEAP)
    for context in range(0, 64 * 3 * TABLES, 64):
        costs.table(context)
    assert len(costs._tables) <= TABLES
