"""The benchmark's numbers and refusals, from made-up runs."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest
from bench_reports import TEXT, document, made, pair, same

from dflash_mlx.bench import compare, measure, report
from dflash_mlx.bench.compare import Difference
from dflash_mlx.bench.measure import Pair
from dflash_mlx.bench.page import page


def test_every_number_is_what_it_is_called() -> None:
    pairs = [pair(2.0, drafter_share=0.25), pair(1.0), pair(4.0)]
    found = measure.summarise(pairs)
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
    assert found["drafter_share"] == 0.25
    assert found["answer_tokens"] == {"asked": 16, "plain": 9, "dflash": 9}
    agreement = found["agreement"]
    assert (agreement.pop("identical"), agreement.pop("total")) == (3, 3)
    assert set(agreement.values()) == {None}
    assert found["peak_memory_gb"] == 0.5
    assert found["refused"] is None


def test_what_is_told_of_one_side_is_told_of_dflash() -> None:
    """Every number of plain decoding is another one, and so are the texts."""
    loop, texts = [7] * 8, ([1, 2, 3, 4, 3, 4, 5, 6], [*range(9), 0], [*range(8)])
    pairs = [
        Pair(
            f"q{n}", made(4.0, loop, prefill=5.0, peak=9.0),
            made(2.0, text, prefill=2.0 + n, peak=0.5 + n), made(4.0, loop, prefill=7.0, peak=8.0),
            True, 16,
        )
        for n, text in enumerate(texts)
    ]  # fmt: skip
    found = measure.summarise(pairs)
    assert found["prefill_tps"] == pytest.approx(20 / 3)
    assert found["ttft_seconds"] == 3
    assert found["peak_memory_gb"] == 2.5
    assert found["longest_repetition"] == 4
    assert found["distinct_share"] == 0.9  # the middle one of 0.75, 0.9 and 1
    assert found["latency_p50"] == 5
    assert found["tokens"] == 26


def test_a_median_of_ratios_is_not_a_ratio_of_medians() -> None:
    pairs = [pair(1.0, 4.0, 4.0), pair(8.0, 8.0, 8.0), pair(3.0, 2.0, 2.0)]
    assert measure.summarise(pairs)["speedup_generation"] == 1


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([], "nothing was measured"),
        (
            [pair(), pair(difference=Difference(3, 0.2, 1e4, False))],
            "1 of 2 runs differ .* at token 3",
        ),
        ([pair(difference=Difference(9, math.inf, math.inf, False))], "where one text ends"),
        ([same(made(2.0, [1, 2] * 20))], "1 of 1 texts repeat"),
        ([pair(again=5.0)], "plain decoding is 1.250 times as fast as itself"),
        ([same(made(2.0, [1]))], "could not be timed"),
    ],
)
def test_speed_ups_are_refused_with_the_reason(pairs: list[Pair], reason: str) -> None:
    found = measure.summarise(pairs)
    assert found["refused"] is not None
    assert found["speedup_generation"] is found["speedup_total"] is None
    assert re.search(reason, found["refused"])
    shown = document(*pairs)
    table = report.rows(shown)
    assert table[3][1:] == table[4][1:] == ["refused"]
    assert report.headline(shown) == "No speed-up is claimed."
    untimed = {"summary": {"refused": None, "speedup_total": None, "speedup_generation": 1.5}}
    assert report.headline(untimed) == "No speed-up is claimed."
    assert "1.50x" in report.headline(untimed, with_prefill=False)
    assert f"No speed-up is claimed for s: {found['refused']}." in report.remarks(shown)


def test_near_ties_and_sampled_texts_are_no_reason() -> None:
    near = pair(difference=Difference(3, 2e-6, 3.0, True))
    assert measure.refusal([near]) is None
    assert measure.summarise([near])["agreement"]["identical"] == 0
    sampled = measure.summarise([pair(greedy=False)])
    assert sampled["agreement"]["total"] == 0
    assert sampled["refused"] is None


def test_a_disagreement_is_told_of_one_pair() -> None:
    """The first index of one pair beside the gap of another would describe no text."""
    early, late = Difference(1, 1e-6, 2.0, True), Difference(7, 0.5, 900.0, False)
    pairs = [pair(name="a", difference=early), pair(name="b", difference=late), pair(name="c")]
    assert measure.summarise(pairs)["agreement"] == {
        "identical": 1, "total": 3, "prompt": "b", "first_difference": 7, "logit_gap": 0.5,
        "gap_spacings": 900.0,
    }  # fmt: skip
    ended = pair(name="d", difference=Difference(4, math.inf, math.inf, False))
    agreement = measure.summarise([*pairs, ended])["agreement"]
    assert (agreement["prompt"], agreement["first_difference"]) == ("d", 4)
    assert agreement["logit_gap"] is None  # JSON knows no infinity


def test_repeats_are_pairs_and_sampled_texts_are_compared_by_the_token() -> None:
    found = measure.summarise([pair(), pair()])
    assert (found["prompts"], found["pairs"]) == (1, 2)
    short = Pair("q", made(4.0), made(1.0, TEXT[:4]), made(4.0), False, 16)
    assert measure.summarise([short])["speedup_total"] == pytest.approx((6 / 9) / (3 / 4))


def test_the_histogram_has_a_row() -> None:
    """Cycles that accepted 0, 1, 2 and 3 drafts, of a pair with one of 3, of 0 and of 1 each."""
    shown = document(pair())
    assert ["cycles by drafts accepted", "1 1 0 1"] in report.rows(shown)
    assert "| cycles by drafts accepted | 1 1 0 1 |" in report.markdown(shown)


def test_columns_are_cut_to_the_terminal() -> None:
    shown = document(pair(), by_context={"1k": measure.summarise([pair()])})
    whole = report.rows(shown)
    assert whole[0] == ["", "s", "all 1k", "all"]
    sizes = [max(map(len, column)) for column in zip(*whole, strict=True)]
    parts = report.tables(shown, width=sum(sizes[:3]) + 2 * report.GAP)
    assert [part[0] for part in parts] == [["", "s", "all 1k"], ["", "all"]]
    assert [row for part in parts for row in part if row[0] == "prompts"] == [
        ["prompts", "1", "1"], ["prompts", "1"],
    ]  # fmt: skip
    assert len(report.tables(shown, width=sum(sizes[:3]) + 2 * report.GAP - 1)) == 3
    assert [len(t[0]) for t in report.tables(shown, width=1)] == [2, 2, 2]


def test_repetition_is_counted_over_all_copies() -> None:
    assert measure.longest_repetition([1, 2, 3, 4]) == 0
    assert measure.longest_repetition([7, 1, 2, 1, 2, 1, 2, 9]) == 6
    assert measure.longest_repetition([5, 5, 5]) == 3
    assert measure.longest_repetition([4, 1, 2, 3, 1, 2, 3]) == 6  # twice is a repetition
    rng = np.random.default_rng(3)
    for size in (0, 1, 2, 7, 25, 60):
        for letters in (2, 3, 9):
            text = rng.integers(0, letters, size).tolist()
            assert measure.longest_repetition(text) == by_definition(text)
    assert compare.first_difference([1, 2], [1, 2, 3]) == 2
    assert compare.first_difference([1, 2], [1, 2]) is None


def by_definition(text: list[int]) -> int:
    """Every stretch with every period: does it have two copies, and repeat throughout?"""
    return max(
        (
            end - start
            for start in range(len(text))
            for end in range(start + 2, len(text) + 1)
            for period in range(1, (end - start) // 2 + 1)
            if text[start : end - period] == text[start + period : end]
        ),
        default=0,
    )


def test_phrases_of_any_length_are_seen_and_quickly() -> None:
    phrase = list(range(60))
    assert measure.longest_repetition(phrase * 3 + phrase[:7]) == 187
    assert made(2.0, [900, *phrase * 2, 901]).degenerate
    long = made(2.0, [*range(1000), *range(1000), *range(48)])
    start = time.process_time()
    assert (long.longest_repetition, long.degenerate) == (2048, True)
    assert time.process_time() - start < 1  # 0.02 s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3] * 20, True),
        ([*range(60)], False),
        ([1, 2] * 8, True),
        ([1] * 15, False),  # too short to tell
        ([*range(8)] + [9] * 8, False),  # half of it is not most of it
        ([*range(7)] + [9] * 9, True),
        ([0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0], True),
    ],
)
def test_a_text_is_degenerate_by_its_repetition_or_by_few_tokens(
    text: list[int], expected: bool
) -> None:
    assert made(2.0, text).degenerate is expected


def test_degenerate_pairs_are_counted_and_make_no_speed_up() -> None:
    loop = [1, 2] * 10
    fast = Pair("loop", made(4.0, loop), made(0.5, loop), made(4.0, loop), True, 20,
                rival=made(4.0, loop))  # fmt: skip
    pairs = [*(pair(2.0, name=f"q{n}", rival=made(4.0)) for n in range(3)), fast]
    found = measure.summarise(pairs)
    assert (found["degenerate"], found["pairs"], found["refused"]) == (1, 4, None)
    alone = measure.summarise(pairs[:3])
    for name in ("speedup_generation", "speedup_total"):
        assert found[name] == alone[name]
    shown = document(*pairs)
    assert ["repetitive texts", "1 of 4"] in report.rows(shown)
    sentence = "In 1 of 4 runs a text mostly repeats itself; these runs count in no speed-up."
    for text in (report.markdown(shown), page(shown)):
        assert sentence in text
        assert "repetitive texts" in text
    assert "repetitive" not in report.markdown(document(*pairs[:3]))
    even = [*pairs[:3], fast, fast]
    assert measure.summarise(even)["refused"] == "2 of 5 texts repeat themselves"


def test_names_cannot_end_a_cell_of_the_markdown() -> None:
    numbers = measure.summarise([pair()])
    sources = {"a|b\nc": {"source": "a|b\nc.jsonl", "revision": None}}
    shown = document(pair(), suites={"a|b\nc": numbers}, settings={"sources": sources})
    lines = report.markdown(shown).splitlines()
    assert r"|  | a\|b c |" in lines
    assert r"| prompts of a\|b c | a\|b c.jsonl |" in lines


def test_a_refused_speed_up_is_none_against_mlx_lm_either() -> None:
    claimed = measure.summarise([pair(rival=made(4.0))])["mlx_lm"]
    refused = measure.summarise([pair(again=5.0, rival=made(4.0))])["mlx_lm"]
    assert claimed["dflash_against_it"] == 2
    assert refused["dflash_against_it"] is None
    assert refused["plain_against_it"] is not None
