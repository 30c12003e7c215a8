"""The decode loop over one sequence, and the caches of that sequence, which stay for a next turn.

It knows token ids only. Plain decoding is the same loop with no drafts.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import mlx.core as mx

from dflash_mlx.decode.ending import Ending, Stopped
from dflash_mlx.decode.pace import FixedPace, Pace
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.decode.step import Chooser, Flight, launch, unsound
from dflash_mlx.decode.words import Words
from dflash_mlx.draft.base import DraftCache, Drafter, ReducedHead
from dflash_mlx.features import Features
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

PREFILL_CHUNK = 512
#: MLX keeps freed buffers for reuse; shapes change as the context grows, so they go at times
CLEAR_CACHE_EVERY = 256
#: cycles without one accepted draft after which a person is told
NEVER_AGREED_CYCLES = 64
#: rows whose features wait while drafting rests: the drafter reads its weights once for all
MOST_WAITING = 32
#: share of a step's time that a reader or another generation may take for it to count as timed
MOST_HELD = 0.05

Guard = Callable[[], AbstractContextManager[object]]
MakePace = Callable[[SamplingParams, Words | None], Pace]


class Session:
    """One sequence: committed tokens, the target's cache and the drafter's context.

    guard: entered around every piece of MLX work and never held while the caller has control;
    it selects the stream and excludes other threads.
    block_size: most rows a cycle verifies, anchor included; at most the drafter's trained block.
    pace: makes what chooses the drafts of each step of a generation; by default all that fit.
    exact: the drafter decides nothing about what the target runs, also where a turn goes back.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        guard: Guard,
        *,
        block_size: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        pace: MakePace | None = None,
        exact: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.block_size = block_size or (drafter.block_size if drafter else 1)
        self.prefill_chunk = prefill_chunk
        self._exact = exact
        self._guard = guard
        self._make_pace = pace or (lambda params, words: FixedPace(self.block_size))
        self._sick = False  # the drafter has produced NaN
        self._words: Words | None = None  # of the generation, where the draft head can be reduced
        self._head: ReducedHead | None = None  # the last one in use
        #: seconds of the last generation that readers and other generations took
        self.held = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the sequence and free its caches."""
        self.ids: list[int] = []  # tokens whose rows are committed
        self.cache = self.target.make_cache()
        self.draft_cache: DraftCache | None = None
        self._waiting: list[Features] = []  # that the drafter has not seen yet
        if self.drafter is not None and self.block_size > 1 and not self._sick:
            self.draft_cache = self.drafter.make_cache()

    def _rewind(self, length: int) -> None:
        """Keep the first `length` tokens; start afresh where a cache cannot go back so far.

        Where only the drafter's cannot, exact mode keeps the target's: rows that are run again
        beside others would have other bits. The drafter's context is empty then.
        """
        if length >= len(self.ids):
            return
        if not self.cache.rewind(length):
            self.reset()
            return
        del self.ids[length:]
        if self.draft_cache is not None and not self.draft_cache.rewind(length):
            if not self._exact:
                self.reset()
            elif self.drafter is not None:
                self.draft_cache = self.drafter.make_cache()

    @property
    def nbytes(self) -> int:
        """Bytes the caches hold."""
        return self.cache.nbytes + (self.draft_cache.nbytes if self.draft_cache else 0)

    def run(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        end_ids: Collection[int],
        stats: GenerationStats,
        stopped: Stopped | None = None,
    ) -> Iterator[list[int]]:
        """Continue `prompt` (the whole sequence so far); yield the new tokens step by step.

        Tokens of `prompt` that the caches already hold are not run again. The last token is the
        first end token, the first one that `stopped` says true of (it is not asked about end
        tokens), or the max_tokens-th; every token but the last one is committed then.
        `stats` is filled on the way. Closing the iterator stops the work; an exception inside a
        step leaves the session empty.
        """
        if not prompt or max_tokens < 1:
            raise ValueError("a prompt of at least one token and max_tokens of at least 1")
        if self.draft_cache is not None:
            stats.accept_histogram = [0] * self.block_size
        elif self.drafter is not None and self.block_size > 1:
            stats.engine = "plain"
            stats.engine_reason = "the drafter produced NaN earlier in this conversation"
        chooser = self._chooser(params)
        self._words = self._head = None
        self.held = 0.0
        if (drafter := self._drafter) is not None and drafter.head_rows is not None:
            self._words = Words(drafter.head_rows.order)
            self._words.read(prompt)
        self._pace = self._make_pace(params, self._words)
        self._ending = Ending(end_ids, stopped)
        if self.draft_cache is not None:
            stats.block_policy, stats.calibration = self._pace.name, self._pace.calibration
        try:
            first = self._prefill(prompt, chooser, stats)
            yield from self._decode(chooser, first, max_tokens, stats)
        except GeneratorExit:
            raise
        except BaseException:
            self.reset()
            raise
        finally:
            with self._guard():
                self.cache.commit(0)  # rows of a step that was launched and not awaited
                self._observe_waiting()
                mx.eval(self._arrays())
                stats.peak_memory_gb = mx.get_peak_memory() / 1e9
                mx.clear_cache()

    def time_plain_step(self, repeats: int = 3) -> float:
        """Median seconds of one plain step at this context; the sequence does not change."""
        times = []
        with self._guard():
            for _ in range(repeats):
                start = time.perf_counter()
                segment = Segment(mx.array(self.ids[-1:], mx.int32), self.cache)
                hidden, _ = self.target.forward([segment])
                mx.eval(mx.argmax(self.target.logits(hidden.squeeze(0)), axis=-1))
                self.cache.commit(0)
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _chooser(self, params: SamplingParams) -> Chooser:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        with self._guard():
            return Chooser(params, mx.random.key(seed), self.target.vocab_size)

    @property
    def _drafter(self) -> Drafter | None:
        """The drafter while it is in use."""
        return self.drafter if self.draft_cache is not None else None

    def _arrays(self) -> list[mx.array]:
        drafts = self.draft_cache.arrays() if self.draft_cache is not None else []
        return self.cache.arrays() + drafts

    def _prefill(self, prompt: Sequence[int], chooser: Chooser, stats: GenerationStats) -> mx.array:
        """Run what the caches lack of the prompt, chunk by chunk; the first token [1]."""
        start = time.perf_counter()
        with self._guard():
            mx.reset_peak_memory()
            # The last prompt token always runs: its logits choose the first new token.
            self._rewind(_common_prefix(self.ids, prompt[:-1]))
            stats.prompt_tokens, stats.cached_tokens = len(prompt), len(self.ids)
            if chooser.history is not None:
                chooser.history.add(mx.array(prompt, mx.int32))
        if self.draft_cache is not None and self.draft_cache.length < len(self.ids):
            self._observe_again()
            stats.cached_tokens = 0
        hidden = None
        while len(self.ids) < len(prompt):
            with self._guard():
                hidden = self._prefill_chunk(prompt)
        assert hidden is not None
        with self._guard():
            verdict, sound = chooser.judge(self.target.logits(hidden), None)
            mx.eval(verdict.tokens, sound)
            if not sound.item():
                raise unsound()
        stats.prefill_seconds = time.perf_counter() - start
        return verdict.tokens

    def _observe_again(self) -> None:
        """Show the drafter the kept tokens, from a run beside the target's cache."""
        assert self.drafter is not None
        cache = self.target.make_cache()
        for start in range(0, len(self.ids), self.prefill_chunk):
            with self._guard():
                chunk = mx.array(self.ids[start : start + self.prefill_chunk], mx.int32)
                _, features = self.target.forward([Segment(chunk, cache)], self.drafter.taps)
                cache.commit(chunk.size)
                assert features is not None
                self.drafter.observe(features, self.draft_cache)
                mx.eval(cache.arrays(), self._arrays())
                mx.clear_cache()

    def _prefill_chunk(self, prompt: Sequence[int]) -> mx.array:
        """Run and commit the next chunk; the hidden state of its last row [1, H]."""
        chunk = list(prompt[len(self.ids) : len(self.ids) + self.prefill_chunk])
        drafter = self._drafter
        segment = Segment(mx.array(chunk, mx.int32), self.cache)
        hidden, features = self.target.forward([segment], drafter.taps if drafter else ())
        self.cache.commit(len(chunk))
        if drafter is not None and features is not None:
            drafter.observe(features, self.draft_cache)
        last = hidden[0, -1:]
        mx.eval(last, self._arrays())
        mx.clear_cache()
        self.ids += chunk
        return last

    def _decode(
        self,
        chooser: Chooser,
        first: mx.array,
        max_tokens: int,
        stats: GenerationStats,
    ) -> Iterator[list[int]]:
        tokens: list[int] = self._ending.cut(first.tolist())
        flight: Flight | None = None
        if chooser.history is not None:
            with self._guard():
                chooser.history.add(first)
        self._meet(tokens)
        began = landed = time.perf_counter()
        for step in range(1, max_tokens + 1):
            stats.generation_tokens += len(tokens)
            stats.generation_seconds = time.perf_counter() - began
            left = max_tokens - stats.generation_tokens
            if self._ending.reason or not left:
                stats.finish_reason = self._ending.reason or "length"
                yield tokens
                return
            if flight is None:
                with self._guard():
                    flight = self._launch(chooser, mx.array(tokens[-1:], mx.int32), left)
            shown = time.perf_counter()
            yield tokens
            with self._guard():
                # The reader's own time, and that of other generations: meanwhile the step went on.
                held = time.perf_counter() - shown
                tokens, flight = self._land(chooser, flight, tokens[-1], left, stats)
            now = time.perf_counter()
            self.held += held
            if self._drafter is not None and held <= MOST_HELD * (now - landed):
                self._pace.timed(now - landed)
            landed = now
            self._meet(tokens)
            if step % CLEAR_CACHE_EVERY == 0:
                with self._guard():
                    mx.clear_cache()

    def _launch(self, chooser: Chooser, anchor: mx.array, left: int) -> Flight:
        # A cycle emits its accepted drafts and one more token, so `left - 1` drafts suffice.
        drafter, drafts, head = self._drafter, 0, None
        if drafter is not None:
            drafts, rows = self._pace.next(len(self.ids), left - 1)
            head = None if rows is None else self._reduced_head(drafter, rows)
        if drafts:
            self._observe_waiting()
        return launch(
            self.target, self.cache, drafter, self.draft_cache, chooser, anchor, drafts, head
        )

    def _reduced_head(self, drafter: Drafter, rows: int) -> ReducedHead:
        """The head of the `rows` most frequent tokens and of those of the text."""
        assert self._words is not None
        assert drafter.head_rows is not None
        others = self._words.others(rows)
        if self._head is None or self._head.rows != rows or self._head.others != len(others):
            self._head = drafter.head_rows.reduced(rows, others)
        return self._head

    def _knows(self, head: ReducedHead, token: int) -> bool:
        return self._words is not None and self._words.knows(token, head.rows)

    def _meet(self, tokens: Sequence[int]) -> None:
        if self._words is not None:
            self._words.met(tokens)

    def _land(
        self,
        chooser: Chooser,
        flight: Flight,
        anchor: int,
        left: int,
        stats: GenerationStats,
    ) -> tuple[list[int], Flight | None]:
        """Await a step and keep what it emits: its tokens, and the step launched behind it.

        A plain step always keeps exactly its anchor's row, so the next one is launched before
        this one is read; a cycle has to be read first, to know which rows stay.
        """
        ahead = None
        if not flight.drafted:
            self._keep(flight, [anchor])
            if self.draft_cache is not None:
                self._pace.landed(0, 1)
            if chooser.history is not None:
                chooser.history.add(flight.tokens)
            if left > 1:
                ahead = self._launch(chooser, flight.tokens, left - 1)
        accepted, healthy, tokens = flight.read()
        # Before rows are kept: a recurrent state cannot be taken back to the end of the text.
        correction, tokens = tokens[-1], self._ending.cut(tokens)
        if flight.drafted:
            head = flight.head
            self._keep(flight, [anchor, *tokens[:-1]])
            if chooser.history is not None:
                chooser.history.add(mx.array(tokens, mx.int32))
            stats.count_cycle(flight.drafted, accepted, len(tokens), head is not None)
            outside = head is not None and not self._knows(head, correction)
            self._pace.landed(accepted, len(tokens), outside)
            self._watch_drafter(healthy, stats)
        return tokens, ahead

    def _keep(self, flight: Flight, ids: list[int]) -> None:
        """Commit the rows of `ids` in the target; their features are the drafter's, soon."""
        self.cache.commit(len(ids))
        self.ids += ids
        if self.draft_cache is not None and flight.features is not None:
            self._waiting.append(flight.features.rows(0, len(ids)))
            if flight.drafted or len(self._waiting) >= MOST_WAITING:
                self._observe_waiting()

    def _observe_waiting(self) -> None:
        """Give the drafter the features it lacks; its context is then as long as the target's."""
        waiting, self._waiting = self._waiting, []
        if waiting and (drafter := self._drafter) is not None:
            drafter.observe(Features.one_behind_another(waiting), self.draft_cache)

    def _watch_drafter(self, healthy: bool, stats: GenerationStats) -> None:
        if not healthy:
            self.draft_cache, self._sick = None, True
            stats.warn(
                "The drafter produced NaN; the rest was decoded without it. "
                "The text is not affected; load another drafter or another --dtype."
            )
        elif stats.cycles >= NEVER_AGREED_CYCLES and not stats.accepted:
            stats.warn(
                "The drafter has not agreed with the target once. "
                "The text is not affected; check that the drafter was trained for this model."
            )


def _common_prefix(kept: Sequence[int], prompt: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    for index, (a, b) in enumerate(zip(kept, prompt, strict=False)):
        if a != b:
            return index
    return min(len(kept), len(prompt))
