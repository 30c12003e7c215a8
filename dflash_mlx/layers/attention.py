"""Causal attention with grouped queries, full or windowed, over segments with a cache each."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import KVCache, WindowCache
from dflash_mlx.kernels import Rows, Sight, Surroundings, block_attention
from dflash_mlx.layers.pooled import attend_pooled, one_row_each
from dflash_mlx.layers.rope import Rope
from dflash_mlx.segment import Segment, by_segment, rejoin


class Attention(nn.Module):
    """q/k/v/o projections; q_norm and k_norm (per head, before rope) when `norm_eps` is given.

    window: positions a query sees, itself included; None is all.
    sinks: a learned logit a head [Hq] that takes part in the softmax and has no value.
    exact: set by models.exact.
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
        self.sight = Sight(True, window)
        self.exact = False
        self.head_dim = head_dim
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
        if not self.exact and one_row_each(rows, caches):
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
        start = cache.length
        queries = self.rope(queries.transpose(0, 2, 1, 3), start)
        keys = self.rope(keys.transpose(0, 2, 1, 3), start)
        held = Rows(*cache.write(keys, values.transpose(0, 2, 1, 3)))
        return block_attention(
            queries,
            Surroundings(joined=held),
            scale=self.scale,
            sight=self.sight,
            position=start,
            sinks=self.get("sinks"),
            exact=self.exact,
        )
