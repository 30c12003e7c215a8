"""The drafter that a converted folder has inside: taken along when that folder is converted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.weights import bundled_drafter, read_config


@dataclass(frozen=True)
class Bundled:
    """Where it lies, and what the folder records of it."""

    path: Path
    spec: str  # where it was taken from
    revision: str | None
    bits: int | None  # to hold it in


def find_bundled(source: Path) -> Bundled | None:
    """The drafter that a source's config.json records, whether it is there or not.

    A `conversion` that is no object is some other program's, and records none.
    """
    if not (source / "config.json").is_file():
        return None
    conversion = read_config(source).get("conversion")
    found = bundled_drafter(source) if isinstance(conversion, dict) else None
    if found is None:
        return None
    path, bits = found
    record = conversion["drafter"]
    spec, revision = record.get("source"), record.get("revision")
    return Bundled(
        path,
        spec if isinstance(spec, str) else str(path),
        revision if isinstance(revision, str) else None,
        bits,
    )
