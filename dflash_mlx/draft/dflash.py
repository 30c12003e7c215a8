"""The DFlash v1 drafter: a small decoder that fills a block of masks in one pass.

It reads the target's features as context K/V and borrows the target's embedding and output head,
unless its checkpoint brings its own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.cache.context import ContextCache, LayerContext, SharedContext
from dflash_mlx.draft.base import DraftSampling, HeadRows, Projection, Proposal, ReducedHead
from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.head import FrequentRows
from dflash_mlx.features import Features
from dflash_mlx.kernels import (
    HeadProjection,
    Sight,
    block_attention,
    block_projection,
    context_projection,
    fuse_taps,
    gated_matmul,
    kernels_active,
    rows_matmul,
)
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.layers.rope import Rope
from dflash_mlx.layers.rows import BY_ROW, take_rows

if TYPE_CHECKING:
    from dflash_mlx.models.base import Target


class DraftAttention(nn.Module):
    """Attention of block rows to the context and to the block."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.sight = Sight(config.causal[layer], config.windows[layer])
        self.scale = dim**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        rope: Rope,
        context: LayerContext | SharedContext,
        *,
        norm: nn.RMSNorm | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """[1, L, H] at positions context.length .. -> [1, L, H], `residual` added.

        With a `norm` of x. Up to 16 rows cost three or four launches where kernels are active.
        """
        at = context.length
        queries, keys, values = block_projection(x, norm, self, rope, at)
        out = block_attention(
            queries,
            context.around(keys, values),
            scale=self.scale,
            sight=self.sight,
            position=at,
        )
        return rows_matmul(out, self.o_proj, residual=residual)


class DraftLayer(nn.Module):
    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rope: Rope, context: LayerContext | SharedContext) -> mx.array:
        x = self.self_attn(x, rope, context, norm=self.input_layernorm, residual=x)
        return self.feed_forward(x, norm=self.post_attention_layernorm, residual=x)

    def feed_forward(
        self, x: mx.array, *, norm: nn.RMSNorm | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """The MLP over norm(x) (x itself without a norm), `residual` added: [1, L, H] both."""
        inner = gated_matmul(x, norm, self.mlp.gate_proj, self.mlp.up_proj)
        return rows_matmul(inner, self.mlp.down_proj, residual=residual)


class DFlashModel(nn.Module):
    """A drafter's own weights, named as in its checkpoint.

    `own` names the tables that the checkpoint holds itself: embed_tokens, lm_head.
    """

    layer: ClassVar[type[DraftLayer]] = DraftLayer

    def __init__(self, config: DFlashConfig, own: Collection[str] = ()) -> None:
        super().__init__()
        hidden, vocabulary = config.hidden_size, config.vocab_size
        if own:
            assert vocabulary is not None
            if "embed_tokens" in own:
                self.embed_tokens = nn.Embedding(vocabulary, hidden)
            if "lm_head" in own:
                words = config.draft_vocab_size or vocabulary
                self.lm_head = nn.Linear(hidden, words, bias=False)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def fuse(self, features: mx.array) -> mx.array:
        """Features [1, S, T·H] -> the context hidden states [1, S, H] every layer projects."""
        return self.hidden_norm(self.fc(features))


class ContextProjections:
    """k_proj of all layers as one matrix, v_proj as another; layers of one window lie together.

    The layers' own weights become views of it; a change of weights needs a new one.
    """

    def __init__(self, model: DFlashModel, windows: Sequence[int | None]) -> None:
        #: layers of each window
        self.layers = [
            tuple(i for i, window in enumerate(windows) if window == kind)
            for kind in dict.fromkeys(windows)
        ]
        attentions = [model.layers[i].self_attn for layers in self.layers for i in layers]
        norms = mx.stack([a.k_norm.weight for a in attentions])
        mx.eval(norms)
        first = attentions[0]
        self.whole = HeadProjection(
            join_rows([a.k_proj for a in attentions]),
            join_rows([a.v_proj for a in attentions]),
            *(norms, first.k_norm.eps, first.kv_heads),
        )
        ends = list(accumulate(map(len, self.layers)))
        #: where they lie in the whole, and the projections of theirs alone
        self.places = [
            slice(end - len(layers), end) for layers, end in zip(self.layers, ends, strict=True)
        ]
        self.heads = [self._heads_at(place) for place in self.places]

    def _heads_at(self, layers: slice) -> HeadProjection:
        whole = self.whole
        each = whole.kv_heads * whole.head_norms.shape[1]
        rows = slice(layers.start * each, layers.stop * each)
        keys, values = (rows_of(part, rows) for part in (whole.keys, whole.values))
        return replace(whole, keys=keys, values=values, head_norms=whole.head_norms[layers])


class DFlashDrafter:
    """A DFlash v1 drafter bound to `target`; see draft/base.py for the contract.

    `target_ids` [draft vocabulary] int32: the target's id of each token that a drafter with a
    reduced vocabulary knows. `order` [V]: token ids, the most frequent first, of a drafter with a
    whole one, whose head can then be reduced.
    """

    def __init__(
        self,
        model: DFlashModel,
        config: DFlashConfig,
        target: Target,
        target_ids: mx.array | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.block_size = config.block_size
        self.taps = config.target_layer_ids
        self.head_rows: HeadRows | None = None
        if target_ids is None and order is not None:
            self.head_rows = FrequentRows(self._head_of, order)
        self._target = target
        self._target_ids = target_ids
        self._dtype = model.hidden_norm.weight.dtype
        self._masks = mx.array(np.full(config.block_size - 1, config.mask_token_id, np.int32))
        self._projections = ContextProjections(model, config.windows)
        # Rows of a bidirectional block all see one another: fewer masks would change the drafts.
        self._whole_block = not all(config.causal)

    def make_cache(self) -> ContextCache:
        return ContextCache(self.config.windows, shared=kernels_active())

    def observe(self, features: mx.array | Features, cache: ContextCache) -> None:
        """Append features [1, S, T·H] of the next S committed positions to every layer's context.

        Rows that no later query can see are not computed.
        """
        features = Features.of(features)
        _, rows, width = features.shape
        if width != self.config.feature_size:
            raise ValueError(f"features of width {width} where {self.config.feature_size} fit")
        end, made, norm = cache.length + rows, self._projections, self.model.hidden_norm
        kept = [cache[layers[0]].rows_kept(rows) for layers in made.layers]
        longest = max(kept)
        fused = fuse_taps(features.rows(rows - longest, rows), self.model.fc, self._dtype)
        if longest == min(kept):
            both = context_projection(fused, norm, made.whole, self.config.rope, end - longest)
            for layers, place in zip(made.layers, made.places, strict=True):
                cache.append(layers, both[:, place], rows)
            return
        for layers, heads, count in zip(made.layers, made.heads, kept, strict=True):
            own = (norm, heads, self.config.rope, end - count)
            cache.append(layers, context_projection(fused.last(count), *own), rows)

    def propose(
        self,
        anchor: mx.array,
        n: int,
        sampling: DraftSampling | None,
        cache: ContextCache,
        head: ReducedHead | None = None,
    ) -> Proposal:
        """Drafts for the `n` positions behind `anchor` ([1], position cache.length).

        Row i of the block predicts the token at its own position; row 0, the anchor, predicts
        nothing. `healthy` is False when a draft logit was NaN.
        """
        logits = self._logits(self._rows(anchor, n, cache), head)
        healthy = mx.logical_not(mx.isnan(logits.sum()))  # one pass; a NaN survives every sum
        ids = None if head is None else head.ids
        probs = None
        if sampling is None:
            tokens = mx.argmax(logits, axis=-1)
        else:
            probs = sampling.probabilities(logits, ids)
            tokens = mx.random.categorical(mx.log(probs), key=sampling.key)
        if ids is None:
            return Proposal(tokens.astype(mx.int32), probs, healthy)
        known = None if probs is None else mx.broadcast_to(ids, probs.shape)
        return Proposal(mx.take(ids, tokens), probs, healthy, known)

    def draft_logits(self, anchor: mx.array, n: int, cache: ContextCache) -> mx.array:
        """float32 logits [n, V] of the positions behind the anchor, multiplier and soft-cap on.

        Tokens that a reduced vocabulary lacks have -inf, so that the target's own filters and
        penalties act on them unchanged.
        """
        return self._logits(self._rows(anchor, n, cache))

    def _rows(self, anchor: mx.array, n: int, cache: ContextCache) -> mx.array:
        """Hidden states [1, n, H] after the final norm, of the n positions behind the anchor."""
        if not 1 <= n < self.block_size:
            raise ValueError(f"{n} drafts asked of a block of {self.block_size}")
        masks = self._masks if self._whole_block else self._masks[:n]
        ids = mx.concatenate([anchor.astype(mx.int32), masks])[None]
        own = "embed_tokens" in self.model
        x = (self.model.embed_tokens(ids) if own else self._target.embed(ids)).astype(self._dtype)
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        for i, layer in enumerate(self.model.layers):
            x = layer(x, self.config.rope, cache[i])
        return self.model.norm(x[:, 1 : n + 1])

    def _head_of(self, ids: mx.array) -> Projection:
        """The head for the tokens `ids` only."""
        if "lm_head" in self.model:
            return take_rows(self.model.lm_head, ids)
        return self._target.head_of(ids)

    def _logits(self, rows: mx.array, head: ReducedHead | None = None) -> mx.array:
        own = "lm_head" in self.model
        project = head or (self.model.lm_head if own else self._target.head)
        logits = project(rows if own else rows.astype(self._target.dtype))
        logits = logits.squeeze(0).astype(mx.float32)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = mx.tanh(logits / cap) * cap
        if self._target_ids is None:
            return logits
        spread = mx.full((logits.shape[0], self._target.vocab_size), -mx.inf)
        spread[:, self._target_ids] = logits
        return spread


def rows_of(linear: nn.Module, rows: slice) -> nn.Module:
    """A projection to some of the output rows of `linear`; its weights are views."""
    part = copy.copy(linear)
    for name in BY_ROW:
        if name in linear:
            part[name] = linear[name][rows]
            mx.eval(part[name])
    return part


def join_rows(linears: Sequence[nn.Module]) -> nn.Module:
    """One projection with the output rows of all `linears` in order; they become views of it."""
    joined = copy.copy(linears[0])
    for name in BY_ROW:
        if name not in joined:
            continue
        joined[name] = mx.concatenate([linear[name] for linear in linears])
        mx.eval(joined[name])
        start = 0
        for linear in linears:
            stop = start + linear[name].shape[0]
            linear[name] = joined[name][start:stop]
            mx.eval(linear[name])
            start = stop
    return joined
