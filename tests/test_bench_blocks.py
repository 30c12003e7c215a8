"""The benchmark of the chosen block: prompts, verdicts by hand, and a drafter with fewer rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_drafter as tiny
from tiny import tiny_target
from tiny_engine import tiny_engine

from dflash_mlx.decode import words
from dflash_mlx.draft.checkpoint import open_drafter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_blocks

from dflash_mlx.bench.spans import Seconds, TimedRun


def run_of(rate: float) -> TimedRun:
    return TimedRun([], Seconds(1, 1), Seconds(99, 10 / rate), 10)


def runs(**rates: list[float]) -> list[dict[str, TimedRun]]:
    count = len(next(iter(rates.values())))
    names = {name: name.replace("_", " ") for name in rates}
    return [{names[n]: run_of(rates[n][i]) for n in rates} for i in range(count)]


def test_the_chosen_block_is_judged_by_the_best_fixed_one() -> None:
    found = bench_blocks.judge(
        runs(plain=[1, 2, 1], again=[1, 2, 1], auto=[1.9, 3.8, 9], block_2=[1.5, 3, 1.5],
             block_8=[2, 4, 2]),
        "cpu",
    )  # fmt: skip
    assert found["best"] == "block 8"
    assert found["auto_vs_best"] == pytest.approx(0.95)
    assert not found["pass"]
    assert (found["again"], found["block 2"]) == (1, 1.5)


def test_where_no_fixed_block_pays_the_best_is_plain() -> None:
    slow = runs(plain=[1.0], again=[1.0], auto=[0.98], block_2=[0.8])
    found = bench_blocks.judge(slow, "cpu")
    assert (found["best"], found["pass"]) == ("plain", True)
    assert bench_blocks.judge(runs(plain=[1.0], again=[1.0], auto=[0.96]), "cpu")["pass"] is False


def test_shuffled_prompts_have_the_suites_words() -> None:
    plain = bench_blocks.questions("gsm8k", 2)
    mixed = bench_blocks.questions(bench_blocks.SHUFFLED, 2)
    assert len(plain) == 2
    assert sorted(mixed[0].split()) == sorted(plain[0].split())
    assert mixed[0] != plain[0]
    assert mixed == bench_blocks.questions(bench_blocks.SHUFFLED, 2)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "SIZES", (40, 60))
    target = tiny_target("qwen3", vocab_size=258, hidden_size=32, num_hidden_layers=7)
    config = tiny.drafter_config("full", vocab_size=258)
    drafter = open_drafter(
        tiny.write_drafter(tmp_path / "drafter", config), target, dtype=mx.float32
    )
    return tiny_engine(tmp_path, target=target, drafter=drafter, block_size="auto")


@pytest.mark.parametrize("what", ["auto", "head"])
def test_the_whole_on_a_tiny_pair(engine, what, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_blocks, "load", lambda name: engine)
    arguments = ["--samples", "1", "--max-tokens", "6", "--suites", "gsm8k", "--blocks", "3"]
    bench_blocks.main([what, *arguments])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])[what]["gsm8k"]
    if what == "auto":
        assert {"again", "auto", "block 3", "best", "auto_vs_best", "pass"} == set(found)
        assert found["block 3"] > 0
    else:
        assert set(found) == {"258", "40", "60"}
        assert found["258"] == {
            "drafting": 1.0, "tokens_per_cycle": found["258"]["tokens_per_cycle"], "kept": 1.0
        }  # fmt: skip
        assert all(one["tokens_per_cycle"] >= 1 for one in found.values())
    with pytest.raises(SystemExit):
        bench_blocks.main([what, "--suites", "none"])
    assert "there is no suite none" in capsys.readouterr().err
