"""Where the package's own files lie (wheel or checkout) and where the cache folder is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _packaged(name: str) -> Path:
    """A top-level file of the project: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parent / name


def metal_dir() -> Path:
    """The folder of the Metal kernel sources."""
    return _packaged("metal")


def registry_file() -> Path:
    """The registry of known target and drafter pairs, models.toml."""
    return _packaged("models.toml")


def assets_dir() -> Path:
    """The folder of the embedded drafter."""
    return _PACKAGE / "assets"


def home_dir() -> Path:
    """The cache folder: $DFLASH_HOME, else ~/.cache/dflash-mlx ($XDG_CACHE_HOME honoured)."""
    if home := os.environ.get("DFLASH_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash-mlx"


def write_whole(file: Path, text: str) -> None:
    """Write a file of the cache folder so that no reader ever sees a part of it; OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as part:
            part.write(text)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
