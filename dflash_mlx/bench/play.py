"""Runs the benchmark: plain and DFlash on one loaded target, interleaved prompt by prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from dflash_mlx.bench.measure import Pair, Run, first_difference
from dflash_mlx.bench.suites import Question
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.segment import Segment

if TYPE_CHECKING:  # mlx-lm's generation is slow to import, and few runs compare with it
    from dflash_mlx.bench.rival import MlxLm

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    cool_down: float = 0.0  # seconds of rest before each generation


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


def check(engine: Engine, questions: Sequence[Question], settings: Settings) -> None:
    """UsageError before anything runs: no drafter, or an answer that the context cannot hold."""
    if engine.drafter is None or engine.block_size < 2:
        raise UsageError(
            f"{engine.model} runs without a drafter here ({engine.reason}), so there is nothing to "
            "compare. Name a drafter with --draft."
        )
    for question in questions:
        prompt = engine.prompt(question.prompt, None, None)
        if engine.limit(prompt, settings.max_tokens) < settings.max_tokens:
            raise UsageError(
                f"{question.name} has {len(prompt.ids)} tokens and --max-tokens "
                f"{settings.max_tokens} reaches beyond the context of "
                f"{engine.target.context_length}. Give a smaller number."
            )


def play(
    engine: Engine,
    questions: Sequence[Question],
    settings: Settings,
    rival: MlxLm | None = None,
    rest: Callable[[float], None] = time.sleep,
) -> Iterator[Pair]:
    """A pair a prompt and repeat, after a warm-up of all sides."""
    plain = plain_side(engine)
    for side in (plain, engine):
        side.generate(questions[0].prompt, max_tokens=WARM_UP_TOKENS)
    if rival is not None:
        rival.run(engine.prompt(questions[0].prompt, None, None).ids, WARM_UP_TOKENS, 0.0, 0)
    for repeat in range(settings.repeats):
        for question in questions:
            runs = []
            for side in (plain, engine, plain):
                if settings.cool_down:
                    rest(settings.cool_down)
                runs.append(_run(side, question, settings, repeat))
            pair = _pair(engine, question, runs, settings.temperature == 0)
            if rival is not None:
                rest(settings.cool_down)
                ids = engine.prompt(question.prompt, None, None).ids
                other = rival.run(
                    ids, settings.max_tokens, settings.temperature, settings.seed + repeat
                )
                pair = replace(pair, rival=other)
            yield pair


def _run(engine: Engine, question: Question, settings: Settings, repeat: int) -> Run:
    sampling = SamplingParams()
    if settings.temperature:
        sampling = SamplingParams(settings.temperature, seed=settings.seed + repeat)
    done = engine.generate(question.prompt, max_tokens=settings.max_tokens, sampling=sampling)
    return Run(done.token_ids, done.stats.to_json())


def _pair(engine: Engine, question: Question, runs: Sequence[Run], greedy: bool) -> Pair:
    plain, dflash, again = runs
    place = first_difference(plain.tokens, dflash.tokens) if greedy else None
    if place is None or place >= min(len(plain.tokens), len(dflash.tokens)):
        return Pair(plain, dflash, again, greedy, place)
    ids = engine.prompt(question.prompt, None, None).ids + plain.tokens[:place]
    gap = _logit_gap(engine, ids, plain.tokens[place], dflash.tokens[place])
    return Pair(plain, dflash, again, greedy, place, gap)


def _logit_gap(engine: Engine, ids: Sequence[int], one: int, other: int) -> float:
    """How far apart the target's logits of two tokens behind `ids` are."""
    segment = Segment(mx.array(list(ids), mx.int32), engine.target.make_cache())
    hidden, _ = engine.target.forward([segment])
    logits = engine.target.logits(hidden[0, -1:])[0].astype(mx.float32)
    return abs(float((logits[one] - logits[other]).item()))
