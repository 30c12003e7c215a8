"""An engine for tests of the command line: answers by repeating the prompt, word by word.

As a program it is the command line on this engine; the prompt "forever" is never answered whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import mlx.core  # noqa: F401  (before the engine, which would load another BLAS)

from dflash_mlx import cli, engine
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.engine import Chunk, Completion
from dflash_mlx.errors import UsageError

WARNING = "DFlash was slower here."


class FakeEngine:
    """Records how it was loaded and what it was asked."""

    automatic = False
    reason = "no drafter is known"

    def __init__(self, name: str, **options: Any) -> None:
        self.loaded = {"name": name, **options}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0  # streams that were abandoned

    def stream(self, prompt: str, **options: Any) -> Iterator[Chunk]:
        self.asked.append((prompt, options))
        if prompt == "refuse":
            raise UsageError("The prompt is refused. Give another one.")
        return self._chunks(prompt, options)

    def _chunks(self, prompt: str, options: dict[str, Any]) -> Iterator[Chunk]:
        try:
            if options.get("thinking"):
                yield Chunk("", "let me ", [1])
                yield Chunk("", "think", [2])
            for index, word in enumerate(prompt.split()):
                yield Chunk(word if index == 0 else f" {word}", "", [index])
            while prompt == "forever":
                time.sleep(0.01)
                yield Chunk(" more", "", [0])
            if prompt == "crash":
                raise ZeroDivisionError("a bug")
            yield Chunk("", "", [], self._stats(prompt))
        except GeneratorExit:
            self.closed += 1
            raise

    def _stats(self, prompt: str) -> GenerationStats:
        stats = GenerationStats(
            prompt_tokens=31, prefill_seconds=0.5, generation_tokens=11, generation_seconds=2.0,
            total_seconds=2.625, engine="dflash", engine_reason="the drafter given",
            finish_reason="stop", peak_memory_gb=0.75, model=self.loaded["name"],
            drafter="org/drafter", blas="a BLAS: a reason", kernels="none: a reason",
            warnings=[WARNING],
        )  # fmt: skip
        for accepted in (0, 3, 2):
            stats.count_cycle(drafted=7, accepted=accepted, emitted=accepted + 1)
        return stats

    def generate(self, prompt: str, **options: Any) -> Completion:
        chunks = list(self.stream(prompt, **options))
        assert chunks[-1].stats is not None
        text, reasoning = ("".join(getattr(c, n) for c in chunks) for n in ("text", "reasoning"))
        return Completion(text, reasoning, [7, 8], chunks[-1].stats)

    def chat(self, **options: Any) -> FakeChat:
        return FakeChat(self, options)


class FakeChat:
    def __init__(self, engine: FakeEngine, options: dict[str, Any]) -> None:
        self._engine, self._options = engine, options
        self.stats: GenerationStats | None = None
        self.resets = 0
        self._turns: list[Iterator[Chunk]] = []

    def reset(self) -> None:
        self.stats = None
        self.resets += 1

    def send(self, text: str, **options: Any) -> Iterator[Chunk]:
        turn = self._turn(self._engine.stream(text, **self._options, **options))
        self._turns.append(turn)  # so that only a call of close() can close it
        return turn

    def _turn(self, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        with closing(stream):  # type: ignore[type-var]
            for chunk in stream:
                self.stats = chunk.stats or self.stats
                yield chunk


if __name__ == "__main__":
    engine.load = FakeEngine  # type: ignore[assignment,misc]
    cli.main(sys.argv[1:])
