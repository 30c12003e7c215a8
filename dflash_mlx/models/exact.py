"""Exact mode: a target's operations give a row the same bits whatever rows are beside it.

Verifying 16 rows then equals decoding them one at a time, on a GPU too, and a sequence has the same
bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from dflash_mlx.errors import UsageError
from dflash_mlx.features import Features
from dflash_mlx.kernels import attention, kernels_active, matmul
from dflash_mlx.kernels.backend import choice
from dflash_mlx.layers.attention import Attention
from dflash_mlx.layers.gated_delta_net import GatedDeltaNet
from dflash_mlx.layers.gemma_attention import GemmaAttention
from dflash_mlx.machine import blas_in_use
from dflash_mlx.segment import Segment, rejoin

#: rows that one verification may have
MAX_ROWS = matmul.MAX_ROWS
# Norms, look-ups and elementwise work see one row at a time in MLX already.
_KNOWN = (nn.RMSNorm, nn.Conv1d, Attention, GemmaAttention, GatedDeltaNet)
_MULTIPLIED = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


class ExactLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return matmul.rows_matmul(x, self, exact=True)


class ExactQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return matmul.rows_matmul(x, self, exact=True)


class ExactEmbedding(nn.Embedding):
    """The table of a tied output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return matmul.rows_matmul(x, self, exact=True)


class ExactQuantizedEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return matmul.rows_matmul(x, self, exact=True)


class ExactConv(nn.Conv1d):
    """A convolution along rows with one filter a channel, its taps added up in order."""

    def __call__(self, x: mx.array) -> mx.array:
        """[1, taps - 1 + T, C] -> [1, T, C]."""
        taps = self.weight.shape[1]
        rows = x.shape[1] - taps + 1
        out = x[:, :rows] * self.weight[:, 0, 0]
        for tap in range(1, taps):
            out = out + x[:, tap : tap + rows] * self.weight[:, tap, 0]
        return out


_EXACT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ExactLinear,
    nn.QuantizedLinear: ExactQuantizedLinear,
    nn.Embedding: ExactEmbedding,
    nn.QuantizedEmbedding: ExactQuantizedEmbedding,
    nn.Conv1d: ExactConv,
}


def make_exact(target: nn.Module) -> None:
    """Switch a loaded target over, in place.

    UsageError, naming the first of them, where a part has no exact operation.
    """
    blas = blas_in_use()
    if not kernels_active() and blas.name != "bundled reference BLAS":
        raise UsageError(
            f"Exact mode needs the Metal kernels ({choice().reason}), and {blas.name} orders sums "
            "by the number of rows. Leave --exact out, or run on Apple Silicon with its kernels."
        )
    for name, module in target.named_modules():
        _require_exact(name, module)
    leaves = tree_map_with_path(
        lambda _, leaf: _exact(leaf), target.leaf_modules(), is_leaf=nn.Module.is_module
    )
    target.update_modules(leaves)
    for module in target.modules():
        if isinstance(module, Attention | GemmaAttention | GatedDeltaNet):
            module.exact = True
    target.forward = _in_packs(target.forward)
    target.logits = _in_groups(target.logits)


def packs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments in order, in runs of at most MAX_ROWS rows; a longer one is alone."""
    run: list[Segment] = []
    rows = 0
    for segment in segments:
        if run and rows + segment.rows > MAX_ROWS:
            yield run
            run, rows = [], 0
        run.append(segment)
        rows += segment.rows
    yield run


Forward = Callable[[Sequence[Segment], Sequence[int]], tuple[mx.array, Features | None]]


def _in_packs(forward: Forward) -> Forward:
    """`Target.forward` that gives kernels no more rows than they take, unless one segment has."""

    def run(
        segments: Sequence[Segment], taps: Sequence[int] = ()
    ) -> tuple[mx.array, Features | None]:
        made = [forward(pack, taps) for pack in packs(segments)]
        hidden = rejoin([rows for rows, _ in made])
        features = [part for _, part in made if part is not None]
        return hidden, Features.one_behind_another(features) if features else None

    return run


def _in_groups(logits: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """`Target.logits` for any number of rows, given to the kernels as they take them."""

    def run(rows: mx.array) -> mx.array:
        if not rows.size:
            return logits(rows)
        flat = rows.reshape(1, -1, rows.shape[-1])
        starts = range(0, flat.shape[1], MAX_ROWS)
        found = rejoin([logits(flat[:, at : at + MAX_ROWS]) for at in starts])
        return found.reshape(*rows.shape[:-1], -1)

    return run


def _require_exact(name: str, module: nn.Module) -> None:
    own = [key for key, value in module.items() if isinstance(value, mx.array)]
    if isinstance(module, _MULTIPLIED):
        fits = matmul.weights_of(module) is not None
    elif isinstance(module, Attention | GemmaAttention):
        fits = attention.fits(module.head_dim)
    else:
        fits = not own or own == ["layer_scalar"] or isinstance(module, _KNOWN)
    if not fits:
        raise UsageError(
            f"{name} ({type(module).__name__}) has no exact operation. Leave --exact out, or use "
            "a dense model in 16 or 32 bits or with affine weights of 4 or 8 bits."
        )


def _exact(leaf: nn.Module) -> nn.Module:
    """The same weights under the exact class."""
    kind = _EXACT.get(type(leaf))
    if kind is None:
        return leaf
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(leaf.__dict__)
    for key, value in leaf.items():
        made[key] = value
    return made
