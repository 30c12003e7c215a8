"""Causal attention with grouped queries, full or windowed, over segments with a cache each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.cache import KVCache, WindowCache
from dflash_mlx.layers.pooled import attend_pooled, one_row_each
from dflash_mlx.layers.rope import Rope
from dflash_mlx.segment import Segment, by_segment, rejoin


def causal_mask(rows: int, keys: int, window: int | None = None) -> str | mx.array | None:
    """What the last `rows` of `keys` positions may see: themselves and what lies before.

    With a `window` W a query at p sees p-W < j <= p. None: a single row sees every key.
    """
    if window is not None and keys > window:
        return _window_mask(rows, keys, window)
    return "causal" if rows > 1 else None


# Few, since the mask of a prefill chunk has some hundred kB; blocks of a full window share one.
@lru_cache(maxsize=16)
def _window_mask(rows: int, keys: int, window: int) -> mx.array:
    """[rows, keys] bool. From numpy, so that it is evaluated and every thread may use it."""
    query = np.arange(keys - rows, keys)[:, None]
    key = np.arange(keys)[None]
    return mx.array((key <= query) & (key > query - window))


class Attention(nn.Module):
    """q/k/v/o projections; q_norm and k_norm (per head, before rope) when `norm_eps` is given.

    window: positions a query sees, itself included; None is all.
    sinks: a learned logit a head [Hq] that takes part in the softmax and has no value.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        bias: bool = False,
        norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.window = window
        self.heads = heads
        self.kv_heads = kv_heads
        self.scale = head_dim**-0.5
        self.rope = rope
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)
        if norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        if sinks:
            self.sinks = mx.zeros((heads,))

    def make_cache(self) -> KVCache | WindowCache:
        """An empty cache for this layer of one sequence."""
        return KVCache() if self.window is None else WindowCache(self.window)

    def __call__(
        self,
        x: mx.array,
        segments: Sequence[Segment],
        caches: Sequence[KVCache | WindowCache],
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]; `caches` holds this layer's cache of every segment."""
        queries = self.q_proj(x).reshape(1, x.shape[1], self.heads, -1)
        return self.o_proj(self.attend(x, queries, segments, caches))

    def attend(
        self,
        x: mx.array,
        queries: mx.array,
        segments: Sequence[Segment],
        caches: Sequence[KVCache],
    ) -> mx.array:
        """Queries [1, ΣT, Hq, D] over the K/V of x [1, ΣT, H] and before: [1, ΣT, Hq·D]."""
        rows = x.shape[1]
        keys = self.k_proj(x).reshape(1, rows, self.kv_heads, -1)  # [1, ΣT, Hkv, D]
        values = self.v_proj(x).reshape(1, rows, self.kv_heads, -1)
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if one_row_each(rows, caches):
            sinks = self.get("sinks")
            return attend_pooled(
                queries, keys, values, caches, self.rope, scale=self.scale, sinks=sinks
            )
        attended = [
            self._attend(q, k, v, cache)
            for q, k, v, cache in zip(
                by_segment(queries, segments),
                by_segment(keys, segments),
                by_segment(values, segments),
                caches,
                strict=True,
            )
        ]
        return rejoin(attended)

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: KVCache | WindowCache
    ) -> mx.array:
        """One segment: [1, T, Hq, D] and twice [1, T, Hkv, D] -> [1, T, Hq·D]."""
        rows, start = queries.shape[1], cache.length
        queries = self.rope(queries.transpose(0, 2, 1, 3), start)
        keys = self.rope(keys.transpose(0, 2, 1, 3), start)
        keys, values = cache.write(keys, values.transpose(0, 2, 1, 3))
        out = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self.scale,
            mask=causal_mask(rows, keys.shape[2], self.window),
            sinks=self.get("sinks"),
        )
        return out.transpose(0, 2, 1, 3).reshape(1, rows, -1)
