"""All layer caches of one sequence, committed and rewound together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache


class CacheStack:
    """One `LayerCache` a layer. `length` is the number of committed tokens of the sequence."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self.layers = list(layers)
        self.length = 0

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    @property
    def pending(self) -> int:
        return self.layers[0].pending if self.layers else 0

    def commit(self, n: int) -> None:
        """Keep the first `n` rows of the last forward in every layer, drop the rest."""
        for layer in self.layers:
            layer.commit(n)
        self.length += n

    def rewind(self, length: int) -> bool:
        """Shorten to `length` tokens; False (and the stack is unusable) when a layer cannot."""
        if length >= self.length:
            return length == self.length
        if not all(layer.rewind(length) for layer in self.layers):
            return False
        self.length = length
        return True

    def arrays(self) -> list[mx.array]:
        return [a for layer in self.layers for a in layer.arrays()]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
