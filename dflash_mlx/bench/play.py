"""Runs the benchmark: plain and DFlash on one loaded target, interleaved prompt by prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mlx.bench.compare import Difference, difference
from dflash_mlx.bench.cycle import drafter_share
from dflash_mlx.bench.measure import Pair, Run
from dflash_mlx.bench.questions import Question
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:  # mlx-lm's generation is slow to import, and few runs compare with it
    from dflash_mlx.bench.rival import MlxLm

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """How to run. thinking: the template's switch; cool_down: seconds of rest before each run.

    seed: greedy runs have it too: it keeps the costs behind the chosen blocks as they are stored.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    cool_down: float = 0.0
    thinking: bool | None = None

    def sampling(self, repeat: int = 0) -> SamplingParams:
        return SamplingParams(self.temperature, seed=self.seed + repeat)


def plain_side(engine: Engine) -> Engine:
    """An engine that decodes plainly on the same loaded target."""
    return Engine(
        engine.target,
        engine.tokenizer,
        None,
        reason="the benchmark's plain side",
        model=engine.model,
        exact=engine.exact,
    )


def check_drafter(engine: Engine) -> None:
    """UsageError for an engine that has nothing to compare with plain decoding."""
    if engine.drafter is None or engine.block_size < 2:
        raise UsageError(
            f"{engine.model} runs without a drafter here ({engine.reason}), so there is nothing to "
            "compare. Name a drafter with --draft."
        )


def check(engine: Engine, questions: Sequence[Question], settings: Settings) -> None:
    """UsageError for an answer that the context cannot hold, before anything runs."""
    for question in questions:
        prompt = engine.prompt(question.prompt, settings.thinking, None)
        if engine.limit(prompt, settings.max_tokens) < settings.max_tokens:
            raise UsageError(
                f"{question.name} has {len(prompt.ids)} tokens and --max-tokens "
                f"{settings.max_tokens} reaches beyond the context of "
                f"{engine.target.context_length}. Give a smaller number."
            )


class Player:
    """The sides that run against each other.

    They are warmed up for every list of prompts, whose length brings its own shapes to compile,
    and for every temperature, since sampling runs what greedy decoding does not.
    """

    def __init__(
        self,
        engine: Engine,
        rival: MlxLm | None = None,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine, self._plain, self._rival, self._rest = engine, plain_side(engine), rival, rest
        self._warm_for: tuple[Sequence[Question], float] | None = None

    def play(self, questions: Sequence[Question], settings: Settings) -> Iterator[Pair]:
        """A pair a prompt and repeat; the first one knows the drafter's share of a cycle."""
        warm = self._warm_for
        if warm is None or warm[0] is not questions or warm[1] != settings.temperature:
            self._warm_up(questions[0], settings)
            self._warm_for = questions, settings.temperature
        for repeat in range(settings.repeats):
            for number, question in enumerate(questions):
                yield self._pair(question, settings, repeat, share=not repeat and not number)

    def _warm_up(self, question: Question, settings: Settings) -> None:
        for side in (self._plain, self._engine):
            side.generate(
                question.prompt,
                max_tokens=WARM_UP_TOKENS,
                sampling=settings.sampling(),
                thinking=settings.thinking,
            )
        if self._rival is not None:
            ids = self._ids(question, settings)
            self._rival.run(ids, WARM_UP_TOKENS, settings.temperature, settings.seed)

    def _ids(self, question: Question, settings: Settings) -> list[int]:
        return self._engine.prompt(question.prompt, settings.thinking, None).ids

    def _pair(self, question: Question, settings: Settings, repeat: int, *, share: bool) -> Pair:
        plain, dflash, again = (
            self._run(side, question, settings, repeat)
            for side in (self._plain, self._engine, self._plain)
        )
        ids, rival = self._ids(question, settings), None
        if self._rival is not None:
            self._rest(settings.cool_down)
            seed = settings.seed + repeat
            rival = self._rival.run(ids, settings.max_tokens, settings.temperature, seed)
        greedy = settings.temperature == 0
        return Pair(
            question.name,
            plain,
            dflash,
            again,
            greedy,
            settings.max_tokens,
            self.difference(ids, plain.tokens, dflash.tokens) if greedy else None,
            self._share(ids, dflash) if share else None,
            rival,
        )

    def _run(self, side: Engine, question: Question, settings: Settings, repeat: int) -> Run:
        self._rest(settings.cool_down)
        done = side.generate(
            question.prompt,
            max_tokens=settings.max_tokens,
            sampling=settings.sampling(repeat),
            thinking=settings.thinking,
        )
        return Run(done.token_ids, done.stats.to_json())

    def difference(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
    ) -> Difference | None:
        """Where two answers part, by the target's own logits."""
        engine = self._engine
        return difference(engine.target, engine._guard, prompt, one, other, exact=engine.exact)

    def _share(self, prompt: Sequence[int], run: Run) -> float:
        """With the drafts that the run's cycles verified on average, or the whole block."""
        engine, stats = self._engine, run.stats
        assert engine.drafter is not None
        drafts = engine.block_size - 1
        if stats["cycles"]:
            drafts = max(1, round(stats["drafted"] / stats["cycles"]))
        return drafter_share(engine.target, engine.drafter, engine._guard, prompt, drafts)
