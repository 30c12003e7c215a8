"""DFlash speculative decoding on MLX: lossless, several tokens a cycle.

Public names are loaded lazily: importing this package imports neither MLX nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Chat": "dflash_mlx.engine",
    "Chunk": "dflash_mlx.engine",
    "DFlashError": "dflash_mlx.errors",
    "Engine": "dflash_mlx.engine",
    "GenerationStats": "dflash_mlx.decode.stats",
    "SamplingParams": "dflash_mlx.decode.sampling",
    "load": "dflash_mlx.engine",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        # The fast BLAS has to be loaded before MLX, which every public name imports.
        import_module("dflash_mlx.machine").prepare_blas()
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'dflash_mlx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
