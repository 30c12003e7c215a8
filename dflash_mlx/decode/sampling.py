"""Sampling settings and the distribution they make of logits; pure functions, arrays in and out.

The same filtered distribution decides acceptance, residual and bonus, and plain decoding.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Real

import mlx.core as mx

from dflash_mlx.errors import UsageError

#: below it, logits divided by the temperature would leave what float32 can tell apart
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy decoding.

    Order of work: repetition penalty on the raw logits, division by the temperature, top-k,
    softmax, top-p, min-p, renormalisation. With temperature 0 the largest penalised logit wins
    and the filters have nothing to do.

    repetition_penalty acts on every token of the prompt and of the text so far: positive logits
    are divided by it, negative ones multiplied.
    seed: the same seed gives the same tokens again; None draws a new one for every generation.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off; relative to the most probable token
    repetition_penalty: float = 1.0  # 1: off
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UsageError(f"{name} is {value!r}. Give a number.")
        warm = self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE
        rule = f"0 (greedy) or at least {LEAST_TEMPERATURE}"
        _check("temperature", self.temperature, warm, rule)
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        _check(
            "repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"
        )
        whole = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        _check("top_k", self.top_k, whole and self.top_k >= 0, "a whole number, 0 (off) or more")
        if self.seed is not None:
            fits = type(self.seed) is int and 0 <= self.seed < 2**64
            _check("seed", self.seed, fits, "a whole number from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def without_effect(self) -> list[str]:
        """Names of settings that change nothing, since greedy decoding takes the best token."""
        if not self.greedy:
            return []
        off = {"top_p": 1, "top_k": 0, "min_p": 0, "seed": None}
        return [name for name, value in off.items() if getattr(self, name) != value]


def _check(name: str, value: float, good: bool, rule: str) -> None:
    if not good or not value <= sys.float_info.max:
        raise UsageError(f"{name} is {value!r}. Give a value that is {rule}.")


def probabilities(logits: mx.array, params: SamplingParams) -> mx.array:
    """The distribution sampling draws from: logits [n, V] -> float32 probabilities [n, V].

    Every row sums to 1; its most probable token always stays.
    """
    scaled = logits.astype(mx.float32) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        scaled = _keep_top_k(scaled, params.top_k)
    probs = mx.softmax(scaled, axis=-1)
    if params.top_p < 1:
        probs = _keep_top_p(probs, params.top_p)
    if params.min_p > 0:
        floor = params.min_p * probs.max(axis=-1, keepdims=True)
        probs = mx.where(probs >= floor, probs, 0.0)
    if params.top_p < 1 or params.min_p > 0:
        probs = probs / probs.sum(axis=-1, keepdims=True)
    return probs


def _keep_top_k(logits: mx.array, k: int) -> mx.array:
    """Exactly k logits stay in every row, also among equal ones; the others become -inf."""
    kept = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    out = mx.full(logits.shape, -mx.inf, logits.dtype)
    return mx.put_along_axis(out, kept, mx.take_along_axis(logits, kept, axis=-1), axis=-1)


def _keep_top_p(probs: mx.array, top_p: float) -> mx.array:
    """Tokens stay while the mass of the more probable ones is below top_p; the first always."""
    order = mx.argsort(-probs, axis=-1)
    ranked = mx.take_along_axis(probs, order, axis=-1)
    before = mx.cumsum(ranked, axis=-1) - ranked
    first = mx.arange(probs.shape[-1]) == 0
    kept = mx.where(first | (before < top_p), ranked, 0.0)
    return mx.put_along_axis(mx.zeros_like(probs), order, kept, axis=-1)


def draw(probs: mx.array, key: mx.array) -> mx.array:
    """One token a row by its probabilities, which need not sum to 1: [n, V] -> [n] int32.

    A token of probability 0 is never drawn.
    """
    return draw_at(probs, mx.random.uniform(shape=(*probs.shape[:-1], 1), key=key))


def draw_at(probs: mx.array, share: mx.array) -> mx.array:
    """The token at a share [n, 1] in [0, 1) of every row's mass: [n, V] -> [n] int32.

    Inverse of the cumulated mass.
    """
    mass = mx.cumsum(probs, axis=-1)
    total = mass[..., -1:]
    # Rounding must not lift it to the total: no token's mass lies above that.
    u = mx.minimum(share * total, total * (1 - 2**-23))
    return (mass <= u).sum(axis=-1).astype(mx.int32)


class History:
    """Which tokens the sequence holds so far (prompt and emitted), for the repetition penalty."""

    def __init__(self, vocab_size: int) -> None:
        self.seen = mx.zeros((vocab_size,), mx.bool_)

    def add(self, ids: mx.array) -> None:
        """Record tokens [n] (lazy arrays allowed)."""
        self.seen[ids] = True

    def rows(self, drafts: mx.array | None) -> mx.array:
        """What each verified row sees [n+1, V]: row i knows the drafts before it, not its own.

        This is the history plain decoding has at that position when the drafts are accepted.
        """
        if drafts is None:
            return self.seen[None]
        vocab = self.seen.shape[0]
        hits = drafts[:, None] == mx.arange(vocab, dtype=drafts.dtype)[None]
        upto = mx.cumsum(hits.astype(mx.int32), axis=0) > 0
        first = mx.zeros((1, vocab), mx.bool_)
        return mx.concatenate([first, upto]) | self.seen[None]


def penalise(logits: mx.array, seen: mx.array, penalty: float) -> mx.array:
    """Repetition penalty: logits [n, V], seen [n, V] bool -> logits [n, V]."""
    lowered = mx.where(logits > 0, logits / penalty, logits * penalty)
    return mx.where(seen, lowered, logits)
