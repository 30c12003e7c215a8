"""Gemma 4's attention: unscaled, normed queries, keys and values; full, windowed or borrowed."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import BorrowedCache, KVCache, WindowCache
from dflash_mlx.kernels import Rows, Sight, Surroundings, block_attention
from dflash_mlx.layers.pooled import attend_pooled, one_row_each
from dflash_mlx.layers.rope import Rope
from dflash_mlx.segment import Segment, by_segment, rejoin


class GemmaAttention(nn.Module):
    """`window`: positions a query sees, itself included; None for all.

    With `values_are_keys` there is no v_proj: values are the keys before norm and rope. A layer
    that `borrows` has neither and attends to what its cache's lender holds.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        window: int | None,
        norm_eps: float,
        bias: bool,
        values_are_keys: bool,
        borrows: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.rope, self.window, self.norm_eps = rope, window, norm_eps
        self.borrows, self.exact, self.head_dim = borrows, False, head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        if borrows:
            return
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        if not values_are_keys:
            self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps)

    def __call__(
        self,
        x: mx.array,
        segments: Sequence[Segment],
        caches: Sequence[KVCache | WindowCache | BorrowedCache],
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]; `caches` holds this layer's cache of every segment."""
        rows = x.shape[1]
        queries = self.q_norm(self.q_proj(x).reshape(1, rows, self.heads, -1))  # [1, ΣT, Hq, D]
        own = () if self.borrows else self._keys_and_values(x)
        if not self.exact and one_row_each(rows, caches):
            keys, values = own or (None, None)
            return self.o_proj(attend_pooled(queries, keys, values, caches, self.rope, scale=1.0))
        parts = [by_segment(part, segments) for part in (queries, *own)]
        attended = [self._attend(cache, *part) for cache, *part in zip(caches, *parts, strict=True)]
        return self.o_proj(rejoin(attended))

    def _keys_and_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Keys with their norm, before rope, and values with theirs: [1, ΣT, Hkv, D] each."""
        keys = self.k_proj(x).reshape(1, x.shape[1], self.kv_heads, -1)
        values = self.v_proj(x).reshape(keys.shape) if "v_proj" in self else keys
        # The norm of the values has no weights.
        return self.k_norm(keys), mx.fast.rms_norm(values, None, self.norm_eps)

    def _attend(
        self,
        cache: KVCache | WindowCache | BorrowedCache,
        queries: mx.array,
        keys: mx.array | None = None,
        values: mx.array | None = None,
    ) -> mx.array:
        """One segment: [1, T, Hq, D] and twice [1, T, Hkv, D] -> [1, T, Hq·D]."""
        queries = self.rope(queries.transpose(0, 2, 1, 3), cache.length)
        if isinstance(cache, BorrowedCache):
            keys, values = cache.read()
        else:
            assert keys is not None
            assert values is not None
            keys = self.rope(keys.transpose(0, 2, 1, 3), cache.length)
            keys, values = cache.write(keys, values.transpose(0, 2, 1, 3))
        return block_attention(
            queries,
            Surroundings(joined=Rows(keys, values)),
            scale=1.0,
            sight=Sight(True, self.window),
            position=cache.length,
            exact=self.exact,
        )
