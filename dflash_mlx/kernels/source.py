"""Kernel objects from metal/*.metal, and what a launch of one asks of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx import paths

# What every Apple GPU has from M1 on (Apple's feature set tables, family 7 and later); MLX does not
# tell them. A pipeline that may have fewer threads fails at its first use, see backend.run.
MAX_THREADS, MAX_THREADGROUP_BYTES = 1024, 32768


class Launch(NamedTuple):
    """One launch: threadgroups, threads of each, and bytes of threadgroup memory."""

    groups: tuple[int, int, int]
    threads: tuple[int, int, int]
    memory: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """In threads, as MLX counts."""
        (a, b, c), (x, y, z) = self.groups, self.threads
        return a * x, b * y, c * z

    @property
    def fault(self) -> str | None:
        """What no GPU is known to have."""
        if (threads := prod(self.threads)) > MAX_THREADS:
            return f"its threadgroups have {threads} threads, and a GPU takes {MAX_THREADS}"
        if self.memory > MAX_THREADGROUP_BYTES:
            return (
                f"its threadgroups need {self.memory} bytes of memory, and a GPU has "
                f"{MAX_THREADGROUP_BYTES}"
            )
        return None


@cache
def kernel(
    operation: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[..., list[mx.array]]:
    """The kernel whose body is metal/<operation>.metal, behind the header that all share.

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
