"""The benchmark: its numbers from made-up runs, its refusals, its prompts, and a tiny whole run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from oracle import plain_logits
from tiny import tiny_config, tiny_target
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import VOCAB, tiny_engine

from dflash_mlx import cli, engine
from dflash_mlx.bench import measure, page, play, report
from dflash_mlx.bench.measure import Pair, Run
from dflash_mlx.bench.rival import MlxLm
from dflash_mlx.bench.suites import SUITES, Question, read_prompts, samples
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.errors import UsageError

TEXT = list(range(9))


def made(seconds: float, tokens: list[int] = TEXT, accepted: tuple[int, ...] = ()) -> Run:
    stats = GenerationStats(
        prompt_tokens=20, prefill_seconds=2.0, generation_seconds=seconds,
        total_seconds=2.0 + seconds, generation_tokens=len(tokens), peak_memory_gb=0.5,
    )  # fmt: skip
    for count in accepted:
        stats.count_cycle(3, count, count + 1)
    return Run(tokens, stats.to_json())


def pair(dflash: float = 2.0, plain: float = 4.0, again: float = 4.0, **options) -> Pair:
    own = made(dflash, accepted=(3, 0, 1))
    return Pair(made(plain), own, made(again), options.pop("greedy", True), **options)


def test_every_number_is_what_it_is_called() -> None:
    pairs = [pair(2.0), pair(1.0), pair(4.0)]
    found = measure.summarise(pairs, "float32")
    assert found["prompts"] == 3
    assert found["prefill_tps"] == 10
    assert found["ttft_seconds"] == 2
    assert found["generation_tps"] == {"plain": 2, "dflash": 4}
    assert found["speedup_generation"] == 2
    assert found["speedup_total"] == 6 / 4  # (2 + 4) seconds against (2 + 2)
    assert found["plain_against_itself"] == 1
    assert found["total_seconds"] == {"plain": 18, "dflash": 13}
    assert (found["latency_p50"], found["latency_p95"], found["latency_p99"]) == (4, 6, 6)
    assert found["tokens_per_cycle"] == pytest.approx(7 / 3)
    assert found["accept_histogram"] == [3, 3, 0, 3]
    assert found["accept_by_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    # 8 tokens of 2 s at 2 plain tokens a second: 4 plain steps, one of them outside the 3 cycles
    assert found["cycle_cost"] == pytest.approx((2.0 * 2 - 1) / 3)
    assert found["agreement"] == {
        "identical": 3, "total": 3, "first_difference": None, "logit_gap": None,
    }  # fmt: skip
    assert found["peak_memory_gb"] == 0.5
    assert found["refused"] is None


def test_a_median_of_ratios_is_not_a_ratio_of_medians() -> None:
    pairs = [pair(1.0, 4.0, 4.0), pair(8.0, 8.0, 8.0), pair(3.0, 2.0, 2.0)]
    assert measure.summarise(pairs, "float32")["speedup_generation"] == 1


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([], "nothing was measured"),
        ([pair(), pair(first_difference=3, logit_gap=0.2)], "1 of 2 prompts differ .* token 3"),
        ([pair(first_difference=9)], "where one text ends"),
        ([Pair(*[made(2.0, [1, 2] * 20)] * 3, True)], "1 of 1 texts repeat"),
        ([pair(again=5.0)], "plain decoding is 1.250 times as fast as itself"),
        ([Pair(*[made(2.0, [1])] * 3, True)], "could not be timed"),
    ],
)
def test_speed_ups_are_refused_with_the_reason(pairs: list[Pair], reason: str) -> None:
    found = measure.summarise(pairs, "float32")
    assert found["refused"] is not None
    assert re.search(reason, found["refused"])
    table = report.rows({"suites": {"s": found}, "summary": found, "partial": False})
    assert table[2][1:] == table[3][1:] == ["refused", "refused"]


def test_near_ties_and_sampled_texts_are_no_reason() -> None:
    near = pair(first_difference=3, logit_gap=2e-4)
    assert measure.refusal([near], "float32") is None
    assert measure.refusal([pair(first_difference=3, logit_gap=0.2)], "bfloat16") is None
    sampled = measure.summarise([pair(greedy=False)], "float32")
    assert sampled["agreement"]["total"] == 0
    assert sampled["refused"] is None


def test_repetition_is_counted_over_all_copies() -> None:
    assert measure.longest_repetition([1, 2, 3, 4]) == 0
    assert measure.longest_repetition([7, 1, 2, 1, 2, 1, 2, 9]) == 6
    assert measure.longest_repetition([5, 5, 5]) == 3
    assert measure.longest_repetition([4, 1, 2, 3, 1, 2, 3]) == 6  # twice is a repetition
    assert measure.degenerate([1, 2, 3] * 20)
    assert not measure.degenerate(list(range(60)))
    assert not measure.degenerate([1] * 10)  # too short to tell
    assert measure.first_difference([1, 2], [1, 2, 3]) == 2


def test_samples_come_with_every_suite() -> None:
    for suite in SUITES:
        found = samples(suite, 99)
        assert len(found) == 16
        assert len({q.name for q in found}) == 16
    assert len(samples("mbpp", 3)) == 3
    assert samples("gsm8k", 1)[0].prompt.endswith("within \\boxed{}.")
    with pytest.raises(UsageError, match="no suite 'gsm9k'"):
        samples("gsm9k", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is no JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', "line 3 has no prompt"),
        ('["a"]', "line 1 is no JSON object"),
        ('{"turns": []}', "line 1 has turns that is \\[\\]"),
        ("", "has no prompts"),
    ],
)
def test_prompt_files_are_read_strictly(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_prompts(file, 9)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none", 9)


def test_prompt_files_are_those_of_training(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\u2028b"},  # no end of a line within JSON
        {"role": "assistant", "content": "c"},
    ]
    rows = [{"id": "t", "turns": ["b", "c"]}, {"id": "m", "messages": talk}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_prompts(file, 9) == [Question("t", "b"), Question("m", tuple(talk[:2]))]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tiny engine that the command loads whatever it is asked for."""
    from dflash_mlx.draft.checkpoint import open_drafter

    target = tiny_target("llama", vocab_size=VOCAB)
    config = drafter_config("full") | {"hidden_size": 48, "vocab_size": VOCAB}
    config["dflash_config"] = {"target_layer_ids": [0, 2], "mask_token_id": 5, "block_size": 4}
    config["num_target_layers"] = 4
    drafter = open_drafter(write_drafter(tmp_path / "d", config), target, dtype=target.dtype)
    made = tiny_engine(tmp_path, target=target, drafter=drafter, block_size=3)
    monkeypatch.setattr(engine, "load", lambda name, **options: made)
    return made


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "tiny", *arguments])
    return int(ended.value.code or 0)


def test_a_whole_run(row_invariant_blas, tiny, tmp_path: Path, capsys) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n')
    notes = tmp_path / "r.md"
    code = bench(
        "--prompts", str(file), "--max-tokens", "8", "--json", "--markdown", str(notes),
        "--html", str(tmp_path / "r.html"),
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert {"model", "drafter", "machine", "settings", "suites", "summary"} <= set(found)
    # fmt: off
    keys = {
        "prompts", "prefill_tps", "ttft_seconds", "generation_tps", "speedup_generation",
        "speedup_total", "total_seconds", "latency_p50", "latency_p95", "tokens_per_cycle",
        "accept_histogram", "accept_by_position", "cycle_cost", "agreement", "peak_memory_gb",
    }
    # fmt: on
    assert keys <= set(found["summary"]) == set(found["suites"]["own"])
    assert found["summary"]["agreement"]["identical"] == 2
    assert found["summary"]["tokens"] == 16
    assert sum(found["summary"]["accept_histogram"]) > 4
    assert not found["partial"]
    assert "own: 2 of 2" in err
    assert "| prompts | 2 | 2 |" in notes.read_text()
    assert (tmp_path / "r.html").read_text().count("<circle") == 8  # two plots, two sides


def test_the_page_is_whole_and_draws_to_scale() -> None:
    found = measure.summarise([pair(), pair(1.0)], "float32")
    head = {"model": "<b>m", "drafter": "d", "machine": {"chip": "a & b"}, "settings": {}}
    points = measure.points([pair(), pair(1.0)])
    drawn = page.page(report.document(head, {"s": found}, found, points, True))
    assert "<b>m" not in drawn
    assert "http" not in drawn  # nothing from elsewhere
    assert "Partial" in drawn
    tree = ElementTree.fromstring(drawn.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    figures = tree.findall(".//svg")
    assert len(figures) == 4
    speeds, latencies, positions, _ = figures
    heights = [float(dot.get("cy")) for dot in speeds.findall("circle")]
    assert heights[0] == heights[1] == pytest.approx(178 - 136 * 2 / 8, abs=0.1)  # of 8 tok/s
    assert min(heights) == 42  # the fastest touches the top
    assert len(latencies.findall("circle")) == 4
    bars = [float(bar.get("height")) for bar in positions.findall("rect")]
    assert bars[1] == bars[2] == pytest.approx(bars[0] / 2, abs=0.1)


def test_an_interrupted_run_shows_what_is_done(tiny, monkeypatch, capsys) -> None:
    true = play.play

    def interrupted(*arguments):
        yield next(iter(true(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(play, "play", interrupted)
    assert bench("--suite", "mbpp", "--samples", "2", "--max-tokens", "4") == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["prompts", "1", "1"]
    assert "Partial: the run was interrupted" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite gsm9k", "There is no suite 'gsm9k'"),
        ("--samples 0", "--samples is 0"),
        ("--max-tokens 1", "--max-tokens is 1"),
        ("--max-tokens 4000", "reaches beyond the context"),
        ("--temp -1", "--temp is -1.0"),
        ("--against ollama", "--against is 'ollama'"),
        ("--html /nowhere/r.html", "cannot be written"),
        ("--block-size many", "--block-size is 'many'"),
    ],
)
def test_bad_requests_are_refused(tiny, capsys, arguments: str, message: str) -> None:
    assert bench(*arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_the_gap_is_that_of_the_targets_logits(tiny) -> None:
    ids = [3, 1, 4, 1, 5]
    row = plain_logits(tiny.target, ids)[-1]
    assert play._logit_gap(tiny, ids, 7, 9) == pytest.approx(abs(row[7] - row[9]), abs=1e-5)
    one, two = made(1.0, [1, 2, 3]), made(1.0, [1, 5, 3])
    question = Question("q", "a")
    found = play._pair(tiny, question, [one, two, one], True)
    ids = [*tiny.prompt("a", None, None).ids, 1]
    assert found.first_difference == 1
    row = plain_logits(tiny.target, ids)[-1]
    assert found.logit_gap == pytest.approx(abs(row[2] - row[5]), abs=1e-5)


def test_mlx_lm_runs_the_same_weights(row_invariant_blas, tiny) -> None:
    rival = MlxLm(tiny, tiny_config("llama", vocab_size=VOCAB))
    (found,) = play.play(tiny, [Question("q", "Count.")], play.Settings(max_tokens=8), rival)
    assert found.rival is not None
    assert found.rival.tokens == found.plain.tokens
    summary = measure.summarise([found], "float32")
    assert summary["mlx_lm"]["identical_to_plain"] == 1
    assert summary["mlx_lm"]["generation_tps"] == found.rival.rate > 0
    table = report.rows({"suites": {}, "summary": summary, "partial": False})
    assert [row[1] for row in table if row[0] == "mlx-lm texts as plain's"] == ["1"]
    with pytest.raises(UsageError, match="mlx-lm cannot run"):
        MlxLm(tiny, {"model_type": "nothing"})
