"""The benchmark's report as one self-contained HTML page with plots drawn as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dflash_mlx.bench.plots import Series, bars, dots, figure, steps
from dflash_mlx.bench.report import facts, headline, remarks, rows, title

_SIDES = (("plain", "plain"), ("dflash", "DFlash"))
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5d6673; --line: #d9dde3; --ground: #fff;
  --plain: #8a929e; --dflash: #2563d9; --alarm: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #9aa3b0; --line: #363c47;
  --ground: #15181d; --plain: #8b94a1; --dflash: #6ea0ff; --alarm: #ff8a80 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.headline { font-size: 1.15rem; margin: 0 0 1rem }
.remark { border-left: 3px solid var(--alarm); padding-left: .8rem; margin: .4rem 0;
  overflow-wrap: anywhere }
.wide { overflow-x: auto; margin-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left; color: var(--soft) }
tr + tr { border-top: 1px solid var(--line) }
.wide td:first-child, .wide th:first-child { position: sticky; left: 0; background: var(--ground) }
@media (max-width: 40rem) { .wide td:first-child { white-space: normal; min-width: 8rem } }
.facts { width: 100%; table-layout: fixed }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top }
.facts td:first-child { width: 9.5rem }
.plots { display: grid; gap: 1.5rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)) }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600; margin-bottom: .2rem }
svg { display: block; width: 100%; height: auto }
svg text { font-size: 12px; fill: var(--soft) }
.grid { stroke: var(--line) } .base { stroke: var(--soft) }
circle, rect { fill-opacity: .8 } path { fill: none }
circle.plain, rect.plain { fill: var(--plain) } circle.dflash, rect.dflash { fill: var(--dflash) }
path.plain { stroke: var(--plain); stroke-width: 2 }
path.dflash { stroke: var(--dflash); stroke-width: 2 }
.key { margin: 1rem 0 0; color: var(--soft) }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .3em 0 0 }
.key span + span { margin-left: 1.2em }
"""


def page(report: dict[str, Any], *, with_prefill: bool = True) -> str:
    """The page; it loads nothing from elsewhere."""
    name = escape(title(report))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
            f"<title>{name}</title>",
            f"<style>{_STYLE}</style></head><body><h1>{name}</h1>",
            f'<p class="headline">{escape(headline(report, with_prefill=with_prefill))}</p>',
            *(f'<p class="remark">{escape(sentence)}</p>' for sentence in remarks(report)),
            f'<div class="wide">{_table(rows(report, with_prefill=with_prefill))}</div>',
            f'<p class="key">{_key()}</p><div class="plots">',
            *_figures(report["summary"], report["points"]),
            "</div><h2>Machine and settings</h2>",
            _table(facts(report), style="facts"),
            "</body></html>\n",
        ]
    )


def _table(lines: Sequence[Sequence[str]], style: str = "") -> str:
    """style "facts" has no heading."""
    made = []
    for number, line in enumerate(lines):
        cell = "td" if style or number else "th"
        made.append("<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in line) + "</tr>")
    return f'<table class="{style}">' + "".join(made) + "</table>"


def _key() -> str:
    return " ".join(
        f'<span><i style="background: var(--{side})"></i>{name}</span>' for side, name in _SIDES
    )


def _figures(summary: dict[str, Any], points: Sequence[dict[str, Any]]) -> list[str]:
    """points: see `measure.points`."""
    speeds, latencies = [], []
    for side, _ in _SIDES:
        timed = [p for p in points if p[side]["tps"] is not None]
        speeds.append(
            Series(
                side,
                [(p["prompt_tokens"], p[side]["tps"]) for p in timed],
                [f"{p['prompt']} ({p['group']}): {p[side]['tps']:.1f} tok/s" for p in timed],
            )
        )
        seconds = sorted(p[side]["seconds"] for p in points)
        shares = [(i + 1) / len(seconds) for i in range(len(seconds))]
        latencies.append(Series(side, list(zip(seconds, shares, strict=True))))
    histogram = [float(count) for count in summary["accept_histogram"]]
    return [
        figure("Speed against context", "tokens of the prompt", "tok/s", dots(speeds)),
        figure("Latency", "seconds of a request", "share of requests", steps(latencies)),
        figure(
            "Acceptance by position",
            "position in the block",
            "share of cycles",
            bars(summary["accept_by_position"], 1, "dflash"),
        ),
        figure("Drafts accepted a cycle", "drafts", "cycles", bars(histogram, 0, "dflash")),
    ]
