"""Hidden states of a target's tapped layers, side by side without being joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx


class Features:
    """[1, S, T·H]: the hidden states [1, S, H] of T tapped layers in the drafter's order.

    A drafter's kernel reads the parts where they are. Everything else sees one array: `joined`,
    or an index into it.
    """

    def __init__(self, parts: Sequence[mx.array]) -> None:
        self.parts = tuple(parts)

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
    def joined(self) -> mx.array:
        return mx.concatenate(self.parts, axis=-1) if len(self.parts) > 1 else self.parts[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        batch, rows, _ = self.parts[0].shape
        return batch, rows, sum(part.shape[2] for part in self.parts)

    @property
    def dtype(self) -> mx.Dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def rows(self, first: int, stop: int) -> Features:
        """Positions first .. stop - 1, apart as before."""
        return Features([part[:, first:stop] for part in self.parts])

    def __getitem__(self, index: Any) -> mx.array:
        return self.joined[index]
