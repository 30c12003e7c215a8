"""Whether an operation runs as a Metal kernel or as its twin in MLX's operations, and why.

A kernel is trusted only after its first result on the arrays at hand agreed with the twin's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import record
from dflash_mlx.kernels.source import Launch

VARIABLE = "DFLASH_KERNELS"
# Largest difference to the twin, relative to the twin's largest element. Sums are ordered otherwise
# in kernels, and 16-bit twins round between their operations.
TOLERANCE = {mx.float32: 2e-3, mx.float16: 2e-2, mx.bfloat16: 6e-2}
_EXACT = "Exact mode needs a kernel that this machine cannot use,"


class Choice(NamedTuple):
    """Kernels or operations for this process."""

    metal: bool
    reason: str


@cache
def choice() -> Choice:
    """Decided once; DFLASH_KERNELS=ops forces the operations. UsageError for another value."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "ops"):
        raise UsageError(f"{VARIABLE} is {wanted!r}. Set it to auto or to ops.")
    if wanted == "ops":
        return Choice(False, f"{VARIABLE}=ops asks for MLX's operations.")
    if not mx.metal.is_available():
        return Choice(False, "MLX has no Metal device here.")
    return Choice(True, "MLX has a Metal device.")


_trusted: set[tuple[str, Hashable]] = set()
_rejected: dict[str, str] = {}  # operation -> why
_beyond: dict[tuple[str, Hashable], str] = {}  # launches that are not made, and why


def kernels_active() -> bool:
    """Whether operations run as kernels now: Metal is chosen and the default device a GPU."""
    return choice().metal and _on_gpu()


def is_active(operation: str) -> bool:
    """Whether `operation` would run as a kernel now: it was not rejected either."""
    return kernels_active() and operation not in _rejected


def _on_gpu() -> bool:
    return mx.default_device() == mx.gpu


def run(
    operation: str,
    variant: Hashable,
    kernel: Callable[[], Sequence[mx.array]],
    twin: Callable[[], Sequence[mx.array]],
    *,
    launches: Sequence[Launch],
    exact: bool = False,
) -> Sequence[mx.array]:
    """The kernel's arrays, or the twin's where the kernel is not active or has failed.

    Arrays of the kernel beyond the twin's are its own records. `launches`: what it asks of a GPU;
    one that no GPU grants goes to the twin. `variant` tells apart what compiles to different code
    and the sizes of weights; each is checked at its first use. `exact`: where kernels are active
    nothing else will do, and a failure is a UsageError.
    """
    if not kernels_active():
        return twin()
    fault = _rejected.get(operation) or _limit(operation, variant, launches)
    if fault is not None:
        if exact:
            raise UsageError(f"{_EXACT} {operation}: {fault}. Leave --exact out.")
        return twin()
    if (operation, variant) in _trusted:
        return kernel()
    expected = twin()
    found, fault = _first_use(kernel, expected)
    if fault is None:
        _trusted.add((operation, variant))
        record.drop(operation, variant)
        return found
    _reject(operation, variant, fault)
    return run(operation, variant, kernel, lambda: expected, launches=launches, exact=exact)


def _limit(operation: str, variant: Hashable, launches: Sequence[Launch]) -> str | None:
    """What no GPU grants of these launches; noted once, without a warning: nothing is broken."""
    fault = next((fault for one in launches if (fault := one.fault)), None)
    if fault is not None and (operation, variant) not in _beyond:
        _beyond[operation, variant] = fault
        record.keep(operation, variant, fault)
    return fault


def _first_use(
    kernel: Callable[[], Sequence[mx.array]], expected: Sequence[mx.array]
) -> tuple[Sequence[mx.array], str | None]:
    """The kernel's arrays, and what is wrong with them."""
    try:
        found = kernel()
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return [], f"it does not run here: {error}"
    for got, want in zip(found, expected, strict=False):
        if (gap := difference(got, want)) > TOLERANCE[want.dtype]:
            return [], f"it differs from MLX's operations by {gap:.2g}"
    return found, None


def difference(got: mx.array, want: mx.array) -> float:
    """Largest difference relative to the largest expected element; infinite where one is NaN."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    gap = (mx.abs(got - want).max() / mx.maximum(mx.abs(want).max(), 1e-20)).item()
    return float("inf") if gap != gap else float(gap)


def _reject(operation: str, variant: Hashable, reason: str) -> None:
    """The one warning that a person gets; doctor and the statistics repeat the fact, no warning."""
    _rejected[operation] = reason
    lost = record.keep(operation, variant, reason)
    warnings.warn(
        f"{_sentence(operation, reason)} MLX's own operations answer instead; set {VARIABLE}=ops "
        f"to leave all kernels out.{f' {lost}' if lost else ''}",
        RuntimeWarning,
        stacklevel=4,
    )


def rejections() -> list[str]:
    """What people should know of kernels that are not used although Metal is there."""
    return [
        *(_sentence(name, why) for name, why in _rejected.items()),
        *(f"The Metal kernel {name} is not used for some sizes: {why}." for name, why in _some()),
    ]


def _some() -> list[tuple[str, str]]:
    """Operations in use of which some launches are not made, and why."""
    found = {(name, why) for (name, _), why in _beyond.items() if name not in _rejected}
    return sorted(found)


def rejected_operations() -> set[str]:
    """Names of the kernels that `rejections` speaks of."""
    return {*_rejected, *(name for name, _ in _beyond)}


def _sentence(operation: str, reason: str) -> str:
    return f"The Metal kernel {operation} is not used: {reason}."


def status() -> str:
    """One line for people: what runs as kernels, what does not, and why."""
    if not choice().metal:
        return f"MLX's operations: {choice().reason}"
    used = sorted({operation for operation, _ in _trusted} - set(_rejected))
    parts = [f"Metal kernels: {', '.join(used) or 'none used yet'}"]
    parts += [f"{name} not used, {reason}" for name, reason in sorted(_rejected.items())]
    parts += [f"{name} not used for some sizes, {reason}" for name, reason in _some()]
    return "; ".join(parts)


def forget() -> None:
    """Forget what was checked and rejected."""
    _trusted.clear()
    _rejected.clear()
    _beyond.clear()
