"""Where two continuations of one prompt part, and whether rounding alone explains it.

One rule for the benchmark, the scripts and the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.decode.session import PREFILL_CHUNK, Guard
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment

#: distance between 1 and the next number
_EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
#: Gaps that another order of summation explains, in spacings. Measured on SmolLM2-135M (30 layers),
#: rows one by one against blocks of 4 to 48: the gaps between its 16 best logits moved by up to 30
#: spacings in float32, where every sum differs by its order, and by up to 7.25 in the half types
#: with matrix products summed in float32, where rounding the result hides most of it. Rounded up.
NEAR_TIE_SPACINGS = {mx.float32: 32.0, mx.float16: 8.0, mx.bfloat16: 8.0}


@dataclass(frozen=True)
class Difference:
    """The first token in which two texts differ.

    gap: how far apart the target's logits of the two tokens are there; infinite where one text
    ends. spacings: the gap in distances between neighbouring numbers of the target's type at the
    size of that row's largest logit. near_tie: whether the two tokens may change places when sums
    run in another order.
    """

    token: int
    gap: float
    spacings: float
    near_tie: bool


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; a text that ends earlier differs where it ends."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def difference(
    target: Target,
    guard: Guard,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    *,
    exact: bool = False,
) -> Difference | None:
    """Where two continuations of `prompt` part; None when they are equal.

    exact: both sides added everything up in one order, so that no difference is a near-tie.
    """
    at = first_difference(one, other)
    if at is None:
        return None
    if at == min(len(one), len(other)):
        return Difference(at, math.inf, math.inf, False)
    logits = logits_behind(target, guard, [*prompt, *one[:at]])
    with guard():
        gap = abs(logits[one[at]] - logits[other[at]]).item()
        size = mx.abs(logits).max().item()
    spacings = gap / spacing(size, target.dtype) if size else 0.0
    near = not exact and spacings <= NEAR_TIE_SPACINGS[target.dtype]
    return Difference(at, gap, spacings, near)


def spacing(size: float, dtype: mx.Dtype) -> float:
    """Distance from a number of this size, above 0, to the next one of this type."""
    return _EPSILON[dtype] * 2.0 ** math.floor(math.log2(size))


def near_tie_gap(size: float, dtype: mx.Dtype) -> float:
    """The largest gap of logits that is a near-tie in a row whose largest logit is of this size."""
    return NEAR_TIE_SPACINGS[dtype] * spacing(size, dtype)


def logits_behind(target: Target, guard: Guard, ids: Sequence[int]) -> mx.array:
    """The target's logits [V] in float32 behind `ids`, run in chunks as prefill runs them."""
    cache = target.make_cache()
    for start in range(0, len(ids), PREFILL_CHUNK):
        with guard():
            segment = Segment(mx.array(ids[start : start + PREFILL_CHUNK], mx.int32), cache)
            hidden, _ = target.forward([segment])
            cache.commit(segment.rows)
            mx.eval(hidden, cache.arrays())
    with guard():
        logits = target.logits(hidden[0, -1:])[0].astype(mx.float32)
        mx.eval(logits)
    return logits
