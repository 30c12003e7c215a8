"""Mixture of experts: stacked expert weights, routers, and the sparse MLP made of them.

Parameter names and layouts are those of MLX checkpoints: one [E, out, in] weight a projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import swiglu
from dflash_mlx.layers.mlp import MLP

# From this many (row, expert) pairs on, pairs are sorted by expert: each weight is then read once.
SORTED_PAIRS = 64

Activation = Callable[[mx.array, mx.array], mx.array]  # (gate, up) -> their gated product


def softmax_top_k(logits: mx.array, k: int, *, normalise: bool) -> tuple[mx.array, mx.array]:
    """Softmax over all experts, then the k likeliest: indices and weights [..., k].

    `normalise` makes the k weights sum to 1 (`norm_topk_prob`). Softmax and sum are in float32.
    """
    probs = mx.softmax(logits.astype(mx.float32), axis=-1)
    indices = _top_k(probs, k)
    weights = mx.take_along_axis(probs, indices, axis=-1)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return indices, weights.astype(logits.dtype)


def top_k_softmax(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k highest logits, then softmax over these: indices and weights [..., k]."""
    indices = _top_k(logits, k)
    chosen = mx.take_along_axis(logits, indices, axis=-1)
    return indices, mx.softmax(chosen, axis=-1, precise=True)


def mixed(outputs: mx.array, weights: mx.array) -> mx.array:
    """The experts' outputs [..., k, H] added by weight [..., k] -> [..., H]."""
    return (outputs * weights[..., None]).sum(axis=-2)


class ExpertLinear(nn.Module):
    """One linear map an expert: weight [E, out, in], bias [E, out]."""

    def __init__(self, experts: int, into: int, out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, out, into))
        if bias:
            self.bias = mx.zeros((experts, out))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, in], one expert's index for each leading position -> [..., 1, out]."""
        weight = self.weight.swapaxes(-1, -2)
        y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return y + self.bias[indices][..., None, :] if "bias" in self else y

    def to_quantized(
        self, group_size: int = 64, bits: int = 4, mode: str = "affine"
    ) -> QuantizedExpertLinear:
        """What `nn.quantize` asks a layer for."""
        return QuantizedExpertLinear(self, group_size, bits, mode)


class QuantizedExpertLinear(nn.Module):
    """`ExpertLinear` with its weight in groups along `in`; `biases` in affine mode only."""

    def __init__(self, dense: ExpertLinear, group_size: int, bits: int, mode: str) -> None:
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(dense.weight, group_size, bits, mode=mode)
        if biases:
            self.biases = biases[0]
        if "bias" in dense:
            self.bias = dense.bias

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """As `ExpertLinear`."""
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        return y + self.bias[indices][..., None, :] if "bias" in self else y


class Experts(nn.Module):
    """down(activation(gate(x), up(x))) for the chosen experts of every row."""

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = swiglu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = ExpertLinear(experts, hidden_size, intermediate_size, bias=bias)
        self.up_proj = ExpertLinear(experts, hidden_size, intermediate_size, bias=bias)
        self.down_proj = ExpertLinear(experts, intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """x [..., H] and the experts of each row, indices [..., k] -> [..., k, H]."""
        if indices.size < SORTED_PAIRS:
            return self._run(x[..., None, None, :], indices, False).squeeze(-2)
        k, chosen = indices.shape[-1], indices.flatten()
        order = mx.argsort(chosen)
        pairs = x.reshape(-1, 1, x.shape[-1])[order // k]  # [pairs, 1, H] by expert
        y = self._run(pairs, chosen[order], True)
        return y[mx.argsort(order)].reshape(*indices.shape, -1)

    def _run(self, x: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        gate = self.gate_proj(x, indices, sorted_indices)
        up = self.up_proj(x, indices, sorted_indices)
        return self.down_proj(self.activation(gate, up), indices, sorted_indices)


class SparseMLP(nn.Module):
    """The Qwen families' sparse MLP: routed experts, and where it is given a shared one for all.

    The shared expert's output is scaled by sigmoid(shared_expert_gate(x)).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        experts: int,
        experts_per_token: int,
        intermediate_size: int,
        normalise: bool,
        shared_intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalise = normalise
        self.gate = nn.Linear(hidden_size, experts, bias=False)
        self.switch_mlp = Experts(experts, hidden_size, intermediate_size)
        if shared_intermediate_size is not None:
            self.shared_expert = MLP(hidden_size, shared_intermediate_size)
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., H] -> [..., H]."""
        k, normalise = self.experts_per_token, self.normalise
        indices, weights = softmax_top_k(self.gate(x), k, normalise=normalise)
        y = mixed(self.switch_mlp(x, indices), weights)
        if "shared_expert" in self:
            y = y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y


def _top_k(scores: mx.array, k: int) -> mx.array:
    """Indices [..., k] of the k highest scores, in no order."""
    count: Any = scores.shape[-1]
    if k >= count:
        return mx.broadcast_to(mx.arange(count), scores.shape)
    return mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]
