"""What the benchmark reports, each number defined once, from pairs of generations.

It knows no model. Plain decoding runs twice beside every DFlash run: its ratio to itself says how
far the machine can be trusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dflash_mlx.bench.compare import Difference

#: texts of fewer tokens are too short to call degenerate
LONG_ENOUGH = 16
#: shares of repeated and of distinct tokens beyond which a text is degenerate
MOST_REPEATED, LEAST_DISTINCT = 0.5, 0.1
#: share of degenerate texts, and of drift of plain against itself, beyond which no speed is named
MOST_DEGENERATE, MOST_DRIFT = 0.25, 0.05


@dataclass(frozen=True)
class Run:
    """One generation: its tokens, and its statistics as `GenerationStats.to_json()`."""

    tokens: list[int]
    stats: dict[str, Any]

    @property
    def rate(self) -> float | None:
        return self.stats["generation_tps"]

    @cached_property
    def longest_repetition(self) -> int:
        return longest_repetition(self.tokens)

    @property
    def degenerate(self) -> bool:
        """Whether the text mostly repeats itself: such a text says nothing about drafting."""
        count = len(self.tokens)
        if count < LONG_ENOUGH:
            return False
        distinct = len(set(self.tokens)) / count
        return self.longest_repetition > MOST_REPEATED * count or distinct < LEAST_DISTINCT


@dataclass(frozen=True)
class Pair:
    """Plain decoding, DFlash and plain decoding again on one prompt.

    asked: most tokens of an answer. difference: where plain and DFlash part; None for equal texts,
    and for sampled ones, which differ by chance. drafter_share: of a cycle, where it was measured.
    rival: mlx-lm on the same weights.
    """

    name: str
    plain: Run
    dflash: Run
    again: Run
    greedy: bool
    asked: int
    difference: Difference | None = None
    drafter_share: float | None = None
    rival: Run | None = None

    @property
    def degenerate(self) -> bool:
        return self.plain.degenerate or self.dflash.degenerate


def longest_repetition(tokens: Sequence[int]) -> int:
    """Tokens of the longest stretch that repeats one phrase directly, all copies counted.

    A last copy may be cut short. 0 where nothing repeats.
    """
    text, longest = np.asarray(tokens, np.int64), 0
    for period in range(1, len(text) // 2 + 1):
        # Within a stretch each token equals the one a period before it.
        breaks = np.flatnonzero(text[period:] != text[:-period])
        bounds = np.concatenate(([-1], breaks, [len(text) - period]))
        equal = int(np.diff(bounds).max()) - 1
        if equal >= period:
            longest = max(longest, equal + period)
    return longest


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The report over some pairs; `schema.md` defines every number. Above 1 DFlash is faster."""
    plain, dflash = [p.plain for p in pairs], [p.dflash for p in pairs]
    latencies = sorted(_all(dflash, "total_seconds"))
    histogram = _added(r.stats["accept_histogram"] for r in dflash)
    cycles = sum(_all(dflash, "cycles"))
    refused = refusal(pairs)
    rivals = {"mlx_lm": _against_rival(pairs)} if any(p.rival for p in pairs) else {}
    if rivals and refused:
        rivals["mlx_lm"]["dflash_against_it"] = None
    sound = [p for p in pairs if not p.degenerate]
    faster = {
        "speedup_generation": _median(_ratio(p.dflash.rate, _mean_rate(p)) for p in sound),
        "speedup_total": _median(_total_ratio(p) for p in sound),
    }
    return {
        "prompts": len({p.name for p in pairs}),
        "pairs": len(pairs),
        **rivals,
        "prefill_tps": _median(_all(dflash, "prefill_tps")),
        "ttft_seconds": _median(_all(dflash, "prefill_seconds")),
        "generation_tps": {
            "plain": _median(r.rate for r in plain),
            "dflash": _median(r.rate for r in dflash),
        },
        **(dict.fromkeys(faster) if refused else faster),
        "plain_against_itself": _median(_ratio(p.plain.rate, p.again.rate) for p in pairs),
        "total_seconds": {
            "plain": sum(_all(plain, "total_seconds")),
            "dflash": sum(_all(dflash, "total_seconds")),
        },
        "latency_p50": _quantile(latencies, 0.5),
        "latency_p95": _quantile(latencies, 0.95),
        "latency_p99": _quantile(latencies, 0.99),
        "tokens_per_cycle": sum(_all(dflash, "cycle_tokens")) / cycles if cycles else None,
        "accept_histogram": histogram,
        "accept_by_position": by_position(histogram),
        "cycle_cost": _median(_cycle_cost(p) for p in pairs),
        "drafter_share": _median(p.drafter_share for p in pairs),
        "agreement": _agreement(pairs),
        "degenerate": len(pairs) - len(sound),
        "longest_repetition": max((r.longest_repetition for r in dflash), default=0),
        "distinct_share": _median(len(set(r.tokens)) / len(r.tokens) for r in dflash if r.tokens),
        "answer_tokens": {
            "asked": max((p.asked for p in pairs), default=None),
            "plain": _median(len(r.tokens) for r in plain),
            "dflash": _median(len(r.tokens) for r in dflash),
        },
        "tokens": sum(_all(dflash, "generation_tokens")),
        "peak_memory_gb": max(_all(dflash, "peak_memory_gb"), default=0.0),
        "refused": refused,
    }


def points(group: str, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Every pair in short: prompt tokens, and tok/s and seconds of the request on both sides."""
    return [
        {
            "group": group,
            "prompt": pair.name,
            "prompt_tokens": pair.plain.stats["prompt_tokens"],
            **{
                side: {"tps": run.rate, "seconds": run.stats["total_seconds"]}
                for side, run in (("plain", pair.plain), ("dflash", pair.dflash))
            },
        }
        for pair in pairs
    ]


def by_position(histogram: Sequence[int]) -> list[float]:
    """Share of cycles that accepted position 1, 2, ... (and all before it); clipped cycles too."""
    cycles = sum(histogram)
    return [sum(histogram[i:]) / cycles for i in range(1, len(histogram))] if cycles else []


def refusal(pairs: Sequence[Pair]) -> str | None:
    """Why these pairs allow no claim of a speed-up."""
    if not pairs:
        return "nothing was measured"
    wrong = [p for p in pairs if p.difference is not None and not p.difference.near_tie]
    if wrong:
        name, worst = _worst(wrong)
        of = "where one text ends"
        if math.isfinite(worst.gap):
            of = f"with logits {worst.gap:.3g} apart, {worst.spacings:.3g} spacings of the type"
        exact = any(p.dflash.stats.get("exact") for p in wrong)
        how = "although exact mode promises the same" if exact else "beyond near-ties"
        return (
            f"plain and DFlash texts of {len(wrong)} of {len(pairs)} runs differ {how}, "
            f"most in {name} at token {worst.token}, {of}"
        )
    count = sum(p.degenerate for p in pairs)
    if count > MOST_DEGENERATE * len(pairs):
        return f"{count} of {len(pairs)} texts repeat themselves"
    itself = _median(_ratio(p.plain.rate, p.again.rate) for p in pairs)
    if itself is None or abs(itself - 1) > MOST_DRIFT:
        told = (
            "could not be timed" if itself is None else f"is {itself:.3f} times as fast as itself"
        )
        return f"plain decoding {told}, so the machine is too busy or the texts too short"
    return None


def _worst(pairs: Sequence[Pair]) -> tuple[str, Difference]:
    """Name and difference of the pair that is farthest from a near-tie."""
    parted = [(p.name, p.difference) for p in pairs if p.difference is not None]
    return max(parted, key=lambda found: found[1].spacings)


def _agreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Greedy pairs only. Where texts differ, everything is of the one farthest from a near-tie."""
    greedy = [p for p in pairs if p.greedy]
    different = [p for p in greedy if p.difference is not None]
    found: dict[str, Any] = {
        "identical": len(greedy) - len(different),
        "total": len(greedy),
        **dict.fromkeys(("prompt", "first_difference", "logit_gap", "gap_spacings")),
    }
    if different:
        name, worst = _worst(different)
        finite = math.isfinite(worst.gap)  # JSON knows no infinity
        found |= {"prompt": name, "first_difference": worst.token}
        found |= {"logit_gap": worst.gap, "gap_spacings": worst.spacings} if finite else {}
    return found


def _against_rival(pairs: Sequence[Pair]) -> dict[str, Any]:
    """mlx-lm's speed and how many times as fast plain decoding and DFlash are."""
    met = [(p, p.rival) for p in pairs if p.rival is not None]
    return {
        "generation_tps": _median(rival.rate for _, rival in met),
        "prefill_tps": _median(rival.stats["prefill_tps"] for _, rival in met),
        "plain_against_it": _median(_ratio(_mean_rate(p), rival.rate) for p, rival in met),
        "dflash_against_it": _median(
            _ratio(p.dflash.rate, rival.rate) for p, rival in met if not p.degenerate
        ),
        "greedy": sum(p.greedy for p, _ in met),
        "identical_to_plain": sum(p.plain.tokens == rival.tokens for p, rival in met if p.greedy),
    }


def _cycle_cost(pair: Pair) -> float | None:
    """Seconds outside plain steps over cycles, by plain decoding's seconds a token."""
    stats, rate = pair.dflash.stats, _mean_rate(pair)
    if not stats["cycles"] or rate is None:
        return None
    plain_steps = stats["generation_tokens"] - 1 - stats["cycle_tokens"]
    return (stats["generation_seconds"] * rate - plain_steps) / stats["cycles"]


def _total_ratio(pair: Pair) -> float | None:
    """Of whole requests, a token: sampled texts end where they like."""
    sides = (pair.plain, pair.dflash, pair.again)
    each = [r.stats["total_seconds"] / len(r.tokens) if r.tokens else None for r in sides]
    plain, dflash, again = each
    if plain is None or dflash is None or again is None:
        return None
    return _ratio((plain + again) / 2, dflash)


def _mean_rate(pair: Pair) -> float | None:
    one, two = pair.plain.rate, pair.again.rate
    return None if one is None or two is None else (one + two) / 2


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _all(runs: Iterable[Run], name: str) -> list[Any]:
    return [run.stats[name] for run in runs]


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _added(histograms: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for index, count in enumerate(histogram):
            total[index] += count
    return total
