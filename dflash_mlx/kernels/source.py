"""Kernel objects from metal/*.metal: the body of each operation behind the header they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

from dflash_mlx import paths


@cache
def kernel(
    operation: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[..., list[mx.array]]:
    """The kernel whose body is metal/<operation>.metal.

    Arrays come as they are, with strides: a copy of a cache a call would cost more than the kernel.
    """
    folder = paths.metal_dir()
    made: Callable[..., list[mx.array]] = mx.fast.metal_kernel(
        name=f"dflash_{operation}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=(folder / "common.h").read_text(),
        source=(folder / f"{operation}.metal").read_text(),
        ensure_row_contiguous=False,
    )
    return made


@lru_cache(typed=True)
def constant(value: float | int) -> mx.array:
    """A scalar for a kernel, made once; evaluated, so that every thread may use it."""
    scalar = mx.array(value)
    mx.eval(scalar)
    return scalar
