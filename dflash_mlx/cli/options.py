"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from dflash_mlx.cli.console import option
from dflash_mlx.errors import UsageError

Thinking = Annotated[
    bool | None, option("Reason before the answer, or not.", "--thinking/--no-thinking")
]
ReasoningLevel = Annotated[
    str | None,
    option("Reasoning level, for models that have levels.", "--reasoning", metavar="LEVEL"),
]


def reasoning_of(thinking: bool | None, level: str | None) -> bool | str | None:
    """What a chat takes as `thinking`; UsageError when both options are given."""
    if thinking is not None and level is not None:
        raise UsageError("--reasoning sets a level, --thinking a switch. Leave one of them out.")
    return thinking if level is None else level


def check_place(name: str, file: Path | None) -> None:
    """UsageError for a file that cannot be written, before hours of work and not after."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "writing there is not permitted"
    else:
        return
    raise UsageError(f"{name} cannot write {file}: {why}. Name another file.")
