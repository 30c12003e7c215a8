"""What each kernel must move and compute, and the dispatches of a cycle: modelled, not measured.

Bytes, FLOPs and launches follow from the shapes; the floors are bytes over memory bandwidth. The
dispatches are counted by watching which operations a cycle calls, by the table below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
from kernel_cases import Case, cases

from dflash_mlx.draft.config import parse_config
from dflash_mlx.draft.dflash import DFlashDrafter, DFlashModel
from dflash_mlx.kernels import attention, backend, gated_delta, matmul, projection
from dflash_mlx.layers.mlp import MLP
from dflash_mlx.models import build_target
from dflash_mlx.segment import Segment

# GB/s of the chips' memory, as Apple states it.
BANDWIDTH = {
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546, "M5": 153,
}  # fmt: skip
# Dispatches of one call, read in MLX's Metal back-end: reductions, matrix products and elementwise
# work are one each (a matrix product of few rows may be split in two), fused operations one.
TABLE = {
    "core": "matmul addmm quantized_matmul softmax logsumexp argmax exp tanh isnan logical_not "
    "argpartition take_along_axis sigmoid",
    "fast": "rms_norm rope gated_delta_update",
    "array": "__getitem__ __setitem__ __add__ __radd__ __mul__ __rmul__ __truediv__ __matmul__ "
    "astype sum",
}
# With a window or many heads a block takes the unfused path or the two-pass kernel: two at least.
ATTENTION = 2
LAYERS, ROWS, CONTEXT = 4, 16, 600


@contextmanager
def recorder() -> Iterator[Counter[str]]:
    """Counts dispatches of the operations called inside, by name."""
    counted: Counter[str] = Counter()
    depth = 0

    def watched(name: str, function: Callable[..., Any], cost: Callable[..., int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                counted[name] += cost(*args)
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    one = lambda *_: 1  # noqa: E731
    with mock.patch.multiple(mx, **_watched(mx, TABLE["core"], watched, one)):
        fast = _watched(mx.fast, TABLE["fast"], watched, one)
        fast["scaled_dot_product_attention"] = watched(
            "attention", mx.fast.scaled_dot_product_attention, lambda *_: ATTENTION
        )
        join = watched("concatenate", mx.concatenate, lambda parts, *_: len(parts))
        with (
            mock.patch.multiple(mx.fast, **fast),
            mock.patch.multiple(mx, concatenate=join),
            mock.patch.multiple(mx.array, **_watched(mx.array, TABLE["array"], watched, _cost)),
            mock.patch.object(MLP, "__call__", _counted_mlp(watched, one)),
        ):
            yield counted


def _counted_mlp(watched: Any, one: Callable[..., int]) -> Callable[[MLP, mx.array], mx.array]:
    """MLP's call with its compiled activation, which is one fused kernel, counted."""

    def call(self: MLP, x: mx.array) -> mx.array:
        activate = watched("swiglu", self.activation, one)
        return self.down_proj(activate(self.gate_proj(x), self.up_proj(x)))

    return call


def _watched(place: Any, names: str, watched: Any, cost: Callable[..., int]) -> dict[str, Any]:
    return {name: watched(name, getattr(place, name), cost) for name in names.split()}


def _cost(array: mx.array, *args: Any) -> int:
    """A cast to the type that is there already is none, and a slice is a view; a look-up is one."""
    if args and isinstance(args[0], mx.Dtype):
        return int(args[0] != array.dtype)
    sliced = args and isinstance(args[0], slice | tuple | int | type(None)) and len(args) == 1
    return int(not sliced)


@contextmanager
def kernels_counted(counted: Counter[str]) -> Iterator[None]:
    """Kernels are active inside and give zeros; every launch counts."""

    def fake(operation: str, *_: Any) -> Callable[..., list[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            counted[operation] += 1
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    with (
        mock.patch.object(backend, "choice", return_value=backend.Choice(True, "counted")),
        mock.patch.object(backend, "_on_gpu", return_value=True),
        mock.patch.object(backend, "run", lambda _, __, kernel, ___, **____: kernel()),
        mock.patch.object(attention, "kernel", fake),
        mock.patch.object(matmul, "kernel", fake),
        mock.patch.object(projection, "kernel", fake),
        mock.patch.object(gated_delta, "kernel", fake),
    ):
        yield


def count_cycle(kernels: bool) -> dict[str, Counter[str]]:
    """Dispatches of a drafter's pass, of the injection and of the target's verification."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6}
    sizes |= {"vocab_size": 64, "rope_theta": 1e4, "max_position_embeddings": 4096}
    drafter = {"target_layer_ids": [0, 1], "mask_token_id": 1, "block_size": ROWS}
    target = build_target({"model_type": "qwen3", "tie_word_embeddings": False, **sizes})
    names = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": 4}
    config = parse_config({**names, **sizes, "dflash_config": drafter})
    model = DFlashDrafter(DFlashModel(config), config, target)
    found = {}
    for part in ("draft", "inject", "verify"):
        with recorder() as counted:
            if kernels:
                with kernels_counted(counted):
                    _cycle(model, target, part, counted)
            else:
                _cycle(model, target, part, counted)
        found[part] = counted
    return found


def _cycle(drafter: DFlashDrafter, target: Any, part: str, counted: Counter[str]) -> None:
    cache, context = target.make_cache(), drafter.make_cache()
    features = mx.zeros((1, CONTEXT, 2 * target.hidden_size))
    drafter.observe(features, context)
    target.forward([Segment(mx.zeros((CONTEXT,), mx.int32), cache)], drafter.taps)
    cache.commit(CONTEXT)
    counted.clear()
    if part == "draft":
        drafter.propose(mx.zeros((1,), mx.int32), ROWS - 1, None, context)
    elif part == "inject":
        drafter.observe(features[:, :ROWS], context)
    else:
        target.forward([Segment(mx.zeros((ROWS,), mx.int32), cache)], drafter.taps)


def show_case(case: Case) -> None:
    print(f"\n{case.operation}: {case.shape}")
    print(f"  {case.bytes / 1e6:.2f} MB, {case.flops / 1e9:.3f} GFLOP", end="")
    for launch in case.launches:
        print(
            f"; {launch.threadgroups} threadgroups of {launch.threads} threads, "
            f"{launch.threadgroup_bytes} B of threadgroup memory",
            end="",
        )
    floors = (f"{chip} {case.bytes / speed / 1e3:.0f}" for chip, speed in BANDWIDTH.items())
    print(f"\n  floor in us: {', '.join(floors)}")


def main() -> None:
    for case in cases():
        show_case(case)
    print("\nGPU dispatches of a cycle, modelled (not measured): MLX's operations, then kernels")
    before, after = count_cycle(False), count_cycle(True)
    for part in before:
        counts = f"{before[part].total()} -> {after[part].total()}"
        print(f"\n{part}, {LAYERS} layers of a small Qwen3 pair: {counts}")
        print(f"  before: {dict(before[part])}\n  after:  {dict(after[part])}")


if __name__ == "__main__":
    main()
