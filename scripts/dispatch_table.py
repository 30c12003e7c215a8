"""GPU dispatches of one call of each of MLX's operations, as read in its Metal back-end.

A cost is a function of the call's arguments. It may look at how these lie in memory: the CPU
back-end makes views and copies by the rules of the Metal one, except for attention's output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import mlx.core as mx
import numpy as np

Cost = Callable[..., int]

# A product of a block's rows: M1 to M4 split it along its sum (steel split-K, qmm_splitk) and add
# the parts up, unless it has this many outputs, whose tiles fill a GPU.
PRODUCT, WIDE = 2, 16384
# Head sizes with one kernel for more than eight rows. Others go through products and a softmax.
FUSED_HEADS = (64, 72, 80, 96, 128)
# (key heads, value heads) with a kernel for the gated delta rule, of heads of 128.
DELTA_HEADS = ((16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32))
SORTED_AT_ONCE = 2048  # elements of a row that one threadgroup sorts


class UncountedError(Exception):
    """An operation, or a form of it, that the table does not know."""


def fused_attention(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`attend` with an output as the fused kernel writes it: a row's heads side by side."""

    def call(queries: mx.array, *others: Any, **how: Any) -> mx.array:
        out = attend(queries, *others, **how)
        if queries.shape[3] in FUSED_HEADS:
            out = mx.contiguous(out.swapaxes(1, 2)).swapaxes(1, 2)
        return out

    return call


def _always(dispatches: int) -> Cost:
    return lambda *_, **__: dispatches


def _memory(array: mx.array) -> np.ndarray:
    """The array's elements where they are."""
    return np.array(array, copy=False)


def _strided(array: mx.array) -> bool:
    """Whether an operation that wants rows one behind another copies them first."""
    return not _memory(array).flags.c_contiguous


def _casts(*arrays: Any) -> int:
    """Casts to the common type of an operation's arrays."""
    kinds = [x.dtype for x in arrays if isinstance(x, mx.array)]
    common = kinds[0]
    for kind in kinds[1:]:
        common = mx.result_type(mx.zeros((), common), mx.zeros((), kind))
    return sum(kind != common for kind in kinds)


def _elementwise(*arrays: Any) -> int:
    return 1 + _casts(*arrays)


def _cast(array: mx.array, dtype: mx.Dtype, *_: Any) -> int:
    """A cast to the type that is there already is none."""
    return int(dtype != array.dtype)


def _index(_: mx.array, index: Any) -> int:
    """Slices are views, also of single places; a look-up is one, and so is a bare integer's."""
    if isinstance(index, int):
        return 1
    parts = index if isinstance(index, tuple) else (index,)
    return int(any(isinstance(part, mx.array | list) for part in parts))


def _contiguous(array: mx.array, *_: Any) -> int:
    """Rows one behind another are copied, too, where they keep a much larger buffer alive."""
    return int(_memory(mx.contiguous(array)).ctypes.data != _memory(array).ctypes.data)


def _reshape(array: mx.array, *shape: Any, **_: Any) -> int:
    """A view, unless dimensions join that are not neighbours in memory."""
    return int(_memory(array.reshape(*shape)).ctypes.data != _memory(array).ctypes.data)


def _each(arrays: Any, *_: Any, **__: Any) -> int:
    """A copy for each part."""
    return len(arrays) + _casts(*arrays)


def _product(a: mx.array, b: mx.array) -> int:
    """With a vector it is not split."""
    whole = a.shape[-2] == 1 or b.shape[-1] == 1 or b.shape[-1] >= WIDE
    return 1 if whole else PRODUCT


def _sort(array: mx.array, *_: Any, axis: int = -1) -> int:
    """A long row in blocks, which are merged by twos: a partition and a merge, and a copy."""
    blocks = ceil(array.shape[axis] / SORTED_AT_ONCE)
    return 1 if blocks == 1 else 2 + 2 * ceil(log2(blocks))


def _rms_norm(x: mx.array, weight: mx.array | None, _: float) -> int:
    return 1 + _strided(x) + (0 if weight is None else _casts(x, weight))


def _rope(x: mx.array, dims: int, **_: Any) -> int:
    """A rope over a part of the heads turns a copy; rows of heads side by side need none."""
    heads_side_by_side = not _strided(x.swapaxes(1, 2))
    return 1 + (dims < x.shape[-1] or (_strided(x) and not heads_side_by_side))


def _attention(
    queries: mx.array, *_: Any, mask: Any = None, sinks: mx.array | None = None, scale: float
) -> int:
    if queries.shape[2] <= 8:
        raise UncountedError("attention of eight rows or fewer has other kernels")
    if queries.shape[3] in FUSED_HEADS:
        return 1
    if sinks is not None:
        raise UncountedError("attention with sinks in parts is not in the table")
    # Two rows of positions, their comparison and the choice; scale, products, softmax.
    masked = 0 if mask is None else 4 if isinstance(mask, str) else 1
    return masked + 4


def _gated_delta(*rows: mx.array, initial_state: mx.array | None = None) -> int:
    keys, values = rows[1].shape, rows[2].shape
    if (keys[2], values[2]) not in DELTA_HEADS or (keys[3], values[3]) != (128, 128):
        raise UncountedError("the gated delta rule of these heads is a loop over rows")
    return 1 + sum(map(_strided, rows)) + (initial_state is None)


def _conv1d(x: mx.array, weight: mx.array, *_: Any) -> int:
    groups = _[-1]
    if groups != x.shape[2] or weight.shape[2] != 1:
        raise UncountedError("a convolution that mixes channels is not in the table")
    return 1 + _strided(x) + _strided(weight)


# What is not here is an error.
_ONE = (
    "softmax logsumexp argmax exp log tanh logical_not take square sigmoid all cumprod "
    "take_along_axis where sum mean max min full zeros ones repeat arange isnan"
)
_VIEWS = "transpose swapaxes squeeze moveaxis split expand_dims broadcast_to unflatten"
_HOST = "eval async_eval default_device issubdtype clear_cache get_peak_memory reset_peak_memory"
CORE: dict[str, Cost] = {
    **dict.fromkeys(_ONE.split(), _always(1)),
    **dict.fromkeys((*_VIEWS.split(), *_HOST.split()), _always(0)),
    "reshape": _reshape,
    "matmul": _product,
    "addmm": lambda _, a, b: _product(a, b),
    **dict.fromkeys(("concatenate", "stack"), _each),
    "contiguous": _contiguous,
    "argpartition": _sort,
    "pad": _always(2),  # a fill, then the copy
    "clip": _always(2),  # from below, from above
    "isfinite": _always(6),  # neither infinity nor NaN, each compared, joined by twos, and not
    "conv1d": _conv1d,
}
FAST: dict[str, Cost] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "gated_delta_update": _gated_delta,
    "scaled_dot_product_attention": _attention,
}
_ARITHMETIC = ("add", "sub", "mul", "truediv")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")
ARRAY: dict[str, Cost] = {
    **{f"__{side}{name}__": _elementwise for name in _ARITHMETIC for side in ("", "r", "i")},
    **{f"__{name}__": _elementwise for name in _COMPARED},
    **dict.fromkeys(("__neg__", "__invert__", "sum", "mean", "max", "square"), _always(1)),
    "__setitem__": _always(1),
    **dict.fromkeys(("transpose", "swapaxes", "squeeze", "moveaxis", "split"), _always(0)),
    **dict.fromkeys(("item", "tolist"), _always(0)),
    "reshape": _reshape,
    "__matmul__": _product,
    "__getitem__": _index,
    "astype": _cast,
}
