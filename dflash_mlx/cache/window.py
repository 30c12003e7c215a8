"""Keys and values of a sliding-window attention layer, rolled back as exactly as full ones."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.cache.context import REWIND_ROWS, LayerContext


class WindowCache(LayerContext, LayerCache):
    """K/V rows [1, Hkv, capacity, D] in temporal order; row 0 of the buffer is position `start`.

    A query at position p sees the positions p-W < j <= p, itself included. Pending rows overwrite
    none that a query may see, so every count can be committed, also after the window has wrapped.

    Room is W - 1 rows, REWIND_ROWS more for sequences that are shortened, and behind them a spare
    of max(SPARE_ROWS, W / SPARE_SHARE) that takes the block: 255 rows for W = 128, 1215 for 1024,
    where W and a block of 16 are 144 and 1040. In no more than those, every commit would move the
    rows in reach, 2 W row transfers beside the W that attention reads; with the spare it is one
    move in 48 and in 112 committed rows, 8 and 19 transfers a row. A ring would move none, and
    attention would add its rows up in another order after every wrap: no more the same bits. Only
    a write of more rows than the spare, such as a prompt's chunk, has a buffer of its own size,
    until the next.
    """

    window: int

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} positions")
        super().__init__(window)
        self._longest = 0

    def write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write T rows ([1, Hkv, T, D]) behind the committed ones; return the rows in reach.

        These are the up to W-1 committed rows that the first new query sees and the T new ones;
        later queries see fewer of the old rows, which a mask has to say. A second write before a
        commit replaces the pending rows of the first.
        """
        self.pending = keys.shape[2]
        return self.with_block(keys, values)

    def written(self) -> tuple[mx.array, mx.array]:
        """What the last write returned; only after one."""
        assert self.keys is not None
        assert self.values is not None
        end = self.length - self.start
        rows = slice(end - self.visible, end + self.pending)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def commit(self, n: int) -> None:
        super().commit(n)
        self._longest = max(self._longest, self.length)

    def can_rewind(self, length: int) -> bool:
        """Whether it may be shortened to `length`: no more than what the room for it promises.

        More rows may be held by chance, by the sizes of the writes before. A rule that asks for
        those would send one sequence back where it lets another, of the same rows, start afresh.
        """
        needed = max(0, length - (self.window - 1))
        promised = max(0, self._longest - (self.window - 1 + REWIND_ROWS))
        return length >= self.length or needed >= promised

    def rewind(self, length: int) -> bool:
        if not super().rewind(length):
            return False
        self.pending = 0
        return True
