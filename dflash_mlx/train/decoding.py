"""Many sequences decoded side by side: every step gives each one token; places are filled anew."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import mlx.core as mx
import numpy as np

from dflash_mlx.cache import CacheStack
from dflash_mlx.cache.kv import GROWTH_ROWS
from dflash_mlx.cache.pool import Places, PooledCache
from dflash_mlx.decode.sampling import SamplingParams, draw_at, probabilities
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment, packed, spans

#: rows of one forward pass over prompts
PREFILL_ROWS = 512


@dataclass(frozen=True)
class Job:
    """A prompt to answer with at most `limit` tokens."""

    name: str
    prompt_ids: tuple[int, ...]
    limit: int


@dataclass
class Run:
    """A sequence that is being answered; its place in the pools is its index among the runs."""

    job: Job
    stack: CacheStack
    random: np.random.Generator
    answer: list[int] = field(default_factory=list)


class Decoder:
    """Up to `places` sequences of a target at once.

    temp: 0 is greedy. What is drawn for a sequence depends on `seed` and its name alone, whoever
    runs beside it. An answer ends with one of `end_ids`, which is part of it, or at its limit.
    """

    def __init__(
        self, target: Target, places: int, *, temp: float, seed: int, end_ids: Collection[int]
    ) -> None:
        self.target = target
        self.params = SamplingParams(temperature=temp)
        self.seed = seed
        self.end_ids = end_ids
        self._places = Places(places)
        self.running: list[Run] = []
        self.tokens = 0  # made so far, of all sequences

    @property
    def free(self) -> int:
        return self._places.count - len(self.running)

    def start(self, jobs: Sequence[Job]) -> list[tuple[Job, list[int]]]:
        """Run the jobs' prompts, at most `free` of them, for their first tokens.

        Returns what is complete already, with the answers.
        """
        made = []
        for job in jobs:
            stack = self._places.add(self.target.make_cache())
            made.append(Run(job, stack, generator(self.seed, job.name)))
        self.running += made
        batches = packed(made, lambda run: len(run.job.prompt_ids), PREFILL_ROWS)
        ends = [self._prefill(batch) for batch in batches]
        if ends:
            self._choose(made, mx.concatenate(ends))
        return self._finished()

    def step(self) -> list[tuple[Job, list[int]]]:
        """One more token for every running sequence; returns those that are complete with it."""
        if not self.running:
            return []
        ids = mx.array([s.answer[-1] for s in self.running], mx.int32)
        segments = [Segment(ids[i : i + 1], s.stack) for i, s in enumerate(self.running)]
        hidden, _ = self.target.forward(segments)
        self._choose(self.running, hidden[0])
        return self._finished()

    def _prefill(self, batch: Sequence[Run]) -> mx.array:
        """Hidden states [n, H] of the last rows of the runs' prompts; long ones go in pieces."""
        left = [run.job.prompt_ids for run in batch]
        while True:
            parts = [ids[:PREFILL_ROWS] for ids in left]
            left = [ids[PREFILL_ROWS:] for ids in left]
            segments = [
                Segment(mx.array(ids, mx.int32), run.stack)
                for ids, run in zip(parts, batch, strict=True)
            ]
            hidden, _ = self.target.forward(segments)
            if not any(left):
                ends = [stop - 1 for _, stop in spans(segments)]
                return hidden[0, mx.array(ends, mx.int32)]
            (run,) = batch  # `packed` leaves a long prompt alone
            run.stack.commit(len(parts[0]))
            mx.eval(run.stack.arrays())

    def _choose(self, runs: Sequence[Run], hidden: mx.array) -> None:
        """Commit the pending rows and give every run the token behind its last row."""
        logits = self.target.logits(hidden)
        if self.params.greedy:
            tokens = mx.argmax(logits, axis=-1)
        else:
            shares = np.array([[s.random.random(dtype=np.float32)] for s in runs])
            tokens = draw_at(probabilities(logits, self.params), mx.array(shares))
        for run in runs:
            run.stack.commit(run.stack.pending)
        mx.eval(tokens, [run.stack.arrays() for run in runs])
        for run, token in zip(runs, tokens.tolist(), strict=True):
            run.answer.append(token)
        self.tokens += len(runs)

    def _finished(self) -> list[tuple[Job, list[int]]]:
        """Take complete sequences out; the last one moves into a freed place."""
        done = []
        for index in reversed(range(len(self.running))):
            job, answer = self.running[index].job, self.running[index].answer
            if answer[-1] in self.end_ids or len(answer) >= job.limit:
                done.append((job, answer))
                self._places.remove(index)
                last = self.running.pop()
                if index < len(self.running):
                    self.running[index] = last
        return done[::-1]


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers that belong to one name."""
    words = np.frombuffer(sha256(f"{seed} {name}".encode()).digest(), np.uint64)
    return np.random.Generator(np.random.Philox(key=words[:2]))


def cache_bytes(target: Target, length: int) -> int:
    """Bytes that the caches of one sequence of `length` tokens take in a step of a `Decoder`."""
    capacity = -(-length // GROWTH_ROWS) * GROWTH_ROWS
    places = Places(1)
    stack = places.add(target.make_cache())
    for _ in range(2):  # a state before the step, and one behind it
        stack.commit(stack.pending)
        target.forward([Segment(mx.zeros((1,), mx.int32), stack)])
    total = 0
    for cache in stack:
        rows = cache.pool.capacity if isinstance(cache, PooledCache) else 0
        total += cache.nbytes * capacity // rows if rows else cache.nbytes
    return total
