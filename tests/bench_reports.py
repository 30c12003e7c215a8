"""Made-up runs of the benchmark, and reports over them."""

from __future__ import annotations

from dflash_mlx.bench import measure
from dflash_mlx.bench.measure import Pair, Run
from dflash_mlx.decode.stats import GenerationStats

TEXT = list(range(9))


def made(
    seconds: float,
    tokens: list[int] = TEXT,
    accepted: tuple[int, ...] = (),
    *,
    prefill: float = 2.0,
    peak: float = 0.5,
) -> Run:
    stats = GenerationStats(
        prompt_tokens=20, prefill_seconds=prefill, generation_seconds=seconds,
        total_seconds=prefill + seconds, generation_tokens=len(tokens), peak_memory_gb=peak,
    )  # fmt: skip
    for count in accepted:
        stats.count_cycle(3, count, count + 1)
    return Run(tokens, stats.to_json())


def pair(dflash: float = 2.0, plain: float = 4.0, again: float = 4.0, **options) -> Pair:
    own = made(dflash, accepted=(3, 0, 1))
    name, greedy = options.pop("name", f"q{dflash}"), options.pop("greedy", True)
    return Pair(name, made(plain), own, made(again), greedy, 16, **options)


def same(run: Run) -> Pair:
    return Pair("q", run, run, run, True, 64)


def document(*pairs: Pair, **other) -> dict:
    """A whole report over some pairs."""
    found = measure.summarise(pairs)
    head = {"model": "m", "drafter": "d", "machine": {"chip": "a & b"}, "settings": {}}
    extra = {"by_context": {}, "by_temperature": {}, "notes": [], "planned_pairs": 9}
    points = measure.points("s", pairs)
    body = {"suites": {"s": found}, "summary": found, "points": points, "partial": False}
    return {**head, **extra, **body, **other}
