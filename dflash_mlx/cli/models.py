"""`dflash-mlx models`: the known pairs of target and drafter, and what of them is on disk."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.errors import SourceError

if TYPE_CHECKING:
    from dflash_mlx.registry import Pair


def models(
    name: Annotated[str | None, typer.Argument(help="Only pairs with this in their names.")] = None,
    as_json: Annotated[bool, console.option("Print one JSON document.", "--json")] = False,
) -> None:
    """List the known models and their drafters."""
    from dflash_mlx.registry import load_registry, suggest

    pairs = [pair for pair in load_registry().pairs if _matches(pair, name)]
    if not pairs:
        near = suggest(name or "")
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise SourceError(
            f"No known pair has {name!r:.80} in its names. {hint}Run `dflash-mlx models`."
        )
    rows = [_row(pair) for pair in pairs]
    if as_json:
        print(json.dumps(rows))
    else:
        _show_table(rows)


def _matches(pair: Pair, name: str | None) -> bool:
    return name is None or any(
        name.casefold() in key.casefold() for key in (*pair.keys, pair.drafter, pair.family)
    )


def _row(pair: Pair) -> dict[str, Any]:
    """One pair; bytes_on_disk counts target and drafter, None when neither is here."""
    from dflash_mlx.hub import local_path, size_on_disk
    from dflash_mlx.plan import drafter_bytes, target_bytes

    places = {
        "target": local_path(pair.target, revision=pair.target_revision),
        "drafter": local_path(pair.drafter, revision=pair.drafter_revision),
    }
    found = [place for place in places.values() if place is not None]
    return {
        "name": pair.name,
        "aliases": list(pair.aliases),
        "target": pair.target,
        "drafter": pair.drafter,
        "family": pair.family,
        "status": pair.status,
        "note": pair.note,
        "target_revision": pair.target_revision,
        "drafter_revision": pair.drafter_revision,
        "target_4bit": pair.target_4bit,
        "target_8bit": pair.target_8bit,
        "block_size": pair.block_size,
        "taps": list(pair.taps) if pair.taps else None,
        "context": pair.context,
        "licence": pair.licence,
        "gated": pair.gated,
        "target_bytes": target_bytes(pair),
        "drafter_bytes": drafter_bytes(pair),
        "target_path": str(places["target"]) if places["target"] else None,
        "drafter_path": str(places["drafter"]) if places["drafter"] else None,
        "bytes_on_disk": sum(map(size_on_disk, found)) if found else None,
    }


def _on_disk(row: dict[str, Any]) -> str:
    parts = [part for part in ("target", "drafter") if row[f"{part}_path"]]
    if not parts:
        return "no"
    size = console.gigabytes(row["bytes_on_disk"])
    return size if len(parts) == 2 else f"{size} ({parts[0]} only)"


def _sizes(target_bytes: dict[int, int] | None) -> str:
    """Gigabytes of the target's weights at 16, 8 and 4 bits."""
    if target_bytes is None:
        return "unknown"
    return " / ".join(f"{target_bytes[bits] / 1e9:.3g}" for bits in (16, 8, 4))


def _short(spec: str) -> str:
    """A spec as a person reads it: without hash, a wheel's file by its name."""
    return spec.partition("#")[0].rsplit("/", 1)[-1] if spec.startswith("pypi:") else spec


def _ready(row: dict[str, Any]) -> str:
    """Bits of the ready conversions."""
    return " / ".join(str(bits) for bits in (8, 4) if row[f"target_{bits}bit"])


def _known(value: object) -> str:
    """A fact of models.toml, empty where nobody checked it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


Column = tuple[str, Callable[[dict[str, Any]], str]]
_COLUMNS: list[Column] = [
    ("NAME", lambda row: row["name"]),
    ("STATUS", lambda row: row["status"]),
    ("ON DISK", _on_disk),
    ("GB 16/8/4 BIT", lambda row: _sizes(row["target_bytes"])),
    ("FAMILY", lambda row: row["family"]),
    ("TARGET", lambda row: _short(row["target"])),
    ("DRAFTER", lambda row: _short(row["drafter"])),
]
# Shown besides as far as the terminal is wide enough, the most useful first.
_MORE_COLUMNS: list[Column] = [
    ("BLOCK", lambda row: _known(row["block_size"])),
    ("CONTEXT", lambda row: _known(row["context"])),
    ("READY BITS", _ready),
    ("DRAFTER GB", lambda row: f"{row['drafter_bytes'] / 1e9:.3g}" if row["drafter_bytes"] else ""),
    ("GATED", lambda row: _known(row["gated"])),
    ("LICENCE", lambda row: _known(row["licence"])),
    ("READY 4-BIT", lambda row: _known(row["target_4bit"])),
    ("READY 8-BIT", lambda row: _known(row["target_8bit"])),
]


def _show_table(rows: list[dict[str, Any]]) -> None:
    def cells(column: Column) -> list[str]:
        title, cell = column
        return [title, *(cell(row) for row in rows)]

    shown = [cells(column) for column in _COLUMNS]
    # No terminal says its width: then 80.
    room = shutil.get_terminal_size().columns - sum(max(map(len, c)) + 2 for c in shown) + 2
    for column in map(cells, _MORE_COLUMNS):
        width = max(map(len, column)) + 2
        if width <= room:
            shown.append(column)
            room -= width
    console.show_rows(list(zip(*shown, strict=True)), sys.stdout)
