"""Counts the GPU dispatches of a cycle by the operations it calls: modelled, not measured.

Calls are watched, because MLX's graph as Linux exports it shows fused operations taken apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import mlx.core as mx
from dispatch_table import ARRAY, CORE, FAST, Cost, UncountedError, fused_attention
from mlx.utils import tree_map

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.step import Chooser, launch
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

ROWS, CONTEXT, KEPT = 16, 20, 2  # of a block, before it, and of the block accepted
SPLIT_KEYS = 16  # so that this short context is split as a long one is
VOCABULARY = 32768
PARTS = ("draft", "verify", "accept", "commit", "inject")
TABLE = "scripts/dispatch_table.py"
_zeros = mx.zeros


# Of an array, what is no operation.
_PLAIN = {
    *set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"},
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


def _one(*_: Any, **__: Any) -> int:
    """The cost of a fused kernel of MLX's own."""
    return 1


def _launched(
    _: str, __: Hashable, kernel: Callable[[], Sequence[mx.array]], *___: Any, **____: Any
) -> Sequence[mx.array]:
    """In place of backend.run, which would compare the kernel with its twin."""
    return kernel()


class _Recorder:
    """Counts calls from outside; what an operation calls itself is part of it."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._depth = 0

    def watch(self, name: str, function: Callable[..., Any], cost: Cost | None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                if self._depth == 1:
                    if cost is None:
                        raise UncountedError(f"{name} has no dispatches in {TABLE}")
                    self.counted[name] += cost(*args, **kwargs)
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def patches(self) -> Iterator[Any]:
        for place, table in ((mx, CORE), (mx.fast, FAST), (mx.array, ARRAY)):
            known = {
                name: self.watch(name, _as_on_gpu(name, getattr(place, name)), table.get(name))
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
                    watched = {k: self.watch(k, v, _one) for k, v in fused.items()}
                    yield mock.patch.multiple(module, **watched)
        yield mock.patch.object(MLP, "__call__", self._mlp())

    def _mlp(self) -> Callable[[MLP, mx.array], mx.array]:
        """MLP's call, whose compiled activation is an attribute, and one fused kernel."""

        def call(layer: MLP, x: mx.array) -> mx.array:
            activate = self.watch("swiglu", layer.activation, _one)
            return layer.down_proj(activate(layer.gate_proj(x), layer.up_proj(x)))

        return call


def _as_on_gpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What lies in memory as on a GPU; a count waits for no result."""
    if name in ("eval", "async_eval"):
        return lambda *_: None
    return fused_attention(function) if name == "scaled_dot_product_attention" else function


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
        stack.enter_context(mock.patch.object(attention, "SPLIT_KEYS", SPLIT_KEYS))
        stack.enter_context(mock.patch.object(backend, "run", _launched))
        yield


# A small pair's sizes. Hidden states are wide enough that a slice of them is worth a copy to MLX;
# heads are of the sizes that have kernels, as those of the real models.
_SIZES: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
_TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3"},
    # Every fourth layer is attention.
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
        | {"partial_rotary_factor": 0.25},
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}


def _pair(family: str, layers: int, second: bool, mixed: bool = False) -> tuple[Any, DFlashDrafter]:
    """A target of `family` and its drafter in 16 bits, `layers` layers each; zeros for weights."""
    sizes = {**_SIZES, "num_hidden_layers": layers}
    target = build_target({"tie_word_embeddings": False, **sizes, **_TARGETS[family]})
    given: dict[str, Any] = {
        "target_layer_ids": [0, 1],
        "mask_token_id": 1,
        "block_size": ROWS,
    }
    if second:
        given |= {"conv_kernel_size": 2, "conv_group_size": 8}
        given |= {"selector_rank": 8, "selector_top_k": 4}
    name = "DFlash2DraftModel" if second else "DFlashDraftModel"
    names: dict[str, Any] = {"architectures": [name], "model_type": "qwen3"}
    names |= {"num_target_layers": layers}
    if mixed:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        names |= {"layer_types": kinds, "sliding_window": 128, "use_sliding_window": True}
    config = parse_config({**names, **sizes, "dflash_config": given})
    model = DFlash2Model(config) if second else DFlashModel(config)
    for part in (target, model):
        part.update(tree_map(lambda x: mx.zeros(x.shape, mx.float16), part.parameters()))
    if second:
        return target, DFlash2Drafter(model, config, target)
    return target, DFlashDrafter(model, config, target)


def count_cycle(
    kernels: bool, layers: int, *, second: bool = False, family: str = "qwen3", mixed: bool = False
) -> dict[str, Counter[str]]:
    """Dispatches of a cycle of greedy decoding by its parts.

    draft: the drafter's pass. verify: the target's pass and head. accept: the verdict and what is
    packed for the host. commit: the target's caches keep the accepted rows. inject: the drafter
    gets their features. second: of a DFlash 2 drafter. family: of the target. mixed: every other
    draft layer has a window.
    """
    return _count(kernels, layers, second, family, mixed)


@cache
def _count(
    kernels: bool, layers: int, second: bool, family: str, mixed: bool = False
) -> dict[str, Counter[str]]:
    target, drafter = _pair(family, layers, second, mixed)
    with recorder() as counted, ExitStack() as stack:
        if kernels:
            stack.enter_context(kernels_counted(counted))
        session, meter = Session(target, drafter, nullcontext), _Meter(counted)
        _, features = target.forward([_segment(CONTEXT, session)], drafter.taps)
        session.cache.commit(CONTEXT)
        drafter.observe(features, session.draft_cache)
        for place, name, part in (
            (drafter, "propose", "draft"),
            (drafter, "observe", "inject"),
            (target, "forward", "verify"),
            (target, "logits", "verify"),
            (session.cache, "commit", "commit"),
        ):
            watched = meter.of(part, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, watched))
        chooser = Chooser(SamplingParams(), mx.random.key(0), target.vocab_size)
        started = (chooser, mx.array([0], mx.int32), ROWS - 1)
        flight = meter.of("accept", launch)(
            *(target, session.cache, drafter, session.draft_cache), *started
        )
        session._keep(flight, [0] * KEPT)
    meter.parts["accept"] -= meter.parts["draft"] + meter.parts["verify"]
    return {part: meter.parts[part] for part in PARTS}


def _segment(rows: int, session: Session) -> Segment:
    return Segment(mx.array([0] * rows, mx.int32), session.cache)


class _Meter:
    """What the parts of a cycle add to a recorder's count."""

    def __init__(self, counted: Counter[str]) -> None:
        self.counted = counted
        self.parts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.counted.copy()
            result = function(*args, **kwargs)
            self.parts[part] += self.counted - before
            return result

        return call


def cycle_total(counts: dict[str, Counter[str]]) -> int:
    """Dispatches of all parts together."""
    return sum(part.total() for part in counts.values())


def per_layer(kernels: bool, *, second: bool = False) -> int:
    """Dispatches that one more draft layer costs a drafter's pass."""
    three, four = (count_cycle(kernels, n, second=second)["draft"].total() for n in (3, 4))
    return four - three
