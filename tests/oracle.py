"""What the program must equal: decoding that recomputes everything, and a drafter with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.base import DraftCache, DraftSampling, Proposal, ReducedHead
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment


def plain_forward(
    target: Target, ids: Sequence[int], taps: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits [T, V] and features [T, taps·H] of a whole sequence in one forward, fresh cache."""
    segment = Segment(mx.array(list(ids), dtype=mx.int32), target.make_cache())
    hidden, features = target.forward([segment], taps)
    logits = np.array(target.logits(hidden)[0].astype(mx.float32))
    return logits, None if features is None else np.array(features[0].astype(mx.float32))


def plain_logits(target: Target, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of a whole sequence in one forward."""
    return plain_forward(target, ids)[0]


def plain_features(target: Target, ids: Sequence[int], taps: Sequence[int]) -> np.ndarray:
    """Features [T, taps·H] of a whole sequence in one forward."""
    features = plain_forward(target, ids, taps)[1]
    assert features is not None
    return features


def plain_greedy(target: Target, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The n greedy tokens behind the prompt, the whole sequence recomputed for each."""
    ids = list(prompt_ids)
    for _ in range(n):
        ids.append(int(plain_logits(target, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def checked_greedy(target: Target, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens, each the choice of one forward over the whole text without any cache.

    The candidates come from single steps, which is quick; that forward judges all of them.
    """
    cache, ids, feed = target.make_cache(), list(prompt), list(prompt)
    for _ in range(n):
        hidden, _ = target.forward([Segment(mx.array(feed, dtype=mx.int32), cache)])
        cache.commit(len(feed))
        feed = [int(mx.argmax(target.logits(hidden)[0, -1]).item())]
        ids += feed
    logits = plain_logits(target, ids)[len(prompt) - 1 : -1]
    assert logits.argmax(axis=-1).tolist() == ids[len(prompt) :]
    best = np.sort(logits, axis=-1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-4, "a near tie may fall either way"
    return ids[len(prompt) :]


@dataclass
class OracleCache:
    """Counts the context rows."""

    length: int = 0
    expected: int | None = None  # length that the last proposal's plan leads to

    def rewind(self, length: int) -> bool:
        self.length = min(self.length, length)
        self.expected = None
        return True

    def arrays(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        return 0


class OracleDrafter:
    """Knows the continuation and drafts it with one error, planted by plan.

    In cycle c exactly min(plan[c % len(plan)], n) drafts agree with plain greedy decoding; drafts
    behind the planted error are true again, so a loop that looks past the error is found out.

    With greedy drafts every proposal checks that the anchor is the expected token, that the
    context length is the prompt plus what was emitted before the anchor, and that it grew by
    1 + (accepted by plan) since the last proposal. A proposal near the end of a text may be cut
    short by the loop; `check_growth=False` allows that in the middle, too.

    features: [L, taps·H] of the true sequence (`plain_features`); every observe is compared.
    draft_probs: [V] or [block_size - 1, V], drawn from when sampling; without it sampled drafts
    are the continuation's (cycled), under a one-hot distribution.
    """

    def __init__(
        self,
        prompt_length: int,
        continuation: Sequence[int],
        *,
        vocab_size: int,
        hidden_size: int,
        block_size: int,
        taps: Sequence[int],
        plan: Sequence[int],
        features: np.ndarray | None = None,
        draft_probs: np.ndarray | None = None,
        check_growth: bool = True,
        tolerance: float = 1e-4,
    ) -> None:
        self.block_size = block_size
        self.taps = tuple(taps)
        self.head_rows = None
        self.prompt_length = prompt_length
        self.continuation = list(continuation)
        self.vocab_size = vocab_size
        self.width = len(self.taps) * hidden_size
        self.plan = list(plan)
        self.features = features
        self.draft_probs = draft_probs
        self.check_growth = check_growth
        self.tolerance = tolerance
        self.observes = 0  # calls of observe
        self.proposes = 0  # calls of propose: the cycle counter
        self.drafted = 0  # drafts handed out
        self.planned_accepts = 0  # of them, drafts that agree up to the planted error

    def make_cache(self) -> OracleCache:
        return OracleCache()

    def observe(self, features: mx.array, cache: DraftCache) -> None:
        rows, width = features.shape[1], features.shape[2]
        assert features.shape[0] == 1, f"features of shape {features.shape}"
        assert rows >= 1, "an observe without rows"
        assert width == self.width, f"features are {width} wide, {self.width} expected"
        if self.features is not None:
            true = self.features[cache.length : cache.length + rows]
            seen = np.array(features[0].astype(mx.float32))[: len(true)]
            worst = float(np.abs(seen - true).max()) if len(true) else 0.0
            assert worst <= self.tolerance, (
                f"features of rows {cache.length}..{cache.length + rows - 1} are {worst} off"
            )
        cache.length += rows
        self.observes += 1

    def propose(
        self,
        anchor: mx.array,
        n: int,
        sampling: DraftSampling | None,
        cache: DraftCache,
        head: ReducedHead | None = None,
    ) -> Proposal:
        assert head is None, "a head that this drafter has not offered"
        assert 1 <= n < self.block_size, f"{n} drafts of a block of {self.block_size}"
        assert anchor.shape == (1,), f"anchor of shape {anchor.shape}"
        assert isinstance(cache, OracleCache)
        accepts = min(self.plan[self.proposes % len(self.plan)], n)
        self.proposes += 1
        self.drafted += n
        if sampling is not None:
            return self._sampled(n, accepts, sampling, cache)
        self._check(anchor, cache)
        cache.expected = cache.length + 1 + accepts
        self.planned_accepts += accepts
        tokens = mx.array(self._planted(n, accepts, cache), dtype=mx.int32)
        return Proposal(tokens, None, mx.array(True))

    def _check(self, anchor: mx.array, cache: OracleCache) -> None:
        emitted = cache.length - self.prompt_length
        assert 0 <= emitted < len(self.continuation), (
            f"context of {cache.length} rows behind a prompt of {self.prompt_length}"
        )
        expected = self.continuation[emitted]
        assert int(anchor.item()) == expected, (
            f"anchor {int(anchor.item())} at position {cache.length}, {expected} expected"
        )
        if self.check_growth and cache.expected is not None:
            assert cache.length == cache.expected, (
                f"context grew to {cache.length} rows, {cache.expected} expected"
            )

    def _planted(self, n: int, accepts: int, cache: OracleCache) -> list[int]:
        start = cache.length - self.prompt_length + 1
        assert start + n <= len(self.continuation), (
            f"the continuation has {len(self.continuation)} tokens, {start + n} are needed"
        )
        drafts = self.continuation[start : start + n]
        if accepts < n:
            drafts[accepts] = (drafts[accepts] + 1) % self.vocab_size
        return drafts

    def _sampled(
        self, n: int, accepts: int, sampling: DraftSampling, cache: OracleCache
    ) -> Proposal:
        if self.draft_probs is not None:
            table = self.draft_probs if self.draft_probs.ndim == 1 else self.draft_probs[:n]
            probs = mx.broadcast_to(mx.array(table, dtype=mx.float32), (n, self.vocab_size))
            tokens = mx.random.categorical(mx.log(probs), key=sampling.key).astype(mx.int32)
            return Proposal(tokens, probs, mx.array(True))
        start = cache.length - self.prompt_length + 1
        drafts = [self.continuation[(start + i) % len(self.continuation)] for i in range(n)]
        if accepts < n:
            drafts[accepts] = (drafts[accepts] + 1) % self.vocab_size
        one_hot = np.eye(self.vocab_size, dtype=np.float32)[drafts]
        return Proposal(mx.array(drafts, dtype=mx.int32), mx.array(one_hot), mx.array(True))
