"""Some rows of a projection as a projection of its own; quantized ones stay quantized."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn

#: arrays that have a row for each output
BY_ROW = ("weight", "scales", "biases", "bias")


def take_rows(module: nn.Module, ids: mx.array) -> nn.Module:
    """A linear layer or embedding with the rows `ids` [R] only, in this order; lazy copies."""
    taken = copy.copy(module)
    for name in BY_ROW:
        if name in module:
            taken[name] = mx.take(module[name], ids, axis=0)
    return taken
