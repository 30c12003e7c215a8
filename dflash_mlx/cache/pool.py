"""Keys and values of one layer for several sequences in one buffer.

One write and one attention then serve a row of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.cache.borrowed import BorrowedCache
from dflash_mlx.cache.kv import GROWTH_ROWS, KVCache
from dflash_mlx.cache.stack import CacheStack
from dflash_mlx.cache.window import WindowCache


class KVPool:
    """K/V rows [places, Hkv, capacity, D]; row j of a place is position j of its sequence.

    window: positions a query sees, itself included; None is all. Rows behind the window stay, up
    to the longest sequence.
    """

    def __init__(self, places: int, window: int | None) -> None:
        self.places = places
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def capacity(self) -> int:
        """Rows a place has room for."""
        return 0 if self.keys is None else self.keys.shape[2]

    def reserve(self, rows: int, keys: mx.array, values: mx.array) -> None:
        """Room for `rows` rows of every place, shaped as keys and values [1, Hkv, T, D]."""
        if rows <= self.capacity:
            return
        capacity = -(-rows // GROWTH_ROWS) * GROWTH_ROWS
        self.keys = self._grown(self.keys, keys, capacity)
        self.values = self._grown(self.values, values, capacity)

    def _grown(self, old: mx.array | None, like: mx.array, capacity: int) -> mx.array:
        # Zeros, since masked rows must not be NaN.
        shape = (self.places, like.shape[1], capacity, like.shape[3])
        if old is None:
            return mx.zeros(shape, like.dtype)
        more = mx.zeros((*shape[:2], capacity - old.shape[2], shape[3]), like.dtype)
        return mx.concatenate([old, more], axis=2)

    def first_seen(self, length: int) -> int:
        """The oldest position that a row at position `length` sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def move(self, source: int, to: int) -> None:
        """Copy a place's rows over those of another."""
        if self.keys is not None and self.values is not None:
            self.keys[to] = self.keys[source]
            self.values[to] = self.values[source]


class PooledCache(LayerCache):
    """One sequence's place in a pool; a full or a windowed cache to the layer."""

    def __init__(self, pool: KVPool, place: int) -> None:
        self.pool = pool
        self.place = place
        self._whole: tuple[mx.array, mx.array] | None = None  # the sequence, if just begun

    def write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As `KVCache.write` or `WindowCache.write`."""
        rows = keys.shape[2]
        end = self.length + rows
        pool = self.pool
        pool.reserve(end, keys, values)
        assert pool.keys is not None
        assert pool.values is not None
        pool.keys[self.place, :, self.length : end] = keys[0]
        pool.values[self.place, :, self.length : end] = values[0]
        self.pending = rows
        # A slice of the pool that attention still holds would make the next sequence's write copy
        # the pool of all places.
        self._whole = None if self.length else (keys, values)
        return self.written()

    def commit(self, n: int) -> None:
        super().commit(n)
        self._whole = None

    def rewind(self, length: int) -> bool:
        self._whole = None
        return super().rewind(length)

    def written(self) -> tuple[mx.array, mx.array]:
        """What the last write returned; only after one."""
        if self._whole is not None:
            return self._whole
        pool = self.pool
        assert pool.keys is not None
        assert pool.values is not None
        rows = slice(pool.first_seen(self.length), self.length + self.pending)
        place = slice(self.place, self.place + 1)
        return pool.keys[place, :, rows], pool.values[place, :, rows]

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.pool.keys, self.pool.values) if a is not None]

    @property
    def nbytes(self) -> int:
        """This sequence's share of the pool."""
        return super().nbytes // self.pool.places


def pooled(caches: Sequence[LayerCache]) -> TypeGuard[Sequence[PooledCache]]:
    """Whether these are one layer's caches of several sequences, in places 0 .. n-1 of one pool."""
    first = caches[0]
    return (
        len(caches) > 1
        and isinstance(first, PooledCache)
        and all(
            isinstance(c, PooledCache) and c.pool is first.pool and c.place == i
            for i, c in enumerate(caches)
        )
    )


def write_rows(caches: Sequence[PooledCache], keys: mx.array, values: mx.array) -> None:
    """Write one row a sequence ([n, Hkv, 1, D]) behind the committed ones, for `pooled` caches."""
    pool, count = caches[0].pool, len(caches)
    pool.reserve(max(c.length for c in caches) + 1, keys, values)
    assert pool.keys is not None
    assert pool.values is not None
    places, at = mx.arange(count), mx.array([c.length for c in caches], mx.int32)
    pool.keys[places, :, at] = keys[:, :, 0]
    pool.values[places, :, at] = values[:, :, 0]
    for cache in caches:
        cache.pending, cache._whole = 1, None


def read_rows(caches: Sequence[PooledCache]) -> tuple[mx.array, mx.array, mx.array]:
    """(keys, values) [n, Hkv, S, D] that hold all that the rows written last may see, and the
    mask [n, 1, 1, S] of what each sees.
    """
    pool, count = caches[0].pool, len(caches)
    assert pool.keys is not None
    assert pool.values is not None
    lengths = [c.length for c in caches]
    start = min(pool.first_seen(length) for length in lengths)
    positions = mx.arange(start, max(lengths) + 1)
    at = mx.array(lengths, mx.int32)[:, None]
    mask = positions <= at
    if pool.window is not None:
        mask = mask & (positions > at - pool.window)
    rows = slice(start, max(lengths) + 1)
    return pool.keys[:count, :, rows], pool.values[:count, :, rows], mask[:, None, None]


class Places:
    """The layers' pools of up to `count` sequences, and who is where.

    The sequences stand in places 0 .. n-1 in the order of `stacks`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.stacks: list[CacheStack] = []
        self._pools: list[KVPool | None] | None = None

    def add(self, stack: CacheStack) -> CacheStack:
        """Give an empty stack's attention layers the next place; others keep their own caches."""
        if stack.length or len(self.stacks) == self.count:
            raise ValueError("only an empty sequence takes a place, and only a free one")
        if self._pools is None:
            self._pools = [_pool(cache, self.count) for cache in stack]
        replaced: dict[int, PooledCache] = {}
        for index, pool in enumerate(self._pools):
            if pool is not None:
                replaced[id(stack[index])] = PooledCache(pool, len(self.stacks))
        for index, cache in enumerate(stack):
            if isinstance(cache, BorrowedCache):
                cache.lender = replaced[id(cache.lender)]
            else:
                stack.layers[index] = replaced.get(id(cache), cache)
        self.stacks.append(stack)
        return stack

    def remove(self, index: int) -> None:
        """Free the place of `stacks[index]`; the last sequence moves there."""
        last = self.stacks.pop()
        if index == len(self.stacks):
            return
        self.stacks[index] = last
        for cache in last:
            if isinstance(cache, PooledCache):
                cache.pool.move(cache.place, index)
                cache.place = index


def _pool(cache: LayerCache, places: int) -> KVPool | None:
    if isinstance(cache, WindowCache):
        return KVPool(places, cache.window)
    return KVPool(places, None) if isinstance(cache, KVCache) else None
