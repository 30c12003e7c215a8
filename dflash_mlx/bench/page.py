"""The benchmark's report as one self-contained HTML page with plots drawn as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dflash_mlx.bench.report import remarks, rows

WIDTH, HEIGHT, MARGIN = 420, 220, 42
PLAIN, OWN = "#8a8f98", "#2f6fde"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr + tr { border-top: 1px solid #8884 }
figure { display: inline-block; margin: 1rem 1rem 0 0 } figcaption { font-weight: 600 }
svg text { font-size: 11px; fill: currentColor } .remark { border-left: 3px solid #c33;
padding-left: .8rem } @media (prefers-color-scheme: dark) { body { background: #16181d;
color: #dde } }
"""


def page(report: dict[str, Any], *, with_prefill: bool = True) -> str:
    """The page; it loads nothing from elsewhere."""
    title = escape(f"{report['model']} with {report['drafter']}")
    facts = {**report["machine"], **report["settings"]}
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
            *(f'<p class="remark">{escape(sentence)}</p>' for sentence in remarks(report)),
            _table(rows(report, with_prefill=with_prefill)),
            *_figures(report["summary"], report["points"]),
            "<h2>Machine and settings</h2>",
            _table([[name, str(fact)] for name, fact in facts.items()], head=False),
            "</body></html>\n",
        ]
    )


def _table(lines: Sequence[Sequence[str]], *, head: bool = True) -> str:
    made = []
    for number, line in enumerate(lines):
        cell = "th" if head and not number else "td"
        made.append("<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in line) + "</tr>")
    return "<table>" + "".join(made) + "</table>"


def _figures(summary: dict[str, Any], points: Sequence[dict[str, Any]]) -> list[str]:
    """points: of every pair its prompt_tokens, and tok/s and latency of both sides."""
    histogram = [float(count) for count in summary["accept_histogram"]]
    speeds = [
        (color, [(p["prompt_tokens"], p[side]["tps"]) for p in points if p[side]["tps"]])
        for side, color in (("plain", PLAIN), ("dflash", OWN))
    ]
    latencies = [
        (color, _cumulated([p[side]["seconds"] for p in points]))
        for side, color in (("plain", PLAIN), ("dflash", OWN))
    ]
    return [
        _figure("Speed against context: tok/s by prompt tokens", _dots(speeds)),
        _figure("Latency: share of requests by seconds", _dots(latencies)),
        _figure("Accepted by position: share of cycles", _bars(summary["accept_by_position"], 1)),
        _figure("Drafts accepted a cycle: cycles", _bars(histogram, 0)),
        f'<p><span style="color:{PLAIN}">&#9679;</span> plain '
        f'<span style="color:{OWN}">&#9679;</span> DFlash</p>',
    ]


def _cumulated(seconds: Sequence[float]) -> list[tuple[float, float]]:
    return [(s, (i + 1) / len(seconds)) for i, s in enumerate(sorted(seconds))]


def _figure(title: str, drawing: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg role="img" aria-label="{escape(title)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{drawing}</svg></figure>'
    )


def _frame(right: float, top: float) -> str:
    """Axes from zero, with the largest values beside them."""
    base, end = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<path d="M{MARGIN} {MARGIN}V{base}H{end}" fill="none" stroke="currentColor"/>'
        f'<text x="{MARGIN}" y="{MARGIN - 8}">{top:.3g}</text>'
        f'<text x="{MARGIN - 12}" y="{base + 4}">0</text>'
        f'<text x="{end}" y="{base + 16}" text-anchor="end">{right:.4g}</text>'
    )


def _dots(series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    every = [point for _, points in series for point in points]
    right = max((x for x, _ in every), default=0) or 1
    top = max((y for _, y in every), default=0) or 1
    wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    made = [_frame(right, top)]
    for color, points in series:
        for x, y in points:
            cx, cy = MARGIN + wide * x / right, HEIGHT - MARGIN - high * y / top
            made.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{color}"/>')
    return "".join(made)


def _bars(values: Sequence[float], first: int) -> str:
    """Bars numbered from `first`."""
    top, count = max(values, default=0) or 1, len(values) or 1
    wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    made = [_frame(first + count - 1, top)]
    for index, value in enumerate(values):
        x, tall = MARGIN + wide * index / count, high * value / top
        made.append(
            f'<rect x="{x + 2:.1f}" y="{HEIGHT - MARGIN - tall:.1f}" '
            f'width="{wide / count - 4:.1f}" height="{tall:.1f}" fill="{OWN}">'
            f"<title>{first + index}: {value:.3g}</title></rect>"
        )
    return "".join(made)
