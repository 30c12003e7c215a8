"""Attention of one row of each of several sequences at once, over a pool of caches.

The loop over segments spends its time on many small operations; here there is one of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.cache import BorrowedCache, LayerCache
from dflash_mlx.cache.pool import pooled, read_rows, write_rows
from dflash_mlx.layers.rope import Rope


def lenders(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """The caches that hold the rows, borrowed or own."""
    return [c.lender if isinstance(c, BorrowedCache) else c for c in caches]


def one_row_each(rows: int, caches: Sequence[LayerCache]) -> bool:
    """Whether `attend_pooled` may take the place of the loop: n caches of a pool, n rows."""
    return rows == len(caches) and pooled(lenders(caches))


def attend_pooled(
    queries: mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    caches: Sequence[LayerCache],
    rope: Rope,
    *,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Queries [1, n, Hq, D] over n pooled sequences: [1, n, Hq·D].

    keys, values: [1, n, Hkv, D], the rows' own before rope; None where the caches are borrowed.
    """
    held = lenders(caches)
    assert pooled(held)
    offsets = mx.array([c.length for c in caches], mx.int32)
    queries = rope(queries.transpose(1, 2, 0, 3), offsets)  # [n, Hq, 1, D]
    if keys is not None and values is not None:
        keys = rope(keys.transpose(1, 2, 0, 3), offsets)
        write_rows(held, keys, values.transpose(1, 2, 0, 3))
    for cache in caches:
        if isinstance(cache, BorrowedCache):
            cache.follow()
    seen_keys, seen_values, mask = read_rows(held)
    count, heads, _, dim = queries.shape
    if sinks is None:
        # The heads of a group as rows of one query: K and V of the group are read once.
        queries = queries.reshape(count, seen_keys.shape[1], -1, dim)
    out = mx.fast.scaled_dot_product_attention(
        queries, seen_keys, seen_values, scale=scale, mask=mask, sinks=sinks
    )
    return out.reshape(1, count, heads * out.shape[-1])
