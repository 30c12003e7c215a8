"""What sequences keep between forwards: written provisionally, kept by `commit`."""

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.cache.context import ContextCache
from dflash_mlx.cache.kv import KVCache
from dflash_mlx.cache.recurrent import DeltaRows, RecurrentCache
from dflash_mlx.cache.stack import CacheStack
from dflash_mlx.cache.window import WindowCache

__all__ = [
    "CacheStack",
    "ContextCache",
    "DeltaRows",
    "KVCache",
    "LayerCache",
    "RecurrentCache",
    "WindowCache",
]
