"""Full attention whose output is gated, head by head, by what q_proj makes beside the queries."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import KVCache
from dflash_mlx.layers.attention import Attention
from dflash_mlx.layers.rope import Rope
from dflash_mlx.segment import Segment


class GatedAttention(Attention):
    """o_proj(attention · sigmoid(gate)); q_proj holds query and gate of each head side by side."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        norm_eps: float,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, heads, kv_heads, head_dim, rope, bias=bias, norm_eps=norm_eps)
        self.q_proj = nn.Linear(hidden_size, 2 * heads * head_dim, bias=bias)

    def __call__(
        self, x: mx.array, segments: Sequence[Segment], caches: Sequence[KVCache]
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]; `caches` holds this layer's cache of every segment."""
        rows = x.shape[1]
        projected = self.q_proj(x).reshape(1, rows, self.heads, -1)  # [1, ΣT, Hq, 2·D]
        queries, gate = mx.split(projected, 2, axis=-1)
        attended = self.attend(x, queries, segments, caches)
        return self.o_proj(attended * mx.sigmoid(gate.reshape(1, rows, -1)))
