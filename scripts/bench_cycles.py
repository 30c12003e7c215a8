"""What a cycle of the decode loop costs beyond the forwards of target and drafter.

Cycles of the real loop and the same forwards alone take turns, each with its own caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import mlx.core as mx

from dflash_mlx.bench.cycle import Forwards
from dflash_mlx.bench.spans import Seconds, now
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Drafter
from dflash_mlx.models.base import Target


def paired_cycles(
    target: Target, drafter: Drafter, prompt: list[int], max_tokens: int, end_ids: Collection[int]
) -> Iterator[tuple[Seconds, Seconds]]:
    """(a cycle of the real greedy loop, its forwards alone) for every cycle but the last one.

    A cycle is the wait for a launched step and everything from there to the next yield: verdict,
    commit, observe, statistics and the launch behind it.
    """
    stream = mx.new_stream(mx.default_device())

    def guard() -> AbstractContextManager[object]:
        return mx.stream(stream)

    alone = Forwards(target, drafter, guard)
    alone.prefill(prompt)
    stats = GenerationStats()
    run = Session(target, drafter, guard).run(prompt, SamplingParams(), max_tokens, end_ids, stats)
    anchor = next(run)[-1]
    former: tuple[Seconds, int, int, int] | None = None
    while stats.finish_reason == "abandoned":
        start = now()
        mx.synchronize(stream)
        waited = now().since(start)
        if former is not None:  # only now, so that nothing else runs beside the forwards
            cycle, *what = former
            yield cycle, alone.cycle(*what)
        drafted = stats.drafted
        start = now()
        tokens = next(run)
        landed = now().since(start)
        if stats.drafted == drafted:  # the last token, in a plain step
            break
        cycle = Seconds(waited.wall + landed.wall, waited.cpu + landed.cpu)
        former = cycle, anchor, stats.drafted - drafted, len(tokens)
        anchor = tokens[-1]
    run.close()
