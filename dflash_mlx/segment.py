"""Segments: the tokens of several sequences on one flat token axis, each with its own cache.

Projections and MLPs see one axis of ΣT rows; attention and recurrent layers loop over segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx

if TYPE_CHECKING:
    from dflash_mlx.cache.stack import CacheStack

Item = TypeVar("Item")


@dataclass(frozen=True)
class Segment:
    """Tokens of one sequence to run now, behind the committed rows of `cache`.

    Token i of the segment stands at absolute position `cache.length + i`.
    """

    ids: mx.array  # [T] int32, T >= 1
    cache: CacheStack

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])


def flat_ids(segments: Sequence[Segment]) -> mx.array:
    """All tokens on one axis, in segment order: [1, ΣT]."""
    if len(segments) == 1:
        return segments[0].ids[None]
    return mx.concatenate([s.ids for s in segments])[None]


def spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(start, stop) of every segment's rows on the flat axis."""
    out, start = [], 0
    for segment in segments:
        out.append((start, start + segment.rows))
        start += segment.rows
    return out


def by_segment(x: mx.array, segments: Sequence[Segment]) -> list[mx.array]:
    """Cut a flat activation [1, ΣT, ...] into one [1, T, ...] view a segment."""
    if len(segments) == 1:
        return [x]
    return [x[:, start:stop] for start, stop in spans(segments)]


def rejoin(parts: Sequence[mx.array]) -> mx.array:
    """Undo `by_segment`: [1, T, ...] parts back to [1, ΣT, ...]."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=1)


def packed(items: Sequence[Item], length: Callable[[Item], int], rows: int) -> Iterator[list[Item]]:
    """Items in order, grouped for passes of at most `rows` rows together; a longer one goes alone.

    length: rows of an item.
    """
    group: list[Item] = []
    filled = 0
    for item in items:
        if group and filled + length(item) > rows:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += length(item)
    if group:
        yield group
