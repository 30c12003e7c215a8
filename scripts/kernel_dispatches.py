"""Counts the GPU dispatches of a cycle by the operations it calls: modelled, not measured.

Calls are watched, because MLX's graph as Linux exports it shows fused operations taken apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from dflash_mlx.draft.config import parse_config
from dflash_mlx.draft.dflash import DFlashDrafter, DFlashModel
from dflash_mlx.draft.dflash2 import DFlash2Drafter, DFlash2Model
from dflash_mlx.kernels import (
    attention,
    backend,
    convolution,
    fusion,
    gated_delta,
    matmul,
    projection,
)
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.models import build_target
from dflash_mlx.segment import Segment

Cost = Callable[..., int]
ROWS, CONTEXT = 16, 600
_zeros = mx.zeros


def _always(dispatches: int) -> Cost:
    return lambda *_, **__: dispatches


def _cast(array: mx.array, dtype: mx.Dtype, *_: Any) -> int:
    """A cast to the type that is there already is none."""
    return int(dtype != array.dtype)


def _index(_: mx.array, index: Any) -> int:
    """A slice is a view; a look-up is one."""
    parts = index if isinstance(index, tuple) else (index,)
    return int(any(isinstance(part, mx.array | list) for part in parts))


def _copy(array: mx.array, *_: Any) -> int:
    """Rows that lie one behind another already are not copied."""
    return int(not memoryview(array).c_contiguous)


def _each(arrays: Any, *_: Any, **__: Any) -> int:
    """A copy for each part."""
    return len(arrays)


# A product of a block's rows: M1 to M4 split it along its sum (steel split-K, qmm_splitk) and add
# the parts up. Attention of more than eight rows is one fused kernel, if the head size has one.
PRODUCT, ATTENTION = 2, 1


def _product(a: mx.array, b: mx.array) -> int:
    """With a vector it is not split."""
    return 1 if a.shape[-2] == 1 or b.shape[-1] == 1 else PRODUCT


# Dispatches of one call, read in MLX's Metal back-end. What is not here is an error.
_ONE = (
    "softmax logsumexp argmax exp log tanh isnan logical_not argpartition take square sigmoid clip "
    "take_along_axis where sum mean max min full zeros ones repeat arange"
)
_VIEWS = "reshape transpose swapaxes squeeze moveaxis flatten"
_HOST = "eval async_eval default_device issubdtype"
CORE: dict[str, Cost] = {
    **dict.fromkeys(_ONE.split(), _always(1)),
    **dict.fromkeys(
        (*_VIEWS.split(), *_HOST.split(), "split", "expand_dims", "broadcast_to", "unflatten"),
        _always(0),
    ),
    "matmul": _product,
    "addmm": lambda _, a, b: _product(a, b),
    **dict.fromkeys(("concatenate", "stack"), _each),
    "contiguous": _copy,
    "pad": _always(2),  # a fill, then the copy
}
FAST: dict[str, Cost] = {
    **dict.fromkeys(("rms_norm", "rope", "gated_delta_update"), _always(1)),
    "scaled_dot_product_attention": _always(ATTENTION),
}
_ARITHMETIC = ("add", "sub", "mul", "truediv")
ARRAY: dict[str, Cost] = {
    **{f"__{side}{name}__": _always(1) for name in _ARITHMETIC for side in ("", "r", "i")},
    **dict.fromkeys(("__neg__", "__setitem__", "sum", "mean", "max", "square"), _always(1)),
    **dict.fromkeys((*_VIEWS.split(), "item", "tolist", "split"), _always(0)),
    "__matmul__": _product,
    "__getitem__": _index,
    "astype": _cast,
}
# Of an array, what is no operation.
_PLAIN = {
    *dir(object),
    *(
        "__array__",
        "__array_namespace__",
        "__array_priority__",
        "__bool__",
        "__bytes__",
        "__complex__",
    ),
    *("__copy__", "__deepcopy__", "__dlpack__", "__dlpack_device__", "__float__", "__index__"),
    *("__int__", "__iter__", "__len__", "__setstate__", "__buffer__", "__release_buffer__"),
}
_COMPILED = type(mx.compile(lambda x: x))


class UncountedError(Exception):
    """An operation that the table does not know."""


class _Recorder:
    """Counts calls from outside; what an operation calls itself is part of it."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._depth = 0

    def watch(self, name: str, function: Callable[..., Any], cost: Cost | None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                if cost is None:
                    raise UncountedError(f"{name} has no dispatches in the table of {__name__}")
                self.counted[name] += cost(*args, **kwargs)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def patches(self) -> Iterator[Any]:
        for place, table in ((mx, CORE), (mx.fast, FAST), (mx.array, ARRAY)):
            known = {
                name: self.watch(name, getattr(place, name), table.get(name))
                for name in dir(place)
                if _is_operation(place, name)
            }
            if missing := set(table) - set(known):
                raise UncountedError(f"MLX has no {', '.join(sorted(missing))}")
            yield mock.patch.multiple(place, **known)
        for name, module in list(sys.modules.items()):
            if name.startswith(("dflash_mlx", "mlx.nn")):
                fused = {k: v for k, v in vars(module).items() if type(v) is _COMPILED}
                if fused:
                    watched = {k: self.watch(k, v, _always(1)) for k, v in fused.items()}
                    yield mock.patch.multiple(module, **watched)
        yield mock.patch.object(MLP, "__call__", self._mlp())

    def _mlp(self) -> Callable[[MLP, mx.array], mx.array]:
        """MLP's call, whose compiled activation is an attribute, and one fused kernel."""

        def call(layer: MLP, x: mx.array) -> mx.array:
            activate = self.watch("swiglu", layer.activation, _always(1))
            return layer.down_proj(activate(layer.gate_proj(x), layer.up_proj(x)))

        return call


def _is_operation(place: Any, name: str) -> bool:
    """Functions, and an array's methods and operators."""
    if place is mx.array:
        return name not in _PLAIN and callable(getattr(place, name))
    kept = name.startswith("_") or name in (
        "metal_kernel",
        "cuda_kernel",
        "precompiled_cuda_kernel",
    )
    return not kept and type(getattr(place, name)).__name__ == "nb_func"


@contextmanager
def recorder() -> Iterator[Counter[str]]:
    """Counts the dispatches of operations called inside, by name; UncountedError for others."""
    made = _Recorder()
    with ExitStack() as stack:
        for patch in list(made.patches()):
            stack.enter_context(patch)
        yield made.counted


@contextmanager
def kernels_counted(counted: Counter[str]) -> Iterator[None]:
    """Kernels are active inside and give zeros; every launch counts."""

    def fake(operation: str, *_: Any) -> Callable[..., list[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            counted[operation] += 1
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [_zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    with ExitStack() as stack:
        for module in (attention, convolution, fusion, gated_delta, matmul, projection):
            stack.enter_context(mock.patch.object(module, "kernel", fake))
        chosen = backend.Choice(True, "counted")
        stack.enter_context(mock.patch.object(backend, "choice", return_value=chosen))
        stack.enter_context(mock.patch.object(backend, "_on_gpu", return_value=True))
        trusted = lambda _, __, kernel, *___, **____: kernel()  # noqa: E731
        stack.enter_context(mock.patch.object(backend, "run", trusted))
        yield


def count_cycle(kernels: bool, layers: int, *, second: bool = False) -> dict[str, Counter[str]]:
    """Dispatches of a drafter's pass, of the injection and of the target's verification.

    second: of a DFlash 2 drafter.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    sizes |= {"vocab_size": 64, "rope_theta": 1e4, "max_position_embeddings": 4096}
    drafter = {"target_layer_ids": [0, 1], "mask_token_id": 1, "block_size": ROWS}
    if second:
        drafter |= {"conv_kernel_size": 2, "conv_group_size": 8}
        drafter |= {"selector_rank": 8, "selector_top_k": 4}
    target = build_target({"model_type": "qwen3", "tie_word_embeddings": False, **sizes})
    name = "DFlash2DraftModel" if second else "DFlashDraftModel"
    names = {"architectures": [name], "model_type": "qwen3", "num_target_layers": layers}
    config = parse_config({**names, **sizes, "dflash_config": drafter})
    if second:
        model: DFlashDrafter = DFlash2Drafter(DFlash2Model(config), config, target)
    else:
        model = DFlashDrafter(DFlashModel(config), config, target)
    found = {}
    for part in ("draft", "inject", "verify"):
        with recorder() as counted, ExitStack() as stack:
            if kernels:
                stack.enter_context(kernels_counted(counted))
            _cycle(model, target, part, counted)
        found[part] = Counter({name: count for name, count in counted.items() if count})
    return found


def per_layer(kernels: bool, *, second: bool = False) -> int:
    """Dispatches that one more draft layer costs a drafter's pass."""
    two, three = (count_cycle(kernels, layers, second=second)["draft"].total() for layers in (2, 3))
    return three - two


def _cycle(drafter: DFlashDrafter, target: Any, part: str, counted: Counter[str]) -> None:
    cache, context = target.make_cache(), drafter.make_cache()
    ids = mx.array([0] * CONTEXT, mx.int32)
    _, features = target.forward([Segment(ids, cache)], drafter.taps)
    drafter.observe(features, context)
    cache.commit(CONTEXT)
    _, kept = target.forward([Segment(ids[:ROWS], cache)], drafter.taps)
    counted.clear()
    if part == "draft":
        drafter.propose(mx.array([0], mx.int32), ROWS - 1, None, context)
    elif part == "inject":
        drafter.observe(kept, context)
    else:
        target.forward([Segment(ids[:ROWS], cache)], drafter.taps)
