"""GGUF files: the container, the model in it (config and weights), and its tokenizer.

Not to be confused with the `gguf` package, which is imported by its absolute name.
"""

from dflash_mlx.gguf.model import GGUFModel, open_gguf

__all__ = ["GGUFModel", "open_gguf"]
