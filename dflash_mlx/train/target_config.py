"""The config.json of a target on disk, whatever its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_mlx.weights import read_config


def read_target_config(path: Path) -> dict[str, Any]:
    """Of a folder, or of a GGUF file as config.json would state it."""
    if path.suffix.lower() != ".gguf":
        return read_config(path)
    # Here, because the reader's package is slow to import and folders need none of it.
    from dflash_mlx.gguf import open_gguf

    return dict(open_gguf(path).config())
