"""Keys and values of a sliding-window attention layer, rolled back as exactly as full ones."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.cache.context import LayerContext


class WindowCache(LayerContext, LayerCache):
    """K/V rows [1, Hkv, capacity, D] in temporal order; row 0 of the buffer is position `start`.

    A query at position p sees the positions p-W < j <= p, itself included. Pending rows overwrite
    none that a query may see, so every count can be committed, also after the window has wrapped;
    REWIND_ROWS committed rows more are kept, for sequences that are shortened. The buffers are
    bounded by W, the rows of the current write and a constant, whatever the length of the sequence.
    """

    window: int

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} positions")
        super().__init__(window)

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

    def rewind(self, length: int) -> bool:
        if not super().rewind(length):
            return False
        self.pending = 0
        return True
