"""The benchmark's report as rows for a terminal and as Markdown, made from its JSON document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = list[list[str]]
_LABELS = {"memory_gb": "memory GB", "blas": "BLAS", "dtype": "number type"}
#: spaces between the columns of a table in the terminal
GAP = 2


def columns(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Numbers by heading: every suite, all of a context length, of a temperature, and of all."""
    found = dict(report["suites"])
    found |= {f"all {name}": numbers for name, numbers in report["by_context"].items()}
    found |= {f"all temp {name}": numbers for name, numbers in report["by_temperature"].items()}
    # Of one suite all is the suite.
    return found if len(found) == 1 else {**found, "all": report["summary"]}


def rows(report: dict[str, Any], *, with_prefill: bool = True) -> Table:
    """A line a number and a column a suite, the last one over all prompts.

    with_prefill: the headline is the whole request; without it generation alone, and says so.
    """
    found = columns(report)
    table = [["", *found]]
    for label, show in _lines(with_prefill):
        table.append([label, *(show(numbers) for numbers in found.values())])
    if report["summary"]["degenerate"]:
        table.append(["repetitive texts", *(_repetitive(n) for n in found.values())])
    if "mlx_lm" in report["summary"]:
        table += [[label, *(show(n) for n in found.values())] for label, show in _RIVAL_LINES]
    return table


def tables(report: dict[str, Any], *, with_prefill: bool = True, width: int) -> list[Table]:
    """`rows` cut between columns so that each part fits into `width`, if a column does."""
    whole = rows(report, with_prefill=with_prefill)
    sizes = [max(map(len, column)) for column in zip(*whole, strict=True)]
    parts: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes[1:], start=1):
        if not parts or room < size + GAP:
            parts.append([0])
            room = width - sizes[0]
        parts[-1].append(index)
        room -= size + GAP
    return [[[row[i] for i in part] for row in whole] for part in parts]


def remarks(report: dict[str, Any]) -> list[str]:
    """Sentences below the table: what is refused and why, and what is missing."""
    found = list(report["notes"])
    for name, numbers in columns(report).items():
        if numbers["refused"]:
            found.append(f"No speed-up is claimed for {name}: {numbers['refused']}.")
    if count := report["summary"]["degenerate"]:
        found.append(
            f"In {count} of {report['summary']['pairs']} runs a text mostly repeats itself; "
            "these runs count in no speed-up."
        )
    if report["partial"]:
        found.append(
            f"Partial: the benchmark ended early, after {report['summary']['pairs']} of "
            f"{report['planned_pairs']} runs; these are the ones done until then."
        )
    return found


def facts(report: dict[str, Any]) -> Table:
    """Machine and settings, a line each."""
    found = []
    for name, fact in {**report["machine"], **report["settings"]}.items():
        if fact in (None, [], {}):
            continue
        label = _LABELS.get(name, name.replace("_", " "))
        if name == "sources":
            found += [[f"prompts of {suite}", _source(s)] for suite, s in fact.items()]
        elif isinstance(fact, dict):
            found.append([label, ", ".join(f"{k} {v}" for k, v in fact.items())])
        elif isinstance(fact, list):
            found.append([label, ", ".join(f"{v:g}" for v in fact)])
        else:
            found.append([label, str(fact)])
    return found


def markdown(report: dict[str, Any], *, with_prefill: bool = True) -> str:
    """The whole report as Markdown."""
    table = rows(report, with_prefill=with_prefill)
    lines = [
        f"# {title(report)}",
        "",
        headline(report, with_prefill=with_prefill),
        "",
        _markdown_row(table[0]),
        "|" + "---|" * len(table[0]),
        *map(_markdown_row, table[1:]),
        "",
        *(f"{sentence}\n" for sentence in remarks(report)),
        "| machine and settings | |",
        "|---|---|",
        *map(_markdown_row, facts(report)),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    """Names of files may hold what ends a cell or a line."""
    escaped = (" ".join(cell.replace("|", r"\|").split("\n")) for cell in cells)
    return f"| {' | '.join(escaped)} |"


def headline(report: dict[str, Any], *, with_prefill: bool = True) -> str:
    """The one number, and what it includes."""
    numbers = report["summary"]
    name, of = ("speedup_total", "included") if with_prefill else ("speedup_generation", "left out")
    if numbers["refused"] or numbers[name] is None:  # None: texts too short to be timed
        return "No speed-up is claimed."
    return f"DFlash is {_times(numbers[name])} as fast as plain decoding, prefill {of}."


def title(report: dict[str, Any]) -> str:
    return f"{report['model']} with {report['drafter']}"


def _source(source: dict[str, str | None]) -> str:
    at = f" at {source['revision']}" if source["revision"] else ""
    return f"{source['source']}{at}"


def _lines(with_prefill: bool) -> list[tuple[str, Callable[[dict[str, Any]], str]]]:
    headline, other = "speedup_total", "speedup_generation"
    labels = ("speed-up, prefill included", "speed-up of generation alone")
    if not with_prefill:
        headline, other = other, headline
        labels = ("speed-up, prefill left out", "speed-up with prefill")
    return [
        ("prompts", lambda n: str(n["prompts"])),
        ("answer tokens asked/given", _lengths),
        (labels[0], lambda n: "refused" if n["refused"] else _times(n[headline])),
        (labels[1], lambda n: "refused" if n["refused"] else _times(n[other])),
        ("plain against itself", lambda n: _times(n["plain_against_itself"])),
        ("prefill tok/s", lambda n: _number(n["prefill_tps"])),
        ("time to first token s", lambda n: _number(n["ttft_seconds"], 3)),
        ("plain tok/s", lambda n: _number(n["generation_tps"]["plain"])),
        ("DFlash tok/s", lambda n: _number(n["generation_tps"]["dflash"])),
        ("total s plain/DFlash", _totals),
        ("latency s p50/p95/p99", _latency),
        ("tokens per cycle", lambda n: _number(n["tokens_per_cycle"], 2)),
        ("cycle in plain steps", lambda n: _number(n["cycle_cost"], 2)),
        ("drafter's share of a cycle", lambda n: _number(n["drafter_share"], 2)),
        ("cycles by drafts accepted", lambda n: " ".join(map(str, n["accept_histogram"]))),
        ("accepted by position %", _by_position),
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
    ("mlx-lm texts as plain's", lambda n: _same_texts(n)),
]


def _same_texts(numbers: dict[str, Any]) -> str:
    greedy = _rival(numbers, "greedy")
    return f"{_rival(numbers, 'identical_to_plain')} of {greedy}" if greedy else "sampled"


def _lengths(numbers: dict[str, Any]) -> str:
    """Given: by both sides where they differ."""
    found = numbers["answer_tokens"]
    given = [_number(found[side], 0) for side in ("plain", "dflash")]
    return f"{found['asked']} / {' and '.join(dict.fromkeys(given))}"


def _totals(numbers: dict[str, Any]) -> str:
    return " / ".join(_number(numbers["total_seconds"][side]) for side in ("plain", "dflash"))


def _latency(numbers: dict[str, Any]) -> str:
    found = [numbers[f"latency_{p}"] for p in ("p50", "p95", "p99")]
    return " / ".join("-" if seconds is None else f"{seconds:.3g}" for seconds in found)


def _by_position(numbers: dict[str, Any]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in numbers["accept_by_position"])


def _identical(numbers: dict[str, Any]) -> str:
    agreement = numbers["agreement"]
    if not agreement["total"]:
        return "sampled"
    text = f"{agreement['identical']} of {agreement['total']}"
    if agreement["first_difference"] is not None:
        gap = agreement["logit_gap"]
        text += f", token {agreement['first_difference']}"
        text += "" if gap is None else f", {gap:.2g} apart"
    return text


def _repetitive(numbers: dict[str, Any]) -> str:
    return f"{numbers['degenerate']} of {numbers['pairs']}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
