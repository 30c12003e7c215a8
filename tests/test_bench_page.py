"""The benchmark's HTML page: drawn to scale, and as a real browser shows it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_reports import document, pair
from browser import NAMES, Browser, find_browser

from dflash_mlx.bench import measure, plots
from dflash_mlx.bench.page import page
from dflash_mlx.bench.plots import Series

#: names as long as they get
FACTS = {
    "model": "models/an-organisation-with-a-long-name/A-Model-123B-A45B-Instruct-2607-FP8-dynamic",
    "drafter": "asset:smollm2-135m-dflash2-b8",
    "machine": {
        "chip": "AMD EPYC 9B14 96-Core Processor",
        "kernels": "MLX's operations: MLX has no Metal device here.",
        "versions": {"mlx": "0.32.4", "mlx_lm": "0.32.2", "dflash-mlx": "0.1.0"},
    },
    "settings": {
        "max_tokens": 128,
        "temperatures": [0.0, 1.0],
        "contexts": [1024, 4096, 16384],
        "sources": {"gsm8k": {"source": "hub: openai/gsm8k", "revision": "e53f0488" * 5}},
        "calibration": "1a84c5ed55d7803c" * 4,
    },
}


@pytest.fixture(scope="module")
def report() -> dict:
    pairs = [pair(1.0 + n / 7, 4.0 - n / 9, 4.0 - n / 9, name=f"q{n}") for n in range(12)]
    found = measure.summarise(pairs)
    suites = {
        f"{suite} {length}k temp {temperature}": found
        for suite in ("gsm8k", "livecodebench")
        for length in (4, 16)
        for temperature in (0, 1)
    }
    refused = measure.summarise([pair(again=9.0)])
    return document(*pairs, **FACTS, suites=suites | {"mt-bench": refused}, partial=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no browser; .ci/run installs chromium-headless-shell")
        pytest.skip("needs Chromium or Chrome; DFLASH_BROWSER names one")
    with Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours written as rgb(r, g, b), as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        shares = [int(part) / 255 for part in re.findall(r"\d+", colour)]
        assert len(shares) == 3, colour
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(
    browser: Browser, report: dict, width: int, dark: bool, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(report), "utf-8")
    browser.open(file.as_uri(), width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [file.as_uri()]
    assert browser.evaluate("document.title") == f"{FACTS['model']} with {FACTS['drafter']}"
    root = "document.documentElement"
    assert browser.evaluate(f"{root}.clientWidth") == width
    assert browser.evaluate(f"{root}.scrollWidth") == width, "the page is wider than the window"
    # Nothing beside the table of numbers, which scrolls by itself, is wider than its place.
    wide = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide table') && "
        "!e.closest('svg') && (e.getBoundingClientRect().right > innerWidth + 1 || "
        "(e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !e.matches('.wide'))))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    plots_seen = browser.evaluate(
        "[...document.querySelectorAll('svg')].map(s => {const b = s.getBoundingClientRect(); "
        "return [b.width, b.height, s.querySelectorAll('circle, rect, path.dflash').length]})"
    )
    assert len(plots_seen) == 4
    for seen_width, height, marks in plots_seen:
        assert seen_width >= min(width, 440) * 0.8
        assert height >= 150
        assert marks > 0
    # Every text of a plot lies within the plot, and stands out from the ground (WCAG 2, AA).
    outside = browser.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => {const a = "
        "t.getBoundingClientRect(), b = t.closest('svg').getBoundingClientRect(); return a.left < "
        "b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1})"
        ".map(t => t.textContent)"
    )
    assert outside == []
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    fills = browser.evaluate(
        "[...document.querySelectorAll('svg text')].map(t => getComputedStyle(t).fill)"
    )
    assert fills
    assert all(contrast(fill, ground) >= 4.5 for fill in set(fills)), set(fills)


def test_the_browser_would_see_faults(browser: Browser, tmp_path: Path) -> None:
    """What the test above relies on: errors, requests and overflow are noticed."""
    file = tmp_path / "bad.html"
    file.write_text(
        "<!doctype html><body><script>undefined_name()</script><img src='missing.png'>"
        "<div style='width: 900px'>wide</div>"
    )
    browser.open(file.as_uri(), 400)
    assert any("undefined_name" in str(event) for event in browser.complaints)
    assert len(browser.requests) == 2
    assert browser.evaluate("document.documentElement.scrollWidth") > 400


def test_ci_installs_a_browser_where_none_of_these_is() -> None:
    ci = (Path(__file__).parents[1] / ".ci/run").read_text()
    assert f"for name in {' '.join(NAMES)}; do" in ci
    assert "export CI=" in ci  # so that a missing one fails here


def tree(drawn: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn.partition("\n")[2])


def test_the_page_is_whole_and_draws_to_scale() -> None:
    drawn = page(document(pair(), pair(1.0), model="<b>m", partial=True))
    assert "<b>m" not in drawn
    assert "http" not in drawn  # nothing from elsewhere
    assert "Partial" in drawn
    speeds, latencies, positions, _ = tree(drawn).findall(".//svg")
    heights = [float(dot.get("cy")) for dot in speeds.findall("circle")]
    span = plots.BASE - plots.TOP
    assert heights[:2] == [pytest.approx(plots.BASE - span * 2 / 8, abs=0.1)] * 2  # of 8 tok/s
    assert min(heights) == plots.TOP  # the fastest touches the top
    assert len(latencies.findall("path[@class='dflash']")) == 1
    bars = [float(bar.get("height")) for bar in positions.findall("rect")]
    assert bars[1] == bars[2] == pytest.approx(bars[0] / 2, abs=0.1)


def test_an_empty_report_can_be_drawn() -> None:
    drawn = page(document(partial=True))
    assert len(tree(drawn).findall(".//svg")) == 4
    assert "nothing was measured" in drawn


@pytest.mark.parametrize(
    ("largest", "marks"),
    [
        (8.0, [0, 2, 4, 6, 8]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (61, [0, 20, 40, 60, 80]),
        (4096, [0, 1000, 2000, 3000, 4000, 5000]),
        (0.0031, [0, 0.001, 0.002, 0.003, 0.004]),
    ],
)
def test_axes_have_round_marks(largest: float, marks: list[float]) -> None:
    top = plots._round_up(largest)
    assert plots._marks(top) == pytest.approx(marks)
    assert top >= largest


def test_a_step_holds_its_height() -> None:
    drawn = plots.steps([Series("plain", [(1.0, 0.5), (2.0, 1.0)])])
    middle = (plots.LEFT + plots.END) / 2
    half = (plots.TOP + plots.BASE) / 2
    path = f"M{middle:.1f} {plots.BASE}H{middle:.1f}V{half:.1f}H{plots.END:.1f}V{plots.TOP:.1f}"
    assert f'class="plain" d="{path}H{plots.END}"' in drawn
