"""The state of a run in one file that is whole or not there: weights, optimizer, place, history."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.errors import CheckpointError
from dflash_mlx.train.files import make_folder, write_tensors

_FORMAT = "1"
#: in a folder of its own: who serves the drafter reads every *.safetensors beside it
STATE = "training/state.safetensors"
#: where earlier versions put it
_OLD = "state.safetensors"


@dataclass
class Progress:
    """Where a run stands. `step` steps are done; the next is number `place` of `epoch`."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)  # of training, over all its processes
    # Sums since the last measurement.
    losses: float = 0.0
    counted_steps: int = 0
    correct: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    def add(self, loss: float, correct: list[int], counted: list[int]) -> None:
        """Count one step."""
        self.losses += loss
        self.counted_steps += 1
        self.correct = _added(self.correct, correct)
        self.counted = _added(self.counted, counted)

    def mean_loss(self) -> float:
        return self.losses / max(1, self.counted_steps)

    def accuracy(self) -> list[float]:
        """Of each row behind the anchor: share of the counted ones whose best token was right."""
        return [c / max(1, n) for c, n in zip(self.correct, self.counted, strict=True)]

    def clear(self) -> None:
        """Begin new sums."""
        self.losses, self.counted_steps, self.correct, self.counted = 0.0, 0, [], []


def _added(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)


def save_state(
    folder: Path, parameters: Any, optimizer_state: Any, progress: Progress, run: dict[str, Any]
) -> None:
    """Write the state; an older one stays until the new one is complete on disk.

    UsageError when it cannot be written.
    """
    arrays = {f"parameters/{k}": v for k, v in tree_flatten(parameters)}
    arrays |= {f"optimizer/{k}": v for k, v in tree_flatten(optimizer_state)}
    described = {
        "format": _FORMAT,
        "progress": json.dumps(asdict(progress)),
        "run": json.dumps(run),
    }
    make_folder((folder / STATE).parent)
    write_tensors(folder / STATE, arrays, described)
    (folder / _OLD).unlink(missing_ok=True)


def has_state(folder: Path) -> bool:
    """Whether a run left its state in the folder."""
    return any((folder / name).exists() for name in (STATE, _OLD))


def load_state(folder: Path) -> tuple[Any, Any, Progress, dict[str, Any]] | None:
    """(parameters, optimizer state, progress, run) as saved; None when there is none.

    CheckpointError for a file that is none of ours.
    """
    opened = _opened(folder, read=True)
    if opened is None:
        return None
    arrays, progress, run = opened
    trees = [
        tree_unflatten([(k.removeprefix(p), arrays[k]) for k in sorted(arrays) if k.startswith(p)])
        for p in ("parameters/", "optimizer/")
    ]
    return trees[0], trees[1], progress, run


def load_run(folder: Path) -> dict[str, Any] | None:
    """The settings of the run whose state is in the folder, without reading its arrays.

    CheckpointError for a file that is none of ours.
    """
    opened = _opened(folder, read=False)
    return None if opened is None else opened[2]


def _opened(
    folder: Path, *, read: bool
) -> tuple[dict[str, mx.array], Progress, dict[str, Any]] | None:
    file = next((folder / name for name in (STATE, _OLD) if (folder / name).exists()), None)
    if file is None:
        return None
    try:
        arrays, described = mx.load(str(file), return_metadata=True)
        if described.get("format") != _FORMAT:
            raise ValueError(f"format {described.get('format')}")
        if read:
            mx.eval(arrays)
        progress = Progress(**json.loads(described["progress"]))
        return arrays, progress, json.loads(described["run"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is no state of a training run that this version can read ({error}); give "
            "another folder to start that run again."
        ) from None
