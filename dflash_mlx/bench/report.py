"""The benchmark's report as rows for a terminal and as Markdown, made from its JSON document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def document(
    head: dict[str, Any],
    suites: dict[str, dict[str, Any]],
    summary: dict[str, Any],
    points: list[dict[str, Any]],
    partial: bool,
) -> dict[str, Any]:
    """The JSON document: `head` has model, drafter, machine and settings; points: every pair."""
    return {**head, "suites": suites, "summary": summary, "points": points, "partial": partial}


def rows(report: dict[str, Any], *, with_prefill: bool = True) -> list[list[str]]:
    """A line a number and a column a suite, the last one over all prompts.

    with_prefill: the headline is the whole request; without it generation alone, and says so.
    """
    columns = [*report["suites"].items(), ("all", report["summary"])]
    table = [["", *(name for name, _ in columns)]]
    for label, show in _lines(with_prefill):
        table.append([label, *(show(numbers) for _, numbers in columns)])
    if "mlx_lm" in report["summary"]:
        table += [[label, *(show(n) for _, n in columns)] for label, show in _RIVAL_LINES]
    return table


def remarks(report: dict[str, Any]) -> list[str]:
    """Sentences below the table: what is refused and why, and what is missing."""
    found = []
    for name, numbers in [*report["suites"].items(), ("all", report["summary"])]:
        if numbers["refused"]:
            found.append(f"No speed-up is claimed for {name}: {numbers['refused']}.")
    if report["partial"]:
        found.append("Partial: the run was interrupted; these are the prompts done until then.")
    return found


def markdown(report: dict[str, Any], *, with_prefill: bool = True) -> str:
    """The whole report as Markdown."""
    table = rows(report, with_prefill=with_prefill)
    lines = [
        f"# {report['model']} with {report['drafter']}",
        "",
        *(f"- {k}: {v}" for k, v in {**report["machine"], **report["settings"]}.items()),
        "",
        "| " + " | ".join(table[0]) + " |",
        "|" + "---|" * len(table[0]),
        *("| " + " | ".join(row) + " |" for row in table[1:]),
        "",
        *(f"{sentence}\n" for sentence in remarks(report)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _lines(with_prefill: bool) -> list[tuple[str, Callable[[dict[str, Any]], str]]]:
    headline, other = "speedup_total", "speedup_generation"
    labels = ("speed-up, prefill included", "speed-up of generation alone")
    if not with_prefill:
        headline, other = other, headline
        labels = ("speed-up, prefill left out", "speed-up with prefill")
    return [
        ("prompts", lambda n: str(n["prompts"])),
        (labels[0], lambda n: "refused" if n["refused"] else _times(n[headline])),
        (labels[1], lambda n: "refused" if n["refused"] else _times(n[other])),
        ("plain against itself", lambda n: _times(n["plain_against_itself"])),
        ("prefill tok/s", lambda n: _number(n["prefill_tps"])),
        ("time to first token s", lambda n: _number(n["ttft_seconds"], 3)),
        ("plain tok/s", lambda n: _number(n["generation_tps"]["plain"])),
        ("DFlash tok/s", lambda n: _number(n["generation_tps"]["dflash"])),
        ("latency s p50/p95/p99", _latency),
        ("tokens per cycle", lambda n: _number(n["tokens_per_cycle"], 2)),
        ("cycle in plain steps", lambda n: _number(n["cycle_cost"], 2)),
        ("accepted by position", lambda n: " ".join(f"{s:.2f}" for s in n["accept_by_position"])),
        ("identical texts", _identical),
        ("longest repetition", lambda n: str(n["longest_repetition"])),
        ("distinct tokens", lambda n: _number(n["distinct_share"], 2)),
        ("peak memory GB", lambda n: _number(n["peak_memory_gb"], 2)),
    ]


def _rival(numbers: dict[str, Any], name: str) -> Any:
    return numbers.get("mlx_lm", {}).get(name)


_RIVAL_LINES: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("mlx-lm tok/s", lambda n: _number(_rival(n, "generation_tps"))),
    ("plain against mlx-lm", lambda n: _times(_rival(n, "plain_against_it"))),
    (
        "DFlash against mlx-lm",
        lambda n: "refused" if n["refused"] else _times(_rival(n, "dflash_against_it")),
    ),
    ("mlx-lm texts as plain's", lambda n: str(_rival(n, "identical_to_plain"))),
]


def _latency(numbers: dict[str, Any]) -> str:
    return " / ".join(_number(numbers[f"latency_{p}"], 2) for p in ("p50", "p95", "p99"))


def _identical(numbers: dict[str, Any]) -> str:
    agreement = numbers["agreement"]
    if not agreement["total"]:
        return "sampled"
    text = f"{agreement['identical']} of {agreement['total']}"
    if agreement["first_difference"] is not None:
        gap = agreement["logit_gap"]
        text += f", first at {agreement['first_difference']}"
        text += "" if gap is None else f", logits {gap:.2g} apart"
    return text


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
