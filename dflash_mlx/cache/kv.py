"""Keys and values of one full-attention layer, in a buffer that grows by steps."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache

GROWTH_ROWS = 256


class KVCache(LayerCache):
    """K/V rows [1, Hkv, capacity, D]; rows beyond `length + pending` are unspecified."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write T rows ([1, Hkv, T, D]) behind the committed ones and return all rows up to them.

        A second write before a commit replaces the pending rows of the first.
        """
        rows = keys.shape[2]
        end = self.length + rows
        self._reserve(end, keys, values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.pending = rows
        return self.written()

    def written(self) -> tuple[mx.array, mx.array]:
        """What the last write returned; only after one."""
        assert self.keys is not None
        assert self.values is not None
        end = self.length + self.pending
        return self.keys[:, :, :end], self.values[:, :, :end]

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values) if a is not None]

    def _reserve(self, rows: int, keys: mx.array, values: mx.array) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if rows <= capacity:
            return
        # Growth is proportional for long contexts, so that copying stays linear in the context.
        target = max(rows, capacity + max(GROWTH_ROWS, capacity // 4))
        target = -(-target // GROWTH_ROWS) * GROWTH_ROWS
        self.keys = _grown(self.keys, keys, target, self.length)
        self.values = _grown(self.values, values, target, self.length)


def _grown(old: mx.array | None, like: mx.array, capacity: int, keep: int) -> mx.array:
    batch, heads, _, dim = like.shape
    if old is None or keep == 0:
        return mx.zeros((batch, heads, capacity, dim), like.dtype)
    tail = mx.zeros((batch, heads, capacity - keep, dim), like.dtype)
    return mx.concatenate([old[:, :, :keep], tail], axis=2)
