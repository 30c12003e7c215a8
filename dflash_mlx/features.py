"""Hidden states of a target's tapped layers, side by side without being joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx


class Features:
    """[1, S, T·H]: the hidden states [1, S, H] of T tapped layers in the drafter's order.

    They are the rows first .. stop - 1 of `whole` [1, S', H]. A drafter's kernel reads them there:
    MLX would copy a slice of a much larger array before it gave a kernel the slice alone.
    Everything else sees one array: `joined`, or an index into it.
    """

    def __init__(self, whole: Sequence[mx.array], first: int = 0, stop: int | None = None) -> None:
        self.whole = tuple(whole)
        held = self.whole[0].shape[1]
        self.first, self.stop = first, held if stop is None else min(stop, held)

    @staticmethod
    def of(features: mx.array | Features) -> Features:
        """An array is a single part."""
        return Features([features]) if isinstance(features, mx.array) else features

    @staticmethod
    def one_behind_another(several: Sequence[Features]) -> Features:
        """The rows of all in order."""
        if len(several) == 1:
            return several[0]
        columns = zip(*(features.parts for features in several), strict=True)
        return Features([mx.concatenate(rows, axis=1) for rows in columns])

    @cached_property
    def parts(self) -> tuple[mx.array, ...]:
        """[1, S, H] each."""
        if (self.first, self.stop) == (0, self.whole[0].shape[1]):
            return self.whole
        return tuple(part[:, self.first : self.stop] for part in self.whole)

    @cached_property
    def joined(self) -> mx.array:
        return mx.concatenate(self.parts, axis=-1) if len(self.parts) > 1 else self.parts[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        width = sum(part.shape[2] for part in self.whole)
        return self.whole[0].shape[0], self.stop - self.first, width

    @property
    def dtype(self) -> mx.Dtype:
        return self.whole[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def rows(self, first: int, stop: int) -> Features:
        """Positions first .. stop - 1, apart as before."""
        return Features(self.whole, self.first + first, min(self.first + stop, self.stop))

    def __getitem__(self, index: Any) -> mx.array:
        return self.joined[index]
