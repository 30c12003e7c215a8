"""A target whose weights come from a checkpoint while it is called, a few rows of one at a time.

What a forward holds at once is then one stored matrix and some rows of it in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map, tree_unflatten

from dflash_mlx.convert.source import Source, Weight
from dflash_mlx.layers.moe import ExpertLinear


class StreamedLinear(nn.Module):
    """`nn.Linear` in float32; its weight is read when it is called, which can be once."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self._weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]."""
        y = multiplied(x, self._weight)
        return y + self.bias if "bias" in self else y


class StreamedExperts(nn.Module):
    """`ExpertLinear` in float32; its weight is read when it is called, which can be once."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self._weight = weight

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, in], one expert's index for each leading position -> [..., 1, out]."""
        _, out, into = self._weight.shape
        leading = np.broadcast_shapes(x.shape[:-2], indices.shape)
        pairs = mx.broadcast_to(x, (*leading, 1, into)).reshape(-1, into)
        chosen = np.array(mx.broadcast_to(indices, leading)).reshape(-1)
        rows, parts, order = self._weight.open(), [], []
        for expert in np.unique(chosen):
            at = np.flatnonzero(chosen == expert)
            weight = rows(int(expert) * out, int(expert + 1) * out).astype(mx.float32)
            parts.append(pairs[mx.array(at)] @ weight.T)
            order.append(at)
            mx.eval(parts[-1])
        back = mx.array(np.argsort(np.concatenate(order)))
        y = mx.concatenate(parts)[back].reshape(*leading, 1, out)
        return y + self.bias[indices][..., None, :] if "bias" in self else y


def multiplied(x: mx.array, weight: Weight) -> mx.array:
    """x [..., in] times the transpose of a matrix [out, in], in float32."""
    parts = []
    for rows in weight.chunks():
        parts.append(x @ rows.astype(mx.float32).T)
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=-1)


class StreamedLayer:
    """A decoder layer that has its vectors only while it is called, and its matrices never.

    seen: told the hidden states that it is called with.
    """

    def __init__(
        self, layer: Any, source: Source, prefix: str, seen: Callable[[mx.array], None]
    ) -> None:
        self._layer, self._source, self._seen = layer, source, seen
        names = {n.removeprefix(prefix): n for n in source.weights if n.startswith(prefix)}
        streamed = []
        for path, module in layer.named_modules():
            kind = _STREAMED.get(type(module))
            if kind is not None:
                made = kind(source.weights[names.pop(f"{path}.weight")])
                if "bias" in module:
                    made.bias = module.bias
                streamed.append((path, made))
        layer.update_modules(tree_unflatten(streamed))
        self._vectors = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, h: mx.array, segments: Any, caches: Any, *more: Any, **named: Any) -> Any:
        self._seen(h)
        fill(self._layer, self._source, self._vectors)
        out = self._layer(h, segments, caches, *more, **named)
        # Also what the caches took, or it would keep the weights it is computed from.
        mx.eval(out, [a for cache in caches for a in cache.arrays()])
        self._layer.update(tree_map(lambda _: mx.zeros((0,)), self._layer.parameters()))
        mx.clear_cache()
        return out


_STREAMED: dict[type[nn.Module], Callable[[Weight], nn.Module]] = {
    nn.Linear: StreamedLinear,
    ExpertLinear: StreamedExperts,
}


def fill(module: nn.Module, source: Source, names: Mapping[str, str]) -> None:
    """Read weights one by one in float32; `names`: the module's parameter -> the source's."""
    for parameter, name in names.items():
        array = source.weights[name].read().astype(mx.float32)
        mx.eval(array)
        module.update(tree_unflatten([(parameter, array)]))
