"""What a person asks of a training run, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_mlx.errors import UsageError
from dflash_mlx.loader import DTYPES
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.shape import Shape

#: most likely tokens kept of every answer position for soft labels
_TOP_K = 32
#: what a run can make besides a drafter
STAGES = ("answers", "features")


@dataclass(frozen=True)
class Order:
    """What a person asks for.

    init: "target", "random", or a drafter's hub id or folder, whose shape is then taken over.
    work: where answers and features are kept; below `out` without one.
    """

    target: str
    out: Path
    recipe: Recipe = field(default_factory=Recipe)
    shape: Shape = field(default_factory=Shape)
    prompts: Sequence[Path] = ()
    answers: Sequence[Path] = ()
    init: str = "target"
    work: Path | None = None
    online: bool = False
    cache_limit_gb: float | None = None
    cache_dtype: str = "bfloat16"
    temperature: float = 0.0
    max_answer: int = 512
    slots: int = 32  # sequences answered at once
    thinking: bool | str | None = None  # of answers: a switch, or a reasoning level
    block_size: int | None = None  # of a drafter trained further, another than its own
    dtype: str = "auto"
    revision: str | None = None
    streams: int | None = None
    memory_gb: float | None = None
    until: str | None = None  # the stage that is the last: answers, features; None is all

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "streams": 1, "block_size": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}. Give at least {least}.")
        for name in ("memory_gb", "cache_limit_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} is {value}. Give a number of GB above 0.")
        if self.until not in (None, *STAGES):
            raise UsageError(f"until is {self.until!r}. Give one of {', '.join(STAGES)}.")
        if self.until == "answers" and not self.prompts:
            raise UsageError("--until answers needs --prompts, which are to be answered.")
        if self.until == "features" and self.online:
            raise UsageError("--online stores no features. Leave it or --until features out.")
        if self.cache_dtype not in DTYPES:
            raise UsageError(
                f"Features cannot be stored as {self.cache_dtype!r}. Give one of "
                f"{', '.join(DTYPES)}."
            )

    @property
    def top_k(self) -> int:
        """Likely tokens kept of each answer position: none where labels are the tokens alone."""
        return _TOP_K if self.recipe.soft else 0
