"""The drafter's forward pass over many blocks of several sequences at once, for training.

Each block attends to its sequence's context before its anchor and to itself, as in generation; the
cost grows with blocks x context, since blocks never see one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.dflash import DFlashModel, DraftAttention
from dflash_mlx.draft.dflash2 import DFlash2Layer, GroupedDynamicConv
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.train.fast_math import softmax, swiglu


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one sequence.

    features: [S, T·H], the target's features of positions 0 .. S-1, S the largest anchor.
    anchors: [A] int, the position of every block's clean token, each >= 1.
    """

    features: mx.array
    anchors: np.ndarray

    def __post_init__(self) -> None:
        if len(self.anchors) == 0 or self.anchors.min() < 1:
            raise ValueError("a block needs an anchor with at least one position before it")
        if self.features.shape[0] != self.anchors.max():
            raise ValueError(
                f"features of {self.features.shape[0]} positions for anchors up to "
                f"{self.anchors.max()}: a block must not see features at or after its anchor"
            )


def block_rows(
    model: DFlashModel, config: DFlashConfig, embedded: mx.array, groups: Sequence[BlockGroup]
) -> mx.array:
    """Hidden states after the final norm, [ΣA, b, H], of all blocks of `groups` in order.

    embedded: [ΣA, b, H], embeddings of the anchors and masks as the drafter reads them.
    """
    features = mx.concatenate([group.features for group in groups])
    context = model.fuse(features.astype(embedded.dtype)[None])[0]  # [ΣS, H]
    anchors = mx.array(np.concatenate([group.anchors for group in groups]).astype(np.int32))
    x = embedded
    for i, layer in enumerate(model.layers):
        attention = _Attention(layer.self_attn, config, i, groups, context, anchors)
        x = _layer(layer, x, attention)
    return model.norm(x)


def _layer(layer, x: mx.array, attend: _Attention) -> mx.array:
    normed = layer.input_layernorm(x)
    if not isinstance(layer, DFlash2Layer):
        x = x + attend(normed)
        return x + mlp_rows(layer.mlp, layer.post_attention_layernorm(x))
    before, behind = conv_coefficients(layer.attention_conv, normed)
    x = x + convolve_blocks(attend(convolve_blocks(normed, before)), behind)
    normed = layer.post_attention_layernorm(x)
    before, behind = conv_coefficients(layer.mlp_conv, normed)
    return x + convolve_blocks(mlp_rows(layer.mlp, convolve_blocks(normed, before)), behind)


def mlp_rows(mlp: MLP, x: mx.array) -> mx.array:
    """[..., H] -> [..., H], with the training form of SwiGLU."""
    return mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def conv_coefficients(conv: GroupedDynamicConv, x: mx.array) -> tuple[mx.array, mx.array]:
    """[N, b, H] -> those of the input and the output side, each [N, b, taps, groups, H/groups]."""
    blocks, rows, hidden = x.shape
    dynamic = conv.kernel_projection(x).reshape(blocks, rows, 2, conv.taps, conv.groups, 1)
    base = conv.base_kernel.reshape(2, conv.taps, conv.groups, hidden // conv.groups)
    both = base + dynamic
    return both[:, :, 0], both[:, :, 1]


def convolve_blocks(x: mx.array, coefficients: mx.array) -> mx.array:
    """y[n, t] = sum over taps k of coefficients[n, t, k] · x[n, t - k]; zero before the anchor."""
    blocks, rows, hidden = x.shape
    taps, groups = coefficients.shape[2], coefficients.shape[3]
    grouped = x.reshape(blocks, rows, groups, hidden // groups)
    total = coefficients[:, :, 0] * grouped
    for k in range(1, min(taps, rows)):
        lagged = mx.pad(grouped[:, : rows - k], [(0, 0), (k, 0), (0, 0), (0, 0)])
        total = total + coefficients[:, :, k] * lagged
    return total.reshape(blocks, rows, hidden)


class _Attention:
    """One layer's attention for all blocks, over the context of each block's sequence."""

    def __init__(
        self,
        weights: DraftAttention,
        config: DFlashConfig,
        layer: int,
        groups: Sequence[BlockGroup],
        context: mx.array,
        anchors: mx.array,
    ) -> None:
        self.weights = weights
        self.rope = config.rope
        self.window, self.causal = config.windows[layer], config.causal[layer]
        self.groups = groups
        self.context = context
        self.anchors = anchors

    def __call__(self, x: mx.array) -> mx.array:
        """[N, b, H] -> [N, b, H]."""
        w = self.weights
        blocks, rows = x.shape[:2]
        queries = w.q_norm(w.q_proj(x).reshape(blocks, rows, w.heads, -1)).transpose(0, 2, 1, 3)
        keys = w.k_norm(w.k_proj(x).reshape(blocks, rows, w.kv_heads, -1)).transpose(0, 2, 1, 3)
        values = w.v_proj(x).reshape(blocks, rows, w.kv_heads, -1).transpose(0, 2, 1, 3)
        queries = self.rope(queries, self.anchors) * w.scale
        keys = self.rope(keys, self.anchors)
        total = self.context.shape[0]
        past_keys = w.k_norm(w.k_proj(self.context).reshape(total, w.kv_heads, -1))
        past_values = w.v_proj(self.context).reshape(total, w.kv_heads, -1)
        parts, block, start = [], 0, 0
        for group in self.groups:
            last, stop = block + len(group.anchors), start + group.features.shape[0]
            k = self.rope(past_keys[None, start:stop].transpose(0, 2, 1, 3), 0)[0]  # [Hkv, S, D]
            v = past_values[start:stop].transpose(1, 0, 2)
            own = slice(block, last)
            parts.append(self._attend(group, queries[own], keys[own], values[own], k, v))
            block, start = last, stop
        return w.o_proj(mx.concatenate(parts) if len(parts) > 1 else parts[0])

    def _attend(
        self,
        group: BlockGroup,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        past_keys: mx.array,
        past_values: mx.array,
    ) -> mx.array:
        """Queries [A, Hq, b, D], the blocks' K/V [A, Hkv, b, D], context K/V [Hkv, S, D]."""
        blocks, heads, rows, dim = queries.shape
        kv_heads, length = past_keys.shape[:2]
        share = heads // kv_heads
        q = queries.reshape(blocks, kv_heads, share * rows, dim).transpose(1, 0, 2, 3)
        flat = q.reshape(kv_heads, blocks * share * rows, dim)
        past = flat @ past_keys.swapaxes(-1, -2)
        past = past.reshape(kv_heads, blocks, share, rows, length)
        past = past + context_mask(group.anchors, length, rows, self.window)
        own = q @ keys.transpose(1, 0, 3, 2)  # [Hkv, A, g·b, b]
        own = own.reshape(kv_heads, blocks, share, rows, rows)
        if self.causal or (self.window is not None and self.window < rows):
            own = own + own_mask(rows, self.window, self.causal)
        # The masks are float32, and so are the scores; the pass goes on in its own type.
        weights = softmax(mx.concatenate([past, own], axis=-1)).astype(queries.dtype)
        seen = weights[..., :length].reshape(kv_heads, -1, length) @ past_values
        seen = seen.reshape(kv_heads, blocks, share * rows, dim)
        within = weights[..., length:].reshape(kv_heads, blocks, share * rows, rows)
        seen = seen + within @ values.transpose(1, 0, 2, 3)
        # [Hkv, A, g, b, D] -> [A, b, Hkv·g·D]
        seen = seen.reshape(kv_heads, blocks, share, rows, dim).transpose(1, 3, 0, 2, 4)
        return seen.reshape(blocks, rows, heads * dim)


_HIDDEN = np.float32(-1e30)


def context_mask(anchors: np.ndarray, length: int, rows: int, window: int | None) -> mx.array:
    """[A, 1, 1 or b, S], 0 where a block's row may see context position t, else very negative.

    Strictly before the anchor; with a window W only t > p - W for the row at position p.
    """
    at = np.arange(length)[None, None, None]
    first = anchors[:, None, None, None]
    seen = at < first
    if window is not None:
        seen = seen & (at > first + np.arange(rows)[None, None, :, None] - window)
    return mx.array(np.where(seen, np.float32(0), _HIDDEN))


def own_mask(rows: int, window: int | None, causal: bool) -> mx.array:
    """[b, b], 0 where a block's row sees another row of its block, else very negative."""
    behind = np.arange(rows)[:, None] - np.arange(rows)[None]
    seen = behind >= 0 if causal else np.full((rows, rows), True)
    if window is not None:
        seen = seen & (np.abs(behind) < window)
    return mx.array(np.where(seen, np.float32(0), _HIDDEN))
