"""Every number the program reports, each defined once, here.

Rates cover exactly the span of their seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """What one generation did and cost."""

    #: tokens of the prompt, those found in a kept cache included
    prompt_tokens: int = 0
    #: prompt tokens that a kept cache already held and the target did not run again
    cached_tokens: int = 0
    #: wall seconds from the start until the first generated token was known
    prefill_seconds: float = 0.0
    #: emitted tokens, an end token included, nothing behind it
    generation_tokens: int = 0
    #: wall seconds from the first generated token to the last one
    generation_seconds: float = 0.0
    #: wall seconds of the whole generation, prefill and text handling included
    total_seconds: float = 0.0
    #: "dflash" when a drafter was in use, else "plain"
    engine: str = "plain"
    #: why this engine answered
    engine_reason: str = ""
    #: whether every operation gave a row the same bits whatever rows were beside it
    exact: bool = False
    #: what chose the drafts of each step; empty when nothing was drafted
    block_policy: str = ""
    #: names the stored costs behind those choices; with the seed it repeats them
    calibration: str | None = None
    #: draft-and-verify passes; plain steps are not cycles
    cycles: int = 0
    #: of those cycles, the ones drafted with a reduced output head
    reduced_cycles: int = 0
    #: tokens emitted by all cycles: accepted drafts and bonus tokens
    cycle_tokens: int = 0
    #: draft tokens the target verified
    drafted: int = 0
    #: draft tokens emitted; a bonus token never counts
    accepted: int = 0
    #: element a: cycles that emitted exactly a draft tokens
    accept_histogram: list[int] = field(default_factory=list)
    #: "stop" (end token), "stop_string", "length" (max_tokens), or "abandoned"
    finish_reason: str = "abandoned"
    #: peak of MLX's memory during the generation, weights included, in 10^9 bytes
    peak_memory_gb: float = 0.0
    #: plain decoding's speed measured at this context on this machine; None when not measured
    plain_tps: float | None = None
    model: str = ""
    drafter: str | None = None
    #: commits of the hub repos that answered; None for files, folders and what the package brings
    model_revision: str | None = None
    drafter_revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    #: which matrix library MLX's CPU back-end uses, and why
    blas: str = ""
    #: what ran as Metal kernels, or why MLX's own operations answered
    kernels: str = ""
    #: sentences a person should see
    warnings: list[str] = field(default_factory=list)

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens the target ran a second of prefill."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def generation_tps(self) -> float | None:
        """Tokens behind the first one a second: the first one belongs to prefill."""
        return _rate(self.generation_tokens - 1, self.generation_seconds)

    @property
    def tokens_per_cycle(self) -> float | None:
        """Acceptance length τ: tokens emitted a cycle, bonus included, last cycle as clipped."""
        return self.cycle_tokens / self.cycles if self.cycles else None

    def count_cycle(self, drafted: int, accepted: int, emitted: int, reduced: bool = False) -> None:
        """Record one cycle: drafts verified, drafts accepted by the target, tokens emitted; and
        whether its draft head was a reduced one.

        Where the end of the text clipped the cycle, only emitted drafts count as accepted.
        """
        self.cycles += 1
        self.reduced_cycles += reduced
        self.drafted += drafted
        kept = min(accepted, emitted)
        self.accepted += kept
        self.cycle_tokens += emitted
        self.accept_histogram.extend([0] * (kept + 1 - len(self.accept_histogram)))
        self.accept_histogram[kept] += 1

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def to_json(self) -> dict[str, Any]:
        """All fields and rates as one JSON-ready document."""
        document = asdict(self)
        for name in ("prefill_tps", "generation_tps", "tokens_per_cycle"):
            document[name] = getattr(self, name)
        return document


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
