"""A generation whose block and draft head the policy chooses, with costs that are given."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

from dflash_mlx.decode.costs import Costs, Refined
from dflash_mlx.decode.pace import PolicyPace
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats


def paced(
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    costs: Costs,
    count: int,
    params: SamplingParams | None = None,
    ends: Collection[int] = (),
) -> tuple[Session, list[int], GenerationStats, list[dict[str, Any]]]:
    """(session, tokens, statistics, trace); the costs stay as given."""
    lines: list[str] = []
    refined = Refined(costs, frozen=True)
    session = Session(
        target,
        drafter,
        nullcontext,
        pace=lambda _, words: PolicyPace(drafter.block_size, refined, words, lines.append),
    )
    stats = GenerationStats()
    steps = session.run(prompt, params or SamplingParams(), count, ends, stats)
    tokens = [token for step in steps for token in step]
    return session, tokens, stats, [json.loads(line) for line in lines]
