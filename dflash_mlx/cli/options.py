"""Options that several commands have."""

from __future__ import annotations

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
