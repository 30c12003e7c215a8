"""What a benchmark runs and in which order, seen by engines that record; and its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_reports import document, made, pair
from oracle import plain_greedy, plain_logits
from test_bench_run import bench, made_engine, question, tiny

from dflash_mlx import engine
from dflash_mlx.bench import job, measure, play
from dflash_mlx.bench.measure import Run
from dflash_mlx.bench.play import WARM_UP_TOKENS, Player, Settings
from dflash_mlx.bench.questions import Question
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.errors import UsageError

__all__ = ["made_engine", "tiny"]  # fixtures of the runs' tests
COUNT = 6


class Recorder:
    """The face of an engine, with answers by prompt; it writes down each request."""

    def __init__(self, real: Any, name: str, log: list, answers: dict[str, Run]) -> None:
        self.target, self.prompt, self._guard = real.target, real.prompt, real._guard
        self.drafter, self.block_size, self.exact = real.drafter, real.block_size, False
        self._name, self._log, self._answers = name, log, answers
        self.seconds: Iterator[float] | None = None

    def generate(self, prompt: str, *, max_tokens: int, sampling: SamplingParams, thinking: Any):
        self._log.append((self._name, prompt, max_tokens, sampling.temperature, sampling.seed))
        run = self._answers[prompt]
        stats = dict(run.stats)
        if self.seconds is not None and max_tokens != WARM_UP_TOKENS:
            stats["total_seconds"] = next(self.seconds)
        return SimpleNamespace(token_ids=run.tokens, stats=SimpleNamespace(to_json=lambda: stats))


class RecordedRival:
    def __init__(self, log: list, ids: dict[tuple[int, ...], str]) -> None:
        self._log, self._ids = log, ids

    def run(self, ids: list[int], max_tokens: int, temperature: float, seed: int) -> Run:
        self._log.append(("mlx-lm", self._ids[tuple(ids)], max_tokens, temperature, seed))
        return made(8.0)


@pytest.fixture
def recorded(tiny, monkeypatch: pytest.MonkeyPatch):
    """(player, log, drafter shares asked for); DFlash's text of "a" is wrong at token 3."""
    log: list[tuple] = []
    shares: list[tuple] = []
    ids = {name: tiny.prompt(name, None, None).ids for name in "ab"}
    texts = {name: plain_greedy(tiny.target, ids[name], COUNT) for name in "ab"}
    wrong = list(texts["a"])
    wrong[3] = int(plain_logits(tiny.target, [*ids["a"], *wrong[:3]])[-1].argmin())
    truth = {name: made(4.0, texts[name]) for name in "ab"}
    drafted = {
        "a": made(2.0, wrong, (1, 0, 1)),
        "b": made(2.0, texts["b"], (1, 0, 1)),
    }
    plain = Recorder(tiny, "plain", log, truth)
    plain.seconds = iter([4.0, 5.0] * 99)  # it never takes as long twice running
    monkeypatch.setattr(play, "plain_side", lambda engine: plain)
    monkeypatch.setattr(
        play,
        "drafter_share",
        lambda target, drafter, guard, prompt, drafts: shares.append((prompt, drafts)) or 0.25,
    )
    rival = RecordedRival(log, {tuple(found): name for name, found in ids.items()})
    player = Player(
        Recorder(tiny, "dflash", log, drafted), rival, lambda s: log.append(("rest", s))
    )
    return player, log, shares


def two() -> list[Question]:
    return [question("a"), question("b")]


def test_sides_alternate_behind_rests_and_seeds_go_by_repeats(recorded) -> None:
    player, log, _ = recorded
    settings = Settings(COUNT, temperature=0.7, seed=40, repeats=2, cool_down=2.5)
    list(player.play(two(), settings))
    sides = ("plain", "dflash", "plain", "mlx-lm")
    expected = [(who, "a", WARM_UP_TOKENS, 0.7, 40) for who in ("plain", "dflash", "mlx-lm")]
    for repeat in range(2):
        for name in "ab":
            for who in sides:
                expected += [("rest", 2.5), (who, name, COUNT, 0.7, 40 + repeat)]
    assert log == expected


def test_a_pair_is_of_plain_and_dflash_and_a_wrong_token_is_refused(recorded) -> None:
    player, log, shares = recorded
    pairs = list(player.play(two(), Settings(COUNT, seed=3)))
    assert {request[4] for request in log if request[0] != "rest"} == {3}  # greedy ones too
    for found in pairs:
        seconds = [run.stats["total_seconds"] for run in (found.plain, found.dflash, found.again)]
        assert seconds == [4, 4, 5]
        assert found.plain.tokens == found.again.tokens
        assert (found.greedy, found.asked, found.rival.rate) == (True, COUNT, made(8.0).rate)
    assert pairs[0].difference.token == 3
    assert not pairs[0].difference.near_tie
    assert pairs[1].difference is None
    assert [found.drafter_share for found in pairs] == [0.25, None]
    assert [drafts for _, drafts in shares] == [3]  # nine drafts in three cycles
    refused = measure.summarise(pairs)["refused"]
    assert re.search("of 1 of 2 runs differ beyond near-ties, most in q at token 3", refused)


def test_sampled_texts_are_not_compared(recorded) -> None:
    player, *_ = recorded
    found = next(iter(player.play(two(), Settings(COUNT, temperature=1.0))))
    assert (found.difference, found.greedy) == (None, False)


def test_every_list_and_temperature_is_warmed_up_once_as_it_will_run(recorded) -> None:
    player, log, _ = recorded
    some, others = two(), [question("b")]
    played = ((some, 0.0), (some, 0.0), (some, 1.0), (others, 1.0))
    for questions, temperature in played:
        list(player.play(questions, Settings(COUNT, temperature=temperature, repeats=2)))
    warmed = [(who, *rest) for who, *rest in log if rest[1:2] == [WARM_UP_TOKENS]]
    assert warmed == [
        (who, name, WARM_UP_TOKENS, temperature, 0)
        for name, temperature in (("a", 0.0), ("a", 1.0), ("b", 1.0))
        for who in ("plain", "dflash", "mlx-lm")
    ]


def test_options_of_loading_reach_the_loader(monkeypatch, capsys) -> None:
    seen: list[dict] = []

    def load(name: str, **options: Any):
        seen.append({"name": name, **options})
        raise UsageError("That was enough.")

    monkeypatch.setattr(engine, "load", load)
    given = ["--draft", "org/d", "--dtype", "float16", "--block-size", "4", "--exact"]
    assert bench(*given) == bench() == 2
    assert "That was enough." in capsys.readouterr().err
    assert seen == [
        {"name": "tiny", "draft": "org/d", "dtype": "float16", "block_size": 4, "exact": True},
        {"name": "tiny", "draft": "auto", "dtype": "auto", "block_size": "auto", "exact": False},
    ]


@pytest.mark.parametrize(
    ("given", "lines", "headline"),
    [
        (
            [],
            [["speed-up, prefill included", "1.50x"], ["speed-up of generation alone", "2.00x"]],
            "DFlash is 1.50x as fast as plain decoding, prefill included.",
        ),
        (
            ["--no-prefill"],
            [["speed-up, prefill left out", "2.00x"], ["speed-up with prefill", "1.50x"]],
            "DFlash is 2.00x as fast as plain decoding, prefill left out.",
        ),
    ],
)
def test_the_headline_says_whether_prefill_counts(
    tiny, monkeypatch, capsys, tmp_path: Path, given: list, lines: list, headline: str
) -> None:
    monkeypatch.setattr(job, "run", lambda player, groups: [])
    monkeypatch.setattr(job, "document", lambda *_: document(pair(2.0, 4.0)))
    files = [str(tmp_path / name) for name in ("r.md", "r.html")]
    assert bench("--samples", "1", *given, "--markdown", files[0], "--html", files[1]) == 0
    table = capsys.readouterr().out.splitlines()
    shown = [re.split(r"\s{2,}", line.strip()) for line in table if line.startswith("speed-up")]
    assert shown == lines
    markdown, html = (Path(file).read_text("utf-8") for file in files)
    rows = [f"| {label} | {value} |" for label, value in lines]
    assert "\n".join(rows) in markdown
    assert "".join(f"<tr><td>{label}</td><td>{value}</td></tr>" for label, value in lines) in html
    assert headline in markdown
    assert headline in html
