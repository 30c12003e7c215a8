"""Whole runs of `dflash-mlx bench` on a tiny model, and what it refuses before it runs."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle import plain_logits
from tiny import tiny_config, tiny_target
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import THINKING_TEMPLATE, VOCAB, tiny_engine

from dflash_mlx import cli, engine
from dflash_mlx.bench import compare, cycle, measure, play, report
from dflash_mlx.bench.play import Player, Settings
from dflash_mlx.bench.questions import Question
from dflash_mlx.bench.rival import MlxLm
from dflash_mlx.cli import bench as command
from dflash_mlx.errors import UsageError

SCHEMA = Path(measure.__file__).with_name("schema.md").read_text("utf-8")


def question(text: str = "Count.") -> Question:
    return Question("q", ({"role": "user", "content": text},))


def make_tiny(folder: Path, **options):
    from dflash_mlx.draft.checkpoint import open_drafter

    target = tiny_target("llama", vocab_size=VOCAB)
    config = drafter_config("full") | {"hidden_size": 48, "vocab_size": VOCAB}
    config["dflash_config"] = {"target_layer_ids": [0, 2], "mask_token_id": 5, "block_size": 4}
    config["num_target_layers"] = 4
    drafter = open_drafter(write_drafter(folder / "d", config), target, dtype=target.dtype)
    return tiny_engine(folder, target=target, drafter=drafter, block_size=3, **options)


@pytest.fixture(scope="module")
def made_engine(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(made_engine, monkeypatch: pytest.MonkeyPatch):
    """A tiny engine that the command loads whatever it is asked for."""
    monkeypatch.setattr(engine, "load", lambda name, **options: made_engine)
    return made_engine


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "tiny", *arguments])
    return int(ended.value.code or 0)


def kinds(found: Any, path: str = "") -> dict[str, set[str]]:
    """Every path of a JSON document with the kinds of its values; * stands for any key of the
    sections whose keys are names, and for list elements."""
    named = re.fullmatch(
        r"(suites|by_context|by_temperature|settings\.sources|machine\.versions)", path
    )
    if isinstance(found, dict) and found:
        paths: dict[str, set[str]] = {}
        for key, value in found.items():
            below = f"{path}.{'*' if named else key}".removeprefix(".")
            for name, some in kinds(value, below).items():
                paths.setdefault(name, set()).update(some)
        return paths
    if isinstance(found, list) and found and isinstance(found[0], dict):
        paths = {}
        for value in found:
            for name, some in kinds(value, f"{path}.*").items():
                paths.setdefault(name, set()).update(some)
        return paths
    kind = {bool: "boolean", int: "number", float: "number", str: "text", list: "list"}
    return {path: {"nothing" if found is None else kind.get(type(found), "object")}}


def documented() -> dict[str, set[str]]:
    """Paths of schema.md with their kinds; a line about NUMBERS stands for each place of them."""
    lines = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", SCHEMA, re.MULTILINE)
    assert len(lines) > 60
    places = ("summary", "suites.*", "by_context.*", "by_temperature.*")
    found = {}
    for path, kind in lines:
        for place in places if path.startswith("NUMBERS") else [""]:
            found[path.replace("NUMBERS", place)] = set(kind.strip().split(" or "))
    return found


@dataclass
class Whole:
    """One run with everything: its exit code, JSON document, remarks, Markdown and page."""

    code: int
    found: dict[str, Any]
    err: str
    notes: str
    page: str


@pytest.fixture(scope="module")
def whole(made_engine, row_invariant_blas, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "own.jsonl").write_text(
        '{"id": "a", "prompt": "a"}\n{"id": "b", "turns": ["b", "c"]}\n'
    )
    rival = MlxLm(made_engine, tiny_config("llama", vocab_size=VOCAB))
    arguments = [
        "--prompts", str(folder / "own.jsonl"), "--max-tokens", "6", "--json", "--samples", "3",
        "--markdown", str(folder / "r.md"), "--html", str(folder / "r.html"), "--temp", "0,1",
        "--context", "60,90", "--against", "mlx-lm",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", lambda name, **options: made_engine)
        patch.setattr(command, "_rival", lambda engine: rival)
        patch.setattr(sys, "stdout", TextIOWrapper(out_bytes := BytesIO(), "utf-8"))
        patch.setattr(sys, "stderr", TextIOWrapper(err_bytes := BytesIO(), "utf-8"))
        code = bench(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = out_bytes.getvalue().decode(), err_bytes.getvalue().decode()
    notes, page = ((folder / name).read_text("utf-8") for name in ("r.md", "r.html"))
    return Whole(code, json.loads(out.splitlines()[-1]), err, notes, page)


def test_a_whole_run(whole: Whole) -> None:
    found = whole.found
    assert whole.code == 0
    assert {"model", "drafter", "machine", "settings", "suites", "summary"} <= set(found)
    assert list(found["suites"]) == [
        "own 60 temp 0", "own 60 temp 1", "own 90 temp 0", "own 90 temp 1",
    ]  # fmt: skip
    first = found["suites"]["own 60 temp 0"]
    assert (first["suite"], first["context"], first["temperature"]) == ("own", 60, 0)
    assert first["agreement"]["identical"] == first["agreement"]["total"] == 2
    assert first["mlx_lm"]["identical_to_plain"] == first["mlx_lm"]["greedy"] == 2
    assert found["by_context"]["90"]["prompts"] == 2
    assert found["by_temperature"]["1"]["agreement"]["total"] == 0
    assert found["summary"]["pairs"] == found["planned_pairs"] == len(found["points"]) == 8
    assert {p["prompt_tokens"] for p in found["points"]} <= {*range(52, 61), *range(82, 91)}
    assert found["summary"]["answer_tokens"]["asked"] == 6
    assert 0 < found["summary"]["drafter_share"] < 1
    assert found["settings"]["block_policy"] == "blocks of 3"
    assert sum(found["summary"]["accept_histogram"]) > 4
    assert not found["partial"]


def test_a_whole_run_is_told_and_kept(whole: Whole) -> None:
    sentence = "own at 90 has 2 prompts, fewer than the 3 asked for; all of them are run."
    assert sentence in whole.err
    assert sentence in whole.notes
    assert sentence in whole.page
    sentence = "Only first turns are run: 1 of the 2 prompts of own came with more."
    assert sentence in whole.found["notes"]
    assert sentence in whole.err
    assert len(whole.found["notes"]) == 3  # two lengths have too few prompts
    assert "own 90 temp 1: 2 of 2" in whole.err
    assert "| prompts | 2 | 2 | 2 | 2 | 2 | 2 | 4 | 4 | 4 |" in whole.notes
    assert whole.page.count("<circle") == 16  # a dot a pair and side


def test_the_documented_schema_is_what_comes_out(whole: Whole) -> None:
    found, described = kinds(whole.found), documented()
    assert set(found) == set(described)
    for path, some in found.items():
        assert some <= described[path], path


def test_an_interrupted_run_shows_what_is_done(tiny, monkeypatch, capsys, tmp_path: Path) -> None:
    true = Player._pair

    def interrupted(player, question, settings, repeat, *, share):
        if question.name == second:
            raise KeyboardInterrupt
        return true(player, question, settings, repeat, share=share)

    second = json.loads(
        (Path(cli.__file__).parents[1] / "assets/prompts/mbpp.jsonl").read_text().splitlines()[1]
    )["id"]
    monkeypatch.setattr(Player, "_pair", interrupted)
    html = tmp_path / "r.html"
    arguments = ["--suite", "mbpp,gsm8k", "--samples", "2", "--max-tokens", "4"]
    assert bench(*arguments, "--json", "--html", str(html)) == 130
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["partial"] is True
    assert list(found["suites"]) == ["mbpp"]
    assert (found["summary"]["prompts"], found["planned_pairs"]) == (1, 4)
    sentence = "Partial: the benchmark ended early, after 1 of 4 runs;"
    assert sentence in err
    assert sentence in html.read_text()
    assert [line.split()[1:] for line in err.splitlines() if line.startswith("prompts")] == [["1"]]


def test_a_run_interrupted_at_once_says_so(tiny, monkeypatch, capsys, tmp_path: Path) -> None:
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Player, "_pair", stop)
    (old := tmp_path / "r.md").write_text("an earlier report")
    arguments = ["--samples", "1", "--max-tokens", "4", "--json", "--markdown", str(old)]
    assert bench(*arguments, "--html", str(tmp_path / "r.html")) == 130
    out, err = capsys.readouterr()
    assert "Nothing was measured, so no report is written." in err
    assert [file.name for file in tmp_path.iterdir()] == ["r.md"]
    assert old.read_text() == "an earlier report"
    found = json.loads(out)
    assert found["partial"]
    assert found["suites"] == {}
    assert found["summary"]["refused"] == "nothing was measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite gsm9k", "There is no suite 'gsm9k'. Did you mean gsm8k?"),
        ("--suite ''", "There is no suite"),
        ("--suite gsm8k,gsm8k", "names a suite twice"),
        ("--suite mbpp --prompts x", "--suite and --prompts contradict each other"),
        ("--data hub --prompts x", "--data and --prompts contradict each other"),
        ("--prompts nowhere", "nowhere cannot be read"),
        ("--data /nowhere", "--data is '/nowhere'"),
        ("--samples 0", "--samples is 0"),
        ("--repeats 0", "--repeats is 0"),
        ("--max-tokens 1", "--max-tokens is 1"),
        ("--max-tokens 4000", "reaches beyond the context"),
        ("--context 1k --max-tokens 4000", "--context 1k and --max-tokens 4000 reach beyond"),
        ("--context 2", "No prompt of gsm8k can be brought to 2 tokens"),
        ("--context 1m", "--context has '1m'"),
        ("--context 1k,1024", "names a length twice"),
        ("--temp -1", "--temp has '-1'"),
        ("--temp 0,warm", "--temp has 'warm'"),
        ("--temp 0,0.0", "names a temperature twice"),
        ("--thinking", "has no thinking mode to turn on"),
        ("--against mlx-lm --exact", "--against and --exact contradict each other"),
        ("--against ollama", "--against is 'ollama'"),
        ("--html /nowhere/r.html", "--html cannot write /nowhere/r.html: there is no folder"),
        ("--markdown /tmp", "it is a folder"),
        ("--block-size many", "--block-size is 'many'"),
        ("--cool-down -1", "--cool-down is -1"),
        ("--cool-down 1e300", "--cool-down is 1e+300"),
        ("--context " + "9" * 5000, "--context has '999"),
    ],
)
def test_bad_requests_are_refused(tiny, capsys, arguments: str, message: str) -> None:
    assert bench(*arguments.replace("''", "none").split()) == 2
    assert message in capsys.readouterr().err


def test_places_are_checked_before_the_model_is_loaded(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(engine, "load", lambda *a, **k: pytest.fail("it was loaded"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    assert bench("--html", str(tmp_path / "r.html")) == 2
    assert "writing there is not permitted" in capsys.readouterr().err


def test_a_report_replaces_nothing_that_is_read(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(engine, "load", lambda *a, **k: pytest.fail("it was loaded"))
    (file := tmp_path / "gsm8k.jsonl").write_text('{"prompt": "a", "question": "b"}\n')
    (link := tmp_path / "link").symlink_to(file)
    for arguments, message in (
        (["--markdown", "r", "--html", "./r"], "--html would replace r, the file of --markdown."),
        (["--prompts", str(file), "--html", str(link)], "the file of --prompts."),
        (["--data", str(tmp_path), "--markdown", str(link)], "the file of --data for gsm8k."),
    ):
        assert bench(*arguments) == 2
        assert message in capsys.readouterr().err


def test_a_full_disk_does_not_take_the_numbers(monkeypatch, tmp_path: Path, capsys, whole) -> None:
    def full(self, *rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"r\.md cannot be written .No space left on device"):
        command._show(whole.found, True, True, tmp_path / "r.md", None)
    out, err = capsys.readouterr()
    assert json.loads(out) == whole.found
    assert "speed-up" in err


def test_thinking_is_the_templates_switch(tmp_path: Path) -> None:
    thinker = make_tiny(tmp_path, template=THINKING_TEMPLATE)
    lengths = []
    for thinking in (True, False):
        settings = Settings(max_tokens=2, thinking=thinking)
        (pair,) = Player(thinker).play([question()], settings)
        lengths.append(pair.dflash.stats["prompt_tokens"])
        prompt = thinker.prompt("Count.", thinking, None)
        assert lengths[-1] == len(prompt.ids)
    assert lengths[0] != lengths[1]


def test_the_gap_is_that_of_the_targets_logits(tiny, monkeypatch) -> None:
    monkeypatch.setattr(compare, "PREFILL_CHUNK", 3)
    ids, guarded = [3, 1, 4, 1, 5, 9, 2], []

    class Guard:
        def __enter__(self):
            guarded.append(True)

        def __exit__(self, *_):
            pass

    row = plain_logits(tiny.target, [*ids, 8])[-1]
    found = compare.difference(tiny.target, Guard, ids, [8, 7, 1], [8, 9, 1])
    assert (found.token, len(guarded) >= 3) == (1, True)
    assert found.gap == pytest.approx(abs(row[7] - row[9]), abs=1e-5)
    size = np.float32(np.abs(row).max())
    assert found.spacings == pytest.approx(found.gap / float(np.spacing(size)))
    assert compare.difference(tiny.target, Guard, ids, [8], [8]) is None
    exact = compare.difference(tiny.target, Guard, ids, [8, 7, 1], [8, 9, 1], exact=True)
    assert (exact.token, exact.gap, exact.near_tie) == (1, found.gap, False)
    ended = compare.difference(tiny.target, Guard, ids, [8, 7], [8])
    assert (ended.token, ended.near_tie) == (1, False)


@pytest.mark.parametrize("size", [1.0, 0.3, 17.25, 1023.0, 6e-3])
def test_spacings_are_those_of_the_type(size: float) -> None:
    assert compare.spacing(size, mx.float32) == np.spacing(np.float32(size))
    assert compare.spacing(size, mx.float16) == np.spacing(np.float16(size))
    assert compare.spacing(size, mx.bfloat16) == np.spacing(np.float32(size)) * 2**16
    assert compare.near_tie_gap(size, mx.bfloat16) == 8 * compare.spacing(size, mx.bfloat16)


def test_mlx_lm_runs_the_same_weights(row_invariant_blas, tiny) -> None:
    rival = MlxLm(tiny, tiny_config("llama", vocab_size=VOCAB))
    (found,) = Player(tiny, rival).play([question()], Settings(max_tokens=8))
    assert found.rival is not None
    assert found.rival.tokens == found.plain.tokens
    summary = measure.summarise([found])
    assert summary["mlx_lm"]["identical_to_plain"] == 1
    assert summary["mlx_lm"]["generation_tps"] == found.rival.rate > 0
    shown = {"suites": {}, "by_context": {}, "by_temperature": {}, "summary": summary}
    table = report.rows(shown)
    assert [row[1] for row in table if row[0] == "mlx-lm texts as plain's"] == ["1 of 1"]
    with pytest.raises(UsageError, match="mlx-lm cannot run"):
        MlxLm(tiny, {"model_type": "nothing"})


def test_the_drafters_share_is_of_both_halves(tiny, monkeypatch) -> None:
    spans = iter([(9.0, 1.0), (1.0, 3.0), (2.0, 2.0), (1.0, 3.0), (1.0, 9.0), (1.0, 3.0)])

    def halves(forwards, anchor, drafts):
        assert drafts == 2
        return tuple(cycle.Seconds(s, 0.0) for s in next(spans))

    monkeypatch.setattr(cycle.Forwards, "halves", halves)
    share = cycle.drafter_share(tiny.target, tiny.drafter, tiny._guard, [3, 4], 2)
    assert share == 0.25  # of the five behind the first one


def test_a_model_without_a_drafter_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        play.check_drafter(tiny_engine(tmp_path))
