"""The stored calibration of a pair of models on this machine: where it lies and what it is for.

Costs depend on shapes and number types, not on the values of weights, so these are the key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx import kernels, machine
from dflash_mlx.decode.calibrate import calibrate
from dflash_mlx.decode.costs import Costs
from dflash_mlx.decode.session import Guard
from dflash_mlx.draft.base import Drafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.models.base import Target
from dflash_mlx.paths import home_dir, write_whole

#: what a first use spends on measuring
FIRST_SECONDS = 4.0

#: how costs are measured: numbers of another way are not comparable
METHOD = "chains of steps, head by rows"

Say = Callable[[str], None]


def calibration_file(target: Target, drafter: Drafter, block_size: int) -> Path:
    """Where the costs of this pair, on this machine and with these versions, are kept."""
    key = {
        "method": METHOD,
        "chip": machine.chip(),
        "back_end": machine.back_end()[0],
        "blas": machine.blas_in_use().name,
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "versions": machine.versions(),
        "kernels": kernels.kernels_active(),
        "target": _layout(target),
        "drafter": _layout(drafter),
        "block_size": block_size,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return home_dir() / "calibration" / f"{name}.json"


def costs_of(
    target: Target,
    drafter: Drafter,
    guard: Guard,
    block_size: int,
    *,
    seconds: float | None = None,
    anew: bool = False,
    say: Say | None = None,
) -> tuple[Costs, str | None]:
    """The stored costs, measured first where there are none or `anew`; and a warning, if any.

    say: is told, before a measurement that nobody asked for, what the wait is for.
    """
    file = calibration_file(target, drafter, block_size)
    if not anew and (stored := _read(file)) is not None:
        return stored, None
    if seconds is None:
        seconds = FIRST_SECONDS
        if say is not None:
            say(
                "Measuring once what drafting costs on this machine; `dflash-mlx calibrate` does "
                "it more closely."
            )
    costs = calibrate(target, drafter, guard, block_size=block_size, seconds=seconds)
    try:
        write_whole(file, json.dumps(costs.to_json()))
    except OSError as error:
        return costs, (
            f"The calibration could not be kept in {file.parent} ({error}), so every start "
            "measures again. Set DFLASH_HOME to a folder that can be written."
        )
    return costs, None


def _read(file: Path) -> Costs | None:
    try:
        return Costs.from_json(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError, OverflowError, CheckpointError):
        return None  # nothing of a person's: it is measured again


def _layout(model: object) -> list[str]:
    """Names of classes, shapes and types of all arrays of a model, in the order of their names."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    found = [type(model).__name__]
    if isinstance(module, nn.Module):
        classes = {type(m).__name__ for m in module.modules()}  # exact ones cost more
        found += sorted(classes)
        arrays = tree_flatten(module.parameters())
        found += [f"{name} {a.shape} {a.dtype}" for name, a in sorted(arrays, key=lambda p: p[0])]
    return found
