"""The DFlash 2 drafter: v1's decoder with convolutions over the block's rows, and a selector.

The selector walks the block from the anchor on and rescores each row's best candidates by the
token chosen before it, so that the drafts fit one another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache.context import ContextCache, LayerContext, SharedContext
from dflash_mlx.draft.base import DraftSampling, Proposal, ReducedHead
from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.dflash import DFlashDrafter, DFlashModel, DraftLayer
from dflash_mlx.kernels import Coefficients, block_convolution, kernels_active, rows_matmul
from dflash_mlx.layers.rope import Rope

# Modules that stay as they are when a drafter is quantized: a few percent of its weights, whose
# outputs steer all others.
UNQUANTIZED = ("attention_conv", "mlp_conv", "candidate_selector")


class GroupedDynamicConv(nn.Module):
    """A causal convolution over the block's rows on both sides of a sublayer.

    Every row has its own coefficients: fixed ones a channel plus dynamic ones a group of channels,
    computed from the sublayer's normed input, for the output side too.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        assert config.parts is not None
        hidden, self.taps = config.hidden_size, config.parts.conv_kernel_size
        self.groups = hidden // config.parts.conv_group_size
        self.base_kernel = mx.zeros((2, self.taps, hidden))  # side (input, output), tap, channel
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * self.groups, bias=False)

    def coefficients(
        self, x: mx.array, norm: nn.RMSNorm | None = None
    ) -> tuple[Coefficients, Coefficients]:
        """norm(x) [1, L, H], x itself without a norm -> those of the input and the output side."""
        dynamic = rows_matmul(x, self.kernel_projection, norm=norm)
        dynamic = dynamic.reshape(x.shape[1], 2, self.taps, self.groups)
        before, behind = (Coefficients(self.base_kernel[i, ...], dynamic[:, i]) for i in (0, 1))
        return before, behind


class DFlash2Layer(DraftLayer):
    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_conv = GroupedDynamicConv(config)
        self.mlp_conv = GroupedDynamicConv(config)

    def __call__(self, x: mx.array, rope: Rope, context: LayerContext | SharedContext) -> mx.array:
        given, norm = _normed(x, self.input_layernorm)
        before, behind = self.attention_conv.coefficients(given, norm)
        attended = self.self_attn(block_convolution(given, before, norm=norm), rope, context)
        x = block_convolution(attended, behind, residual=x)
        given, norm = _normed(x, self.post_attention_layernorm)
        before, behind = self.mlp_conv.coefficients(given, norm)
        mixed = self.feed_forward(block_convolution(given, before, norm=norm))
        return block_convolution(mixed, behind, residual=x)


def _normed(x: mx.array, norm: nn.RMSNorm) -> tuple[mx.array, nn.RMSNorm | None]:
    """Rows and a norm for kernels to fold in; without kernels the normed rows, made once."""
    return (x, norm) if kernels_active() else (norm(x), None)


class Walk(NamedTuple):
    """What a selector chose."""

    tokens: mx.array  # [n] int32
    candidates: mx.array  # [n, K] ids, in no order
    scores: mx.array  # [n, K] float32
    healthy: mx.array  # scalar bool, False when a logit or a score was NaN


class CandidateSelector(nn.Module):
    """Scores a token by its logit and by how it follows the token before it.

    The second part is a sum over `rank` of predecessor row, projected hidden state and successor
    row. The codebooks' tensors have no `.weight` at their end, in checkpoints as here.
    """

    def __init__(self, hidden: int, vocab: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = min(top_k, vocab)
        self.predecessor_codebook = mx.zeros((vocab, rank))
        self.successor_codebook = mx.zeros((vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def propose(
        self,
        rows: mx.array,
        logits: mx.array,
        anchor: mx.array,
        sampling: DraftSampling | None,
        ids: mx.array | None = None,
    ) -> Proposal:
        """Hidden states [1, n, H] and logits [n, V] of a block behind `anchor` [1] -> its drafts.

        ids [R]: the tokens whose logits [n, R] these are; None is the whole vocabulary.
        When sampling, a row's draft is drawn from softmax(score / temperature) over its candidates;
        the other filters of the target do not act here.
        """
        if sampling is None:
            walked = self.walk(rows, logits, anchor, lambda scores, _: mx.argmax(scores), ids)
            return Proposal(walked.tokens, None, walked.healthy)
        keys = mx.random.split(sampling.key, logits.shape[0])
        heat = sampling.temperature
        walked = self.walk(
            rows, logits, anchor, lambda s, i: mx.random.categorical(s / heat, key=keys[i]), ids
        )
        probs = mx.softmax(walked.scores / heat, axis=-1)
        return Proposal(walked.tokens, probs, walked.healthy, walked.candidates)

    def walk(
        self,
        rows: mx.array,
        logits: mx.array,
        anchor: mx.array,
        choose: Callable[[mx.array, int], mx.array],
        ids: mx.array | None = None,
    ) -> Walk:
        """Choose every row's token in order; `choose` takes scores [K] and the row, gives an index.

        Lazy to the end: n small steps in one graph.
        """
        candidates = mx.argpartition(-logits, self.top_k - 1, axis=-1)[:, : self.top_k]
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        if ids is not None:
            candidates = mx.take(ids, candidates)
        hidden = self.hidden_projection(rows).squeeze(0).astype(mx.float32)  # [n, r]
        follows = self.successor_codebook[candidates].astype(mx.float32) * hidden[:, None]
        token, tokens, scores = anchor, [], []
        for i in range(logits.shape[0]):
            before = self.predecessor_codebook[token].astype(mx.float32)  # [1, r]
            scores.append(unary[i] + (follows[i] @ before.T)[:, 0])
            token = mx.take(candidates[i], choose(scores[i], i))[None]
            tokens.append(token)
        chosen = mx.concatenate(tokens).astype(mx.int32)
        scored = mx.stack(scores)
        healthy = mx.logical_not(mx.isnan(logits.sum() + scored.sum()))
        return Walk(chosen, candidates, scored, healthy)


class DFlash2Model(DFlashModel):
    """A drafter's own weights, named as in its checkpoint."""

    layer = DFlash2Layer

    def __init__(self, config: DFlashConfig, own: Collection[str] = ()) -> None:
        super().__init__(config, own)
        assert config.parts is not None
        assert config.vocab_size is not None
        self.candidate_selector = CandidateSelector(
            config.hidden_size,
            config.vocab_size,
            config.parts.selector_rank,
            config.parts.selector_top_k,
        )


class DFlash2Drafter(DFlashDrafter):
    """A DFlash 2 drafter bound to `target`; see draft/base.py for the contract."""

    model: DFlash2Model

    def propose(
        self,
        anchor: mx.array,
        n: int,
        sampling: DraftSampling | None,
        cache: ContextCache,
        head: ReducedHead | None = None,
    ) -> Proposal:
        """Drafts for the `n` positions behind `anchor` ([1], position cache.length)."""
        rows = self._rows(anchor, n, cache)
        ids = None if head is None else head.ids
        selector = self.model.candidate_selector
        return selector.propose(rows, self._logits(rows, head), anchor, sampling, ids)
