"""The engine's benchmark: spans, paired ratios and bounds by hand, the whole on tiny models."""

from __future__ import annotations

import json
import math
import statistics
import sys
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from oracle import plain_greedy
from test_scripts import Checkout, checkout
from tiny import target_of, tiny_config
from tiny_drafter import BLOCK, drafter_config, write_drafter
from tiny_engine import VOCAB, oracle_for, tiny_engine

from dflash_mlx.bench.compare import near_tie_gap
from dflash_mlx.bench.rival import MlxLm
from dflash_mlx.bench.spans import Seconds, TimedRun, timed
from dflash_mlx.draft.checkpoint import open_drafter

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_cycles  # noqa: E402
import bench_engine  # noqa: E402
from bench_pairs import BOUNDS, Pairs, deciding_clock, judge, steady  # noqa: E402

__all__ = ["checkout"]  # a fixture of the scripts' tests
N = 9
PROMPTS = {"clips": "Count the clips.", "rain": "Why does it rain?"}
CONFIG = tiny_config("llama", vocab_size=VOCAB)


def run_of(rate: float, prefill: float, cpu_rate: float | None = None) -> TimedRun:
    seconds = Seconds(10 / rate, 10 / (cpu_rate or rate))
    return TimedRun(list(range(11)), Seconds(prefill, 2 * prefill), seconds, 10)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target = target_of(CONFIG)
    config = drafter_config(
        hidden_size=48,
        num_target_layers=4,
        vocab_size=VOCAB,
        dflash_config={"target_layer_ids": [0, 2, 3], "mask_token_id": 5, "block_size": BLOCK},
    )
    drafter = open_drafter(write_drafter(folder / "draft", config), target, dtype=mx.float32)
    return tiny_engine(folder / "engine", target=target, drafter=drafter, drafter_name="tiny")


@pytest.fixture(scope="module")
def reference(engine):
    return MlxLm(engine, CONFIG)


@pytest.fixture(scope="module")
def measured(engine, reference):
    bench = bench_engine.Bench(engine, reference, N)
    bench_engine.measure(bench, PROMPTS, 2, told=False)
    return bench, bench_engine.document(bench, 2)


def test_spans_begin_at_the_call_and_at_the_first_token():
    moments = (Seconds(t, 3.0 * t) for t in (100, 102, 105, 107, 113))
    run = timed(lambda: iter([[7], [8, 9], [], [4], [1], []]), lambda: next(moments))
    assert run.tokens == [7, 8, 9, 4, 1]
    assert run.prefill == (2, 6)
    assert run.decode == (11, 33)
    assert run.behind_first == 4
    assert run.rate("wall") == pytest.approx(4 / 11)
    assert run.rate("cpu") == pytest.approx(4 / 33)


def test_tokens_that_come_with_the_first_one_are_not_behind_it():
    ticks = count()
    run = timed(lambda: iter([[], [7, 8], [9]]), lambda: Seconds(next(ticks), 0.0))
    assert (run.behind_first, run.prefill.wall, run.decode.wall) == (1, 1, 1)
    with pytest.raises(ValueError, match="no token"):
        timed(lambda: iter([[], []]))


def test_ratios_are_paired_by_round():
    pairs = Pairs()
    rounds = [(10, 12, 8, 20), (20, 22, 30, 24), (5, 5, 5, 6)]
    for plain, again, other, own in rounds:
        pairs.add_round(
            {
                "plain": run_of(plain, 1.0),
                "again": run_of(again, 2.0),
                "mlx_lm": run_of(other, 1.5),
                "dflash": run_of(own, 1.0),
            }
        )
    by_hand = {
        "aa": [p / a for p, a, _, _ in rounds],
        "plain_vs_mlx_lm": [(p / o + a / o) / 2 for p, a, o, _ in rounds],
        "prefill_vs_mlx_lm": [(1.5 / 1 + 1.5 / 2) / 2] * 3,
        "dflash_vs_plain": [(d / p + d / a) / 2 for p, a, _, d in rounds],
    }
    assert set(pairs.values) == set(by_hand)
    for name, values in by_hand.items():
        for clock in ("wall", "cpu"):
            assert pairs.values[name][clock] == pytest.approx(values)
            assert pairs.median(name, clock) == pytest.approx(statistics.median(values))


def test_a_round_without_mlx_lm_or_drafter_gives_no_ratio_for_them():
    pairs = Pairs()
    pairs.add_round({"plain": run_of(1, 1), "again": run_of(1, 1)})
    assert set(pairs.values) == {"aa"}
    assert pairs.median("plain_vs_mlx_lm", "wall") is None
    assert [v["pass"] for v in judge(pairs).values()] == [False] * 3


def pairs_of(aa: float, **values: tuple[float, float]) -> Pairs:
    """Median values on (wall, cpu)."""
    pairs = Pairs()
    values = {"aa": (aa, 1.0), **values}
    for name, (wall, cpu) in values.items():
        pairs.values[name] = {"wall": [wall], "cpu": [cpu]}
    return pairs


@pytest.mark.parametrize(
    ("aa", "clock"), [(1.0, "wall"), (1.009, "wall"), (0.991, "wall"), (1.02, "cpu"), (0.98, "cpu")]
)
def test_cpu_seconds_decide_where_plain_differs_from_itself(aa: float, clock: str):
    pairs = pairs_of(
        aa, plain_vs_mlx_lm=(0.5, 2.0), prefill_vs_mlx_lm=(0.5, 2.0), cycle_overhead=(0.9, 0.0)
    )
    assert deciding_clock(pairs) == clock
    assert [v["pass"] for v in judge(pairs).values()] == [clock == "cpu"] * 3


def test_a_machine_on_which_no_clock_can_be_trusted_is_told(measured):
    bench, found = measured
    for wall, cpu, good in ((1.0, 1.5, True), (1.2, 1.005, True), (1.2, 0.95, False)):
        pairs = Pairs({"aa": {"wall": [wall], "cpu": [cpu]}})
        assert steady(pairs) is good
        shown = "\n".join(bench_engine.table(bench, {**found, "steady": good}))
        assert ("too busy to judge" in shown) is not good


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_fails_just_beyond_it(name: str):
    kept = {"plain_vs_mlx_lm": 0.97, "prefill_vs_mlx_lm": 0.95, "cycle_overhead": 0.05}
    assert all(
        v["pass"] for v in judge(pairs_of(1.0, **{k: (v, v) for k, v in kept.items()})).values()
    )
    step = 0.001 if name == "cycle_overhead" else -0.001
    missed = {**kept, name: kept[name] + step}
    verdicts = judge(pairs_of(1.0, **{k: (v, v) for k, v in missed.items()}))
    assert [k for k, v in verdicts.items() if not v["pass"]] == [name]


def test_overhead_is_what_the_forwards_leave_of_a_cycle():
    pairs = Pairs()
    pairs.add_cycle(Seconds(0.2, 0.4), Seconds(0.15, 0.38))
    assert pairs.median("cycle_overhead", "wall") == pytest.approx(0.25)
    assert pairs.median("cycle_overhead", "cpu") == pytest.approx(0.05)


def test_everyone_gives_the_brute_force_text(measured, engine):
    bench, found = measured
    assert found["texts_agree"]
    assert found["differences"] == []
    for name, prompt in bench.prompts.items():
        truth = plain_greedy(engine.target, prompt, N)
        assert bench.texts[name] == truth
        runs = bench.runs[name]
        assert {who: len(kept) for who, kept in runs.items()} == dict.fromkeys(
            ("plain", "again", "mlx_lm", "dflash"), 2
        )
        assert all(r.tokens == truth for kept in runs.values() for r in kept)
        assert all(r.behind_first == N - 1 for r in runs["plain"] + runs["mlx_lm"])


def test_the_document_has_what_was_measured(measured):
    bench, found = measured
    document = json.loads(json.dumps(found))
    assert document["model"] == "tiny"
    assert document["prompts"] == {name: len(ids) for name, ids in bench.prompts.items()}
    clock = document["judged_by"]
    for name in ("plain_vs_mlx_lm", "prefill_vs_mlx_lm", "dflash_vs_plain", "cycle_overhead"):
        assert document[name] == document[clock][name]
        assert math.isfinite(document[name])
    for name in ("plain_vs_mlx_lm", "prefill_vs_mlx_lm", "dflash_vs_plain"):
        assert document[name] > 0
    assert len(bench.pairs.values["aa"]["wall"]) == 4  # two prompts, two rounds
    assert document["cycle_overhead"] < 1
    assert 1 <= document["tokens_per_cycle"] <= BLOCK
    assert document["pass"] == all(b["pass"] for b in document["bounds"].values())
    assert set(document["bounds"]) == set(BOUNDS)
    assert document["versions"]["mlx"] == mx.__version__
    shown = "\n".join(bench_engine.table(bench, found))
    assert "pass  all texts are equal" in shown
    assert all(name in shown for name in (*PROMPTS, *BOUNDS))


def test_rounds_alternate_and_plain_stands_on_both_sides_of_mlx_lm(engine, reference, monkeypatch):
    bench = bench_engine.Bench(engine, reference, 6)
    bench.admit("clips", PROMPTS["clips"])
    asked = []
    run = bench._run
    monkeypatch.setattr(bench, "_run", lambda who, prompt: asked.append(who) or run(who, prompt))
    for number in range(3):
        bench.round(number, "clips")
    order = ["plain", "mlx_lm", "again", "dflash"]
    assert asked == [*order, *reversed(order), *order]


def test_a_text_that_changes_from_run_to_run_stops_everything(engine, reference):
    bench = bench_engine.Bench(engine, reference, 6)
    bench.admit("clips", PROMPTS["clips"])
    bench.texts["clips"] = [*bench.texts["clips"][:-1], 0]
    with pytest.raises(bench_engine.UsageError, match="two different texts"):
        bench.round(0, "clips")


def test_a_text_that_differs_is_refused(engine, tmp_path):
    """mlx-lm with one changed weight: its speed counts for nothing and the whole fails."""
    other = MlxLm(tiny_engine(tmp_path, target=target_of(CONFIG, seed=1)), CONFIG)
    bench = bench_engine.Bench(engine, other, N)
    bench_engine.measure(bench, {"clips": PROMPTS["clips"]}, 1, told=False)
    found = bench_engine.document(bench, 1)
    assert not found["texts_agree"]
    assert not found["pass"]
    assert [d["who"] for d in found["differences"]] == ["mlx_lm"]
    assert found["differences"][0]["gap"] > near_tie_gap(1.0, mx.float32)
    assert found["plain_vs_mlx_lm"] is None
    assert found["dflash_vs_plain"] > 0
    assert "FAIL  mlx_lm parts from plain" in "\n".join(bench_engine.table(bench, found))


def test_without_a_drafter_there_are_no_cycles_to_judge(engine, reference, tmp_path):
    plain = tiny_engine(tmp_path, target=engine.target)
    bench = bench_engine.Bench(plain, reference, 6)
    bench_engine.measure(bench, {"clips": PROMPTS["clips"]}, 1, told=False)
    found = bench_engine.document(bench, 1)
    assert set(found["bounds"]) == set(BOUNDS) - {"cycle_overhead"}
    assert found["dflash_vs_plain"] is found["tokens_per_cycle"] is None
    assert "no drafter" in "\n".join(bench_engine.table(bench, found))


def test_the_forwards_beside_a_cycle_are_the_same_ones(engine, monkeypatch):
    """Same shapes, same context, same anchors: recorded at the target, in both sequences."""
    calls: dict[int, list] = {}
    forward = engine.target.forward

    def recorded(segments, taps=()):
        (segment,) = segments
        calls.setdefault(id(segment.cache), []).append(
            (segment.cache.length, segment.ids.tolist(), tuple(taps))
        )
        return forward(segments, taps)

    monkeypatch.setattr(type(engine.target), "forward", lambda self, *a: recorded(*a))
    prompt = list(range(20, 40))
    truth = plain_greedy(engine.target, prompt, 44)
    drafter = oracle_for(engine.target, prompt, truth, 5, [2])
    calls.clear()
    found = list(bench_cycles.paired_cycles(engine.target, drafter, prompt, 40, ()))
    alone, real = calls.values()
    assert len(found) >= 8
    assert [length for length, _, _ in alone[1:]] == [20 + 3 * i for i in range(len(found))]
    assert alone == real[: len(alone)]
    assert len(alone) == len(found) + 1  # the prefill
    assert all(s.wall > 0 for pair in found for s in pair)


def test_a_missed_bound_is_exit_code_1_unless_nobody_judges(monkeypatch, capsys, measured):
    bench, found = measured
    monkeypatch.setattr(bench_engine, "load", lambda name, **options: bench.engine)
    monkeypatch.setattr(bench_engine, "read_target_config", lambda path: CONFIG)
    monkeypatch.setattr(bench_engine, "Bench", lambda *a: bench)
    monkeypatch.setattr(bench_engine, "measure", lambda *a, **k: None)
    for passed, flags, code in ((True, [], 0), (False, [], 1), (False, ["--no-judge"], 0)):
        given = {**found, "pass": passed}
        monkeypatch.setattr(bench_engine, "document", lambda *a, given=given: given)
        assert bench_engine.main(["--json", *flags]) == code
        out = capsys.readouterr().out
        assert json.loads(out)["pass"] is passed
    assert bench_engine.main([]) == 1
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads(json.dumps(given))
    assert len(shown) > 5


@pytest.mark.parametrize("flags", [("--repeats", "0"), ("--prompts", "99"), ("--max-tokens", "1")])
def test_wrong_numbers_are_refused(flags: tuple[str, str], capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_engine.main([*flags])
    assert stopped.value.code == 2
    assert "--prompts from 1 to" in capsys.readouterr().err


def test_an_unknown_model_is_a_sentence(capsys):
    assert bench_engine.main(["--model", "nowhere"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere" in err


def test_it_runs_in_the_environment_that_the_scripts_make(checkout: Checkout):
    checkout.add_python("python3", "3.12")
    code, out, err = checkout.run("bench_engine", "--repeats", "7")
    assert (code, out) == (0, "")
    assert "installing the package" in err
    calls = checkout.log.read_text().splitlines()
    assert calls[-1] == f"python {checkout.root}/scripts/bench_engine.py --repeats 7"
