"""For tests: the package's kernels on the CPU harness, their errors judged against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from metal_cpu import CpuKernel, Mode, metal_on_cpu

from dflash_mlx.kernels import backend, source

# Half a unit in the last place, relative, and of a subnormal number.
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
SUBNORMAL = {mx.float32: 2.0**-150, mx.float16: 2.0**-25, mx.bfloat16: 2.0**-134}
SUM_ERROR = 1e-5  # of the sum of absolute products


class _Everything(set):
    def __contains__(self, item: object) -> bool:
        return True


@contextmanager
def kernels_on_cpu(
    mode: Mode = Mode.CHECK, schedule: int | None = None, *, trusted: bool = True
) -> Iterator[list[CpuKernel]]:
    """Every operation of dflash_mlx.kernels runs as a kernel inside; yields the kernels made.

    `trusted`: without the check against the twin at first use, whose 16-bit sums on the CPU are
    coarse and slow.
    """
    with pytest.MonkeyPatch.context() as patch, metal_on_cpu(mode, schedule) as made:
        patch.setattr(backend, "choice", lambda: backend.Choice(True, "the harness"))
        patch.setattr(backend, "_on_gpu", lambda: True)
        source.kernel.cache_clear()
        backend.forget()
        if trusted:
            patch.setattr(backend, "_trusted", _Everything())
        try:
            yield made
        finally:
            source.kernel.cache_clear()
            backend.forget()


def launches(made: list[CpuKernel]) -> dict[str, int]:
    """How often each kernel ran."""
    return {kernel._made["name"].removeprefix("dflash_"): kernel.launches for kernel in made}


def random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int, scale: float = 1.0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * scale
    return mx.array(values).astype(dtype)


def single(given: mx.array) -> mx.array:
    """Numbers in float32: MLX's 16-bit sums on the CPU are too coarse for a twin's."""
    return given.astype(mx.float32) if mx.issubdtype(given.dtype, mx.floating) else given


def single_layer(layer: nn.Module) -> nn.Module:
    """The same layer with its numbers in float32; codes stay."""
    made = copy.copy(layer)
    for name, array in layer.parameters().items():
        made[name] = single(array)
    return made


def exact(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def assert_near(got: mx.array, want: np.ndarray, magnitude: np.ndarray | float) -> None:
    """Within SUM_ERROR of `magnitude` (the sum of absolute terms) and the type's own rounding."""
    rounding = np.maximum(ROUNDING[got.dtype] * np.abs(want), SUBNORMAL[got.dtype])
    allowed = SUM_ERROR * magnitude + rounding
    found = exact(got)
    assert found.shape == want.shape
    assert not np.isnan(found).any()
    excess = np.abs(found - want) - allowed
    assert (excess <= 0).all(), f"beyond the bound by {excess.max():.3g} at {excess.argmax()}"
