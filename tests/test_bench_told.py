"""Runs of the benchmark over documents, over long contexts, and runs that an error ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_run import bench, made_engine, tiny

from dflash_mlx.bench.contexts import LONGEST, SHORTEST
from dflash_mlx.bench.play import Player
from dflash_mlx.decode.costs import Costs, Measured
from dflash_mlx.errors import CheckpointError

__all__ = ["made_engine", "tiny"]  # fixtures of the runs' tests
#: characters, which are tokens here; the tiny model's context is 2048
TEXTS = {"short": 100, "fitting": 1200, "long": 4000}


def longbench(folder: Path, names: list[str]) -> Path:
    rows = [{"input": "", "context": f"{name} " * (TEXTS[name] // len(name))} for name in names]
    (folder / "longbench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_documents_of_a_folder_are_run_where_they_fit(tiny, capsys, tmp_path: Path) -> None:
    folder = longbench(tmp_path, list(TEXTS))
    given = ["--suite", "longbench", "--data", str(folder), "--max-tokens", "4", "--json"]
    assert bench(*given) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    (point,) = found["points"]
    assert point["prompt"] == "longbench/1"
    assert SHORTEST <= point["prompt_tokens"] <= 2048 - 4 < LONGEST
    assert found["settings"]["sources"] == {
        "longbench": {"source": str(folder / "longbench.jsonl"), "revision": None}
    }
    assert "longbench has 1 prompts, fewer than the 16 asked for" in err
    assert bench(*given, "--context", "400") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["prompts"] == 2  # the short one cannot be made longer
    assert all(392 <= point["prompt_tokens"] <= 400 for point in found["points"])
    longbench(tmp_path, ["short", "long"])
    assert bench(*given) == 2
    message = "No prompt of longbench has from 1024 to 2044 tokens, as the context and --max-tokens"
    assert message in capsys.readouterr().err


def test_an_error_in_mid_run_still_shows_the_pairs_before_it(
    tiny, monkeypatch, capsys, tmp_path: Path
) -> None:
    true, done = Player._pair, []

    def failing(player, *given, **options):
        if done:
            raise CheckpointError("The weights have gone.")
        done.append(true(player, *given, **options))
        return done[0]

    monkeypatch.setattr(Player, "_pair", failing)
    report = tmp_path / "r.md"
    given = ["--samples", "3", "--max-tokens", "4", "--json", "--markdown", str(report)]
    assert bench(*given) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["partial"] is True
    assert (found["summary"]["pairs"], found["planned_pairs"]) == (1, 3)
    assert found["points"][0]["dflash"]["seconds"] == done[0].dflash.stats["total_seconds"]
    sentence = "Partial: the benchmark ended early, after 1 of 3 runs; these are the ones done"
    assert sentence in err
    assert sentence in report.read_text()
    assert err.rstrip().endswith("The weights have gone.")


@pytest.mark.parametrize(
    ("covered", "context", "automatic", "told"),
    [
        (64, ["--context", "300"], True, True),
        (512, ["--context", "300"], True, False),
        (64, [], True, False),  # prompts as they are
        (64, ["--context", "300"], False, False),  # no choice, so no costs
    ],
)
def test_costs_of_shorter_contexts_are_told(
    tiny, monkeypatch, capsys, covered: int, context: list[str], automatic: bool, told: bool
) -> None:
    costs = Costs(tuple(Measured(c, 1.0, {1: 1.1}, 0.1) for c in (32, covered)))
    monkeypatch.setattr(tiny, "automatic", automatic)
    monkeypatch.setattr(tiny, "calibrate", lambda: costs)
    assert bench("--samples", "1", "--max-tokens", "4", "--json", *context) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == told
    for note in notes:
        assert note.startswith("What a cycle costs is measured up to a context of 64 tokens here")
        assert 292 <= int(note.partition("for prompts of up to ")[2].split()[0]) <= 300
