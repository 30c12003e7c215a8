"""Every setting of a training run, checked; defaults are the DFlash paper's but for the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash_mlx.errors import UsageError
from dflash_mlx.train.loss import default_gamma
from dflash_mlx.train.wording import as_option

#: of the forward pass
_DTYPES = ("float32", "bfloat16")
_WEIGHTS = ("dpace", "decay")


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained. Two runs with equal recipes and equal texts are equal.

    weights: "dpace", or "decay", where rows behind the anchor weigh exp(-(k-1)/gamma); gamma None
    is the paper's for the block size.
    soft: share of the target's distribution in the labels, 0 .. 1; the rest is the tokens.
    steps: ends the run before `epochs` do; None is no limit.
    """

    block_size: int = 16
    weights: str = "dpace"
    gamma: float | None = None
    anchors: int = 512  # a text and epoch at most
    step_blocks: int = 256  # blocks of one optimizer step
    pass_blocks: int = 64  # blocks of one forward pass: memory
    epochs: int = 6
    steps: int | None = None
    learning_rate: float = 6e-4
    warmup: float = 0.04  # share of the steps
    clip: float = 1.0
    weight_decay: float = 0.0
    soft: float = 0.0
    negatives: int = 1024  # tokens outside the texts that the loss's head holds besides
    max_length: int = 2048
    held_out: int = 48  # texts that only measure
    measure_every: int = 200  # steps between measurements and checkpoints
    seed: int = 0
    dtype: str = "float32"  # of the forward pass; masters are float32

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}; give at least {least}.")
        for name in ("warmup", "soft"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give a share from 0 to 1.")
        for name in ("gamma", "learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} is {value}; give a number above 0.")
        if self.gamma is not None and self.weights != "decay":
            raise UsageError('gamma is of weights="decay"; give both, or none.')
        if self.weights not in _WEIGHTS:
            raise UsageError(f"weights is {self.weights!r}; give one of {', '.join(_WEIGHTS)}.")
        if self.dtype not in _DTYPES:
            raise UsageError(f"dtype is {self.dtype!r}; give one of {', '.join(_DTYPES)}.")

    @property
    def decay(self) -> float:
        """γ of weights that decay along the block."""
        return default_gamma(self.block_size) if self.gamma is None else self.gamma

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """Settings that differ from a stored run's, as "option: stored -> ours".

        Blocks a pass may differ: a run that ran out of memory goes on with fewer.
        """
        ours = self.as_json()
        stored = {"weights": "decay", **stored}  # the only ones that earlier versions had
        names = [field.name for field in fields(self) if field.name != "pass_blocks"]
        shown = {**{n: as_option(n) for n in names}, "held_out": "--held-out"}
        hints = {"weights": " (--gamma paper is decay, without --gamma it is dpace)"}
        return [
            f"{shown[n]}: {stored.get(n)} -> {ours[n]}{hints.get(n, '')}"
            for n in names
            if stored.get(n) != ours[n]
        ]


_LEAST = {
    "block_size": 2,
    "anchors": 1,
    "step_blocks": 1,
    "pass_blocks": 1,
    "epochs": 1,
    "steps": 1,
    "weight_decay": 0,
    "negatives": 0,
    "max_length": 4,
    "held_out": 0,
    "measure_every": 1,
    "seed": 0,
}
