"""Costs, the choices of a running generation, their calibration; texts stay brute force's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from oracle import OracleDrafter, plain_features, plain_greedy
from paced import paced
from tiny import tiny_prompt, tiny_target
from tiny_drafter import BLOCK, drafter_config, write_drafter
from tiny_engine import tiny_engine

from dflash_mlx import calibration, cli, engine
from dflash_mlx.cli.calibrate import rows_of
from dflash_mlx.cli.chat import _trace_writer
from dflash_mlx.decode import calibrate as calibrating
from dflash_mlx.decode import words
from dflash_mlx.decode.calibrate import REPEATS, calibrate
from dflash_mlx.decode.costs import (
    Costs,
    HeadCost,
    Measured,
)
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import MOST_WAITING
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import CheckpointError, UsageError

TAPS = (0, 2)
CHEAP = Costs((Measured(64, 1.0, {1: 1.1, 7: 1.4}, 0.1),))
MIDDLING = Costs((Measured(64, 1.0, {1: 1.4, 7: 1.9}, 0.3),))
DEAR = Costs((Measured(64, 1.0, {1: 1.6, 7: 3.0}, 0.5),))


def test_between_measurements_costs_are_on_straight_lines() -> None:
    here = Measured(64, 2.0, {1: 3.0, 3: 4.0, 7: 8.0}, 1.0)
    there = Measured(128, 4.0, {1: 8.0, 3: 8.0, 7: 8.0}, 1.0)
    costs = Costs((here, there))
    assert costs.table(10) == costs.table(64) == [1, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]
    assert costs.table(128) == costs.table(10**6) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert costs.table(80) == [1, 1.625, 1.8125, 2, 2.375, 2.75, 3.125, 3.5]


def test_costs_survive_storage_and_their_name_tells_them_apart() -> None:
    reduced = Costs(CHEAP.measured, HeadCost(1000, 200, {1: 0.05, 7: 0.08}))
    for costs in (CHEAP, reduced):
        assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    assert len({CHEAP.digest, DEAR.digest, reduced.digest}) == 3


def test_a_reduced_head_saves_by_its_rows_and_never_more_than_drafting() -> None:
    costs = Costs(
        (Measured(64, 2.0, {1: 3.0, 3: 4.0}, 0.5),), HeadCost(1000, 200, {1: 0.2, 3: 0.4})
    )
    assert costs.table(64, 200) == pytest.approx([1, 1.4, 1.6, 1.8])
    assert costs.table(64, 600) == pytest.approx([1, 1.45, 1.675, 1.9])  # half as many fewer
    assert costs.table(64, 1000) == costs.table(64)
    dear = Costs(costs.measured, HeadCost(1000, 200, {1: 0.7, 3: 0.9}))
    assert dear.table(64, 200) == pytest.approx([1, 1.25, 1.5, 1.75])


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        None,
        {"measured": [], "head": None},
        {"measured": CHEAP.to_json()["measured"]},
        *(
            {"measured": [measured], "head": None}
            for measured in (
                {"context": 64},
                {"context": 64, "plain": -1, "cycles": {"1": 1}, "drafting": 1},
                {"context": 64, "plain": 1, "cycles": {}, "drafting": 1},
                {"context": -7, "plain": 1, "cycles": {"1": 1}, "drafting": 1},
                {"context": float("inf"), "plain": 1, "cycles": {"1": 1}, "drafting": 1},
                {"context": 64, "plain": 1e-320, "cycles": {"1": 1}, "drafting": 1},
                {"context": 64, "plain": 1, "cycles": {"1": 1, "100000000000": 2}, "drafting": 1},
            )
        ),
        {"measured": CHEAP.to_json()["measured"] * 2, "head": None},
        CHEAP.to_json() | {"head": {"whole": 8, "reduced": 8, "saved": {"1": 0.1}}},
        CHEAP.to_json() | {"head": {"whole": 8, "reduced": 4, "saved": {"1": float("nan")}}},
        CHEAP.to_json() | {"head": {"whole": 8, "reduced": 4, "saved": {"-4": -5.0}}},
    ],
)
def test_damaged_costs_are_refused(document: object) -> None:
    with pytest.raises(CheckpointError, match="stored calibration"):
        Costs.from_json(document)


@cache
def brute_force():
    """(target, prompt, its continuation, features of both)."""
    target = tiny_target("llama")
    prompt = tiny_prompt(target.vocab_size, 9)
    truth = plain_greedy(target, prompt, 110)
    return target, prompt, truth, plain_features(target, prompt + truth, TAPS)


def run_with(costs: Costs, plan: list[int], n: int, params=None, ends=()):
    """(session, tokens, truth, stats, drafter, trace) of the oracle drafter under the policy."""
    target, prompt, truth, features = brute_force()
    truth, features = truth[:n], None if params else features
    drafter = OracleDrafter(
        len(prompt), truth, vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        block_size=8, taps=TAPS, plan=plan, check_growth=False,
        features=features,
    )  # fmt: skip
    session, tokens, stats, trace = paced(target, drafter, prompt, costs, n, params, ends)
    return session, tokens, truth, stats, drafter, trace


@pytest.mark.parametrize(
    ("costs", "plan", "least_plain"),
    [
        (CHEAP, [7], 0),
        (CHEAP, [0, 7, 2, 5], 0),
        (DEAR, [0], 60),  # stands down, looks again
        (MIDDLING, [0] * 4 + [7] * 50, 10),  # stands down, resumes
    ],
)
def test_texts_are_brute_forces_whatever_is_chosen(
    row_invariant_blas: None, costs: Costs, plan: list[int], least_plain: int
) -> None:
    session, tokens, truth, stats, drafter, trace = run_with(costs, plan, 110)
    assert tokens == truth
    assert session.ids[9:] == truth[:-1]
    assert session.cache.length == session.draft_cache.length == len(session.ids)
    cycles = [line for line in trace if line["drafts"]]
    assert stats.cycles == len(cycles) == drafter.proposes > 0
    assert stats.drafted == sum(line["drafts"] for line in cycles) == drafter.drafted
    assert stats.accepted == sum(line["accepted"] for line in cycles) == drafter.planned_accepts
    assert len(trace) - len(cycles) >= least_plain
    assert sum(line["emitted"] for line in trace) == len(truth) - 1
    assert stats.block_policy == "auto, blocks of 8 at most"
    assert stats.calibration == costs.digest
    if least_plain == 10:
        assert max(line["drafts"] for line in trace[-9:]) > 3  # back at work


def test_an_end_token_inside_a_cycle_ends_what_the_trace_says_was_emitted(
    row_invariant_blas: None,
) -> None:
    truth = brute_force()[2]
    at = next(i for i in range(12, 40) if truth[i] not in truth[:i])
    *_, stats, _, trace = run_with(CHEAP, [7], 60, ends={truth[at]})
    assert stats.finish_reason == "stop"
    assert stats.generation_tokens == at + 1 == 1 + sum(line["emitted"] for line in trace)
    assert trace[-1]["accepted"] >= trace[-1]["emitted"]  # the end was one of the drafts


def test_resting_drafters_read_their_features_together() -> None:
    *_, stats, drafter, _ = run_with(DEAR, [0], 110)
    assert stats.cycles < 12
    assert drafter.observes <= 1 + 2 * stats.cycles + 110 // MOST_WAITING + 1


def test_a_seed_and_a_calibration_repeat_the_choices() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    first, second = (run_with(CHEAP, [1, 3, 0], 60, params=params) for _ in range(2))
    assert first[1] == second[1]
    assert first[5] == second[5]
    assert first[3].cycles > 0


@pytest.fixture
def pair(tmp_path):
    target = tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=7)
    folder = write_drafter(tmp_path / "drafter", drafter_config("full"))
    return target, open_drafter(folder, target, dtype=mx.float32)


def test_calibration_times_whole_steps(pair) -> None:
    """A clock that moves by one at every look makes every span one tick."""
    ticks = iter(range(10**6))
    target, drafter = pair
    costs = calibrate(
        target, drafter, nullcontext, block_size=BLOCK, seconds=1, clock=lambda: float(next(ticks))
    )
    (one,) = costs.measured
    assert (one.context, one.plain, one.drafting) == (64, 1, 1)
    assert one.cycles == {1: 1, 4: 1}  # the time was up: the ends of the curve only
    assert costs.head is None  # too small a vocabulary
    assert next(ticks) < 20


def test_without_haste_every_number_of_rows_is_timed_and_the_head_too(pair, monkeypatch) -> None:
    target, drafter = pair
    monkeypatch.setattr(words, "SIZES", (8, 12, 24))
    ticks = iter(range(10**6))
    costs = calibrate(
        target, drafter, nullcontext, block_size=BLOCK, seconds=60, clock=lambda: float(next(ticks))
    )
    assert costs.measured[0].cycles == {1: 1, 2: 1, 3: 1, 4: 1}
    assert costs.head == HeadCost(48, 12, {1: 0, 4: 0})


@pytest.mark.parametrize("block", [6, 8, 11, 16])
def test_rows_are_measured_on_both_sides_of_a_change_of_kernels(pair, monkeypatch, block) -> None:
    """Limits of MLX's quantized matrix-vector kernels: each is the first row of the other one."""
    limits = {6, 10, 12, 13, 14, 15}
    bench = calibrating._Bench(*pair, lambda: 0.0, 1.0)
    for name in ("_plain", "_cycle", "_drafting"):
        monkeypatch.setattr(bench, name, lambda *_: 1.0)
    rows = {drafts + 1 for drafts in bench.measure(64, block).cycles}
    assert {2, block} <= rows
    assert max(rows) == block
    assert {row for limit in limits for row in (limit - 1, limit) if row <= block} <= rows
    late = calibrating._Bench(*pair, lambda: 2.0, 1.0)  # the time is up
    for name in ("_plain", "_cycle", "_drafting"):
        monkeypatch.setattr(late, name, lambda *_: 1.0)
    assert set(late.measure(64, block).cycles) == {1, block - 1}


def test_plain_steps_are_timed_as_the_loop_runs_them(pair, monkeypatch) -> None:
    """Each is launched before the one ahead of it is read, and its features are tapped."""
    target, drafter = pair
    events = []
    real = calibrating.launch

    def launch(*given):
        flight = real(*given)
        if not given[-1]:
            events.append("launch")
            assert flight.features is not None
            read = type(flight).read
            monkeypatch.setattr(
                type(flight), "read", lambda self: events.append("read") or read(self)
            )
        return flight

    monkeypatch.setattr(calibrating, "launch", launch)
    bench = calibrating._Bench(target, drafter, lambda: 0.0, 1.0)
    bench.fill(8)
    bench._plain()
    assert events[:2] == ["launch", "launch"]
    assert bench.cache.length == bench.draft_cache.length == 8 + 1 + REPEATS


def test_calibration_reaches_longer_contexts_with_more_time(pair) -> None:
    ticks = iter(range(10**6))
    target, drafter = pair
    costs = calibrate(
        target, drafter, nullcontext, block_size=3, seconds=75, clock=lambda: float(next(ticks))
    )
    contexts = [m.context for m in costs.measured]
    assert contexts == [64 * 2**i for i in range(len(contexts))]
    assert len(contexts) >= 2


def test_calibrations_are_kept_and_read_again(pair, monkeypatch, tmp_path) -> None:
    target, drafter = pair
    monkeypatch.setattr(calibration, "home_dir", lambda: tmp_path)
    made = []
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: made.append(1) or CHEAP)

    def costs(**options):
        return calibration.costs_of(target, drafter, nullcontext, BLOCK, **options)

    said: list[str] = []
    assert costs(say=said.append) == costs(say=said.append) == (CHEAP, None)
    assert len(made) == len(said) == 1
    assert said[0].startswith("Measuring once what drafting costs on this machine")
    costs(anew=True)
    assert len(made) == 2
    file = calibration.calibration_file(target, drafter, BLOCK)
    endless = file.read_text().replace('"context": ', '"context": 1e999, "": ')
    for text in ("{", "[" * 100_000, endless):
        file.write_text(text)
        assert costs() == (CHEAP, None)  # a damaged one is measured again
    assert len(made) == 5
    other = tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=6)
    assert calibration.calibration_file(other, drafter, BLOCK) != file
    assert calibration.calibration_file(target, drafter, 3) != file
    monkeypatch.setattr(calibration, "home_dir", lambda: file)  # a file where a folder belongs
    found, warning = costs()
    assert (found, "could not be kept" in warning) == (CHEAP, True)


def test_an_engine_calibrates_at_its_first_use_and_a_seed_freezes(pair, tmp_path) -> None:
    target, drafter = pair
    lines: list[str] = []
    made = tiny_engine(
        tmp_path, target=target, drafter=drafter, block_size="auto", trace=lines.append
    )
    ids = list(range(7))
    stats = made.generate(ids, max_tokens=12).stats
    assert stats.calibration == made.calibrate().digest
    # Whether a cycle may run depends on what it cost here; every step was asked for and told.
    assert stats.generation_tokens - 1 == sum(json.loads(line)["emitted"] for line in lines)
    fixed = tiny_engine(tmp_path, target=target, drafter=drafter, block_size=3)
    assert fixed.generate(ids, max_tokens=12).stats.block_policy == "blocks of 3"
    params = SamplingParams(seed=1)
    for chooser, warned in ((made, False), (fixed, True)):  # the seed freezes what auto goes by
        warnings = chooser.generate(ids, max_tokens=2, sampling=params).stats.warnings
        assert any(w.startswith("Without effect") for w in warnings) is warned
    assert made._pacing.pace(params, None)._costs.frozen
    assert not made._pacing.pace(SamplingParams(), None)._costs.frozen
    with pytest.raises(UsageError, match="nothing to calibrate"):
        tiny_engine(tmp_path, target=target).calibrate()
    assert np.isfinite([m.plain for m in made.calibrate().measured]).all()


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_the_command_measures_and_names_the_costs(pair, tmp_path, monkeypatch, capsys) -> None:
    target, drafter = pair
    made = tiny_engine(tmp_path, target=target, drafter=drafter, block_size="auto")
    loaded = []
    monkeypatch.setattr(engine, "load", lambda name, **options: loaded.append(options) or made)
    assert command("calibrate", "m", "--seconds", "0.01", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert Costs.from_json(found).digest == found["calibration"]
    assert found["calibration"] == made.calibrate().digest
    assert rows_of(DEAR.to_json()["measured"])[1] == ["64", "1000.00", "0.50", "1.60", "3.00"]
    assert command("calibrate", "m", "--seconds", "0.01", "--draft-bits", "4", "--exact") == 0
    assert loaded == [
        {"draft": "auto", "draft_bits": None, "exact": False, "dtype": "auto"},
        {"draft": "auto", "draft_bits": 4, "exact": True, "dtype": "auto"},
    ]
    capsys.readouterr()
    assert command("calibrate", "m", "--draft-bits", "5") == 2
    assert "--draft-bits is 5" in capsys.readouterr().err
    assert command("calibrate", "m", "--seconds", "0") == 2
    assert "--seconds is 0.0" in capsys.readouterr().err


def test_choices_are_traced_to_a_file(pair, tmp_path, capsys) -> None:
    target, drafter = pair
    file = tmp_path / "trace"
    made = tiny_engine(
        tmp_path, target=target, drafter=drafter, block_size="auto", trace=_trace_writer(file)
    )
    stats = made.generate([1, 2, 3], max_tokens=8).stats
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(line["emitted"] for line in lines) >= stats.generation_tokens - 1
    assert command("chat", "m", "p", "--trace", str(file), "--block-size", "4") == 2
    assert "--trace writes the choices of --block-size auto" in capsys.readouterr().err
    assert command("chat", "m", "p", "--block-size", "four") == 2
    assert "--block-size is 'four'" in capsys.readouterr().err
