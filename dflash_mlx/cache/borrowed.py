"""The cache of a layer that attends to the keys and values of an earlier layer: counts, no rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.cache.kv import KVCache
from dflash_mlx.cache.window import WindowCache

if TYPE_CHECKING:
    from dflash_mlx.cache.pool import PooledCache


class BorrowedCache(LayerCache):
    """Rows of `lender`, the cache of an earlier layer of the same sequence.

    The lender commits and rewinds its rows itself; this cache keeps count, since by the time it is
    told, the lender may have been told already.
    """

    def __init__(self, lender: KVCache | WindowCache | PooledCache) -> None:
        self.lender = lender

    def read(self) -> tuple[mx.array, mx.array]:
        """What the lender's last write returned: the rows that this forward's queries may see."""
        self.follow()
        return self.lender.written()

    def follow(self) -> None:
        """Count what the lender's last write brought."""
        self.pending = self.lender.pending

    def arrays(self) -> list[mx.array]:
        return []
