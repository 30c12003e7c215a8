"""`dflash-mlx models`: the known pairs of target and drafter, and what of them is on disk."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.errors import SourceError

if TYPE_CHECKING:
    from dflash_mlx.registry import Pair


def models(
    name: Annotated[str | None, typer.Argument(help="Only pairs with this in their names.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document.", show_default=False)
    ] = False,
) -> None:
    """List the known models and their drafters."""
    from dflash_mlx.registry import load_registry

    pairs = [pair for pair in load_registry().pairs if _matches(pair, name)]
    if not pairs:
        raise SourceError(f"No known pair has {name!r} in its names. Run `dflash-mlx models`.")
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
    from dflash_mlx.plan import target_bytes

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


def _show_table(rows: list[dict[str, Any]]) -> None:
    head = ("NAME", "STATUS", "ON DISK", "GB 16/8/4 BIT", "FAMILY", "TARGET", "DRAFTER")
    lines = [
        (
            row["name"],
            row["status"],
            _on_disk(row),
            _sizes(row["target_bytes"]),
            row["family"],
            _short(row["target"]),
            _short(row["drafter"]),
        )
        for row in rows
    ]
    console.show_rows([head, *lines], sys.stdout)
