"""Whether the bytes to fetch and to write fit on the disks they go to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mlx.errors import UsageError

#: tokenizer, configs and headers, beside the weights
MARGIN = 64_000_000


class Demand(NamedTuple):
    """Bytes that will be needed below a path, which need not exist yet."""

    what: str
    folder: Path
    nbytes: int


def refuse_too_little(demands: Sequence[Demand]) -> None:
    """UsageError with the numbers when a disk has less room than its demands together."""
    by_disk: dict[int, list[Demand]] = {}
    for demand in demands:
        by_disk.setdefault(_standing(demand.folder).stat().st_dev, []).append(demand)
    for together in by_disk.values():
        place = _standing(together[0].folder)
        free = shutil.disk_usage(place).free
        needed = sum(demand.nbytes for demand in together) + MARGIN
        if needed > free:
            parts = " and ".join(f"{_gigabytes(d.nbytes)} {d.what}" for d in together)
            raise UsageError(
                f"The disk of {place} has {_gigabytes(free)} free, and {_gigabytes(needed)} are "
                f"needed ({parts}); free some or give a folder on another disk."
            )


def _standing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
