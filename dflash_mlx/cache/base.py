"""The contract of one layer's cache: a forward writes rows, `commit` decides which of them stay."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class LayerCache(ABC):
    """State of one layer for one sequence.

    A forward writes `pending` rows behind the `length` committed ones; they are visible to that
    forward only. `commit(n)` keeps the first n of them and drops the rest. Every cache must roll
    back exactly for every n in 0..pending. Where rows lie by position, counting is all it takes.
    """

    length: int = 0
    pending: int = 0

    def commit(self, n: int) -> None:
        """Keep the first `n` pending rows (0 <= n <= pending), drop the others."""
        self._check_commit(n)
        self.length += n
        self.pending = 0

    def rewind(self, length: int) -> bool:
        """Shorten the committed part to `length` rows; False when this cache cannot go back so far.

        A False leaves the cache as it was: the caller starts the sequence afresh.
        """
        self.length = min(self.length, length)
        self.pending = 0
        return True

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays held, for evaluation at step boundaries."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def _check_commit(self, n: int) -> None:
        if not 0 <= n <= self.pending:
            raise ValueError(f"commit({n}) with {self.pending} pending rows")
