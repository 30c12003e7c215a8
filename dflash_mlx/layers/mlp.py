"""The gated feed-forward layer: down(act(gate(x)) · up(x)), act being silu or gelu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels import swiglu


@partial(mx.compile, shapeless=True)
def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) · up with gelu's tanh form, elementwise, as one fused kernel."""
    return nn.gelu_approx(gate) * up


class MLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Callable[[mx.array, mx.array], mx.array] = swiglu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., H] -> [..., H]."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
