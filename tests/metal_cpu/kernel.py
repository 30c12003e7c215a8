"""A stand-in for mx.fast.metal_kernel that runs every call on the CPU, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from metal_cpu.launch import Binding, Mode, run
from metal_cpu.source import Capture, capture

_metal_kernel = mx.fast.metal_kernel
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_HEADER = 8  # bytes in front of every allocation of MLX's CPU back-end, which are 16-aligned


# Of kernels made without a schedule; `pytest --full` goes through all.
default_schedule = 0


class CpuKernel:
    """Arguments and call are those of mx.fast.metal_kernel's objects.

    `mode` and `schedule` say how to run; `launches` counts the calls.
    """

    def __init__(
        self, *, mode: Mode = Mode.CHECK, schedule: int | None = None, **made: Any
    ) -> None:
        self.mode, self.launches = mode, 0
        self.schedule = default_schedule if schedule is None else schedule
        self._made = made
        self._kernel = _metal_kernel(**made)
        self._captures: dict[Any, Capture] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | int | float | bool],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        if self._made.get("ensure_row_contiguous", True):
            arrays = [mx.contiguous(x) for x in arrays]
        mx.eval(arrays)
        given: dict[str, Any] = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        } | ({"template": template} if template else {})
        call = self._capture(arrays, given)
        views = [_view(x) for x in arrays]
        outputs = [
            _blank(s, d, init_value) for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        names = self._made["input_names"]
        bindings = self._bindings(call, dict(zip(names, views, strict=True)))
        for name, memory in zip(self._made["output_names"], outputs, strict=True):
            bindings.append(Binding(name, memory.reshape(-1), True, init_value is not None))
        if [b.name for b in bindings] != [name for _, name in call.parameters]:
            raise AssertionError(f"bindings {[b.name for b in bindings]} for {call.parameters}")
        self.launches += 1
        run(call, bindings, self.mode, self.schedule)
        return [_array(o, d) for o, d in zip(outputs, output_dtypes, strict=True)]

    def _capture(self, arrays: list[mx.array], given: dict[str, Any]) -> Capture:
        key = repr([given, [(x.shape, x.dtype) for x in arrays]])
        if key not in self._captures:
            self._captures[key] = capture(
                lambda *xs: self._kernel(inputs=list(xs), stream=mx.gpu, **given), arrays
            )
        return self._captures[key]

    def _bindings(self, call: Capture, views: dict[str, np.ndarray]) -> list[Binding]:
        """Every input buffer of the signature: arrays, and their shapes, strides and ranks."""
        found = []
        for _, name in call.parameters:
            if name in views:
                memory, shift = _span(views[name])
                found.append(Binding(name, memory, misalignment=shift))
                continue
            base, _, fact = name.rpartition("_")
            if base not in views or name in self._made["output_names"]:
                continue  # an output
            view = views[base]
            strides = [stride // view.itemsize for stride in view.strides]
            facts = {
                "shape": np.array(view.shape, np.int32),
                "strides": np.array(strides, np.int64),
                "ndim": np.array([view.ndim], np.int32),
            }
            found.append(Binding(name, facts[fact]))
        return found


def _view(x: mx.array) -> np.ndarray:
    """The array's own memory with its strides; 16-bit floats as their bits."""
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
        mx.eval(x)
    return np.array(x, copy=False)


def _span(view: np.ndarray) -> tuple[np.ndarray, int]:
    """The memory from the first to the last element that indices reach, and its misalignment."""
    if any(stride < 0 for stride in view.strides):
        raise NotImplementedError("negative strides")
    count = (
        1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) // view.itemsize
    )
    flat = np.lib.stride_tricks.as_strided(view, (count,), (view.itemsize,))
    return flat, (view.ctypes.data - _HEADER) % 16


def _blank(shape: Sequence[int], dtype: mx.Dtype, value: float | None) -> np.ndarray:
    bits = np.array(mx.full(tuple(shape), value or 0, dtype).view(_BITS[dtype.size]))
    return np.ascontiguousarray(bits)


def _array(bits: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(bits).view(dtype)


@contextmanager
def metal_on_cpu(mode: Mode = Mode.CHECK, schedule: int | None = None) -> Iterator[list[CpuKernel]]:
    """mx.fast.metal_kernel makes CpuKernels inside; yields the list of those made."""
    made: list[CpuKernel] = []

    def make(*args: Any, **kwargs: Any) -> CpuKernel:
        names = ("name", "input_names", "output_names", "source", "header")
        made.append(
            CpuKernel(
                mode=mode, schedule=schedule, **dict(zip(names, args, strict=False)), **kwargs
            )
        )
        return made[-1]

    mx.fast.metal_kernel = make  # type: ignore[assignment]
    try:
        yield made
    finally:
        mx.fast.metal_kernel = _metal_kernel
