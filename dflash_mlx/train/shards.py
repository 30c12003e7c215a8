"""Safetensors files read through a memory map, an array at a time.

The safetensors package maps files too, but gives bfloat16 to PyTorch only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError

#: the format's names -> how numpy reads them, and MLX's type of the same bits
_TYPES = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
    "I32": (np.int32, mx.int32),
}


def damaged(file: Path, why: object) -> CheckpointError:
    """What to tell of a shard that cannot be used."""
    return CheckpointError(
        f"The cached features in {file} are damaged ({why}); delete that file and start again."
    )


class Shard:
    """One file. Its arrays are checked against its size now, and read when they are asked for."""

    def __init__(self, file: Path) -> None:
        """CheckpointError when the file is cut short or is no safetensors file."""
        self.file = file
        try:
            self._bytes = np.memmap(file, np.uint8, "r")
            size = int(self._bytes[:8].view(np.uint64)[0])
            header = json.loads(self._bytes[8 : 8 + size].tobytes())
            self._data = self._bytes[8 + size :]
            self._entries = {k: v for k, v in header.items() if k != "__metadata__"}
            ends = [self._check(name) for name in self._entries]
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise damaged(file, error) from None
        if max(ends, default=0) != len(self._data):
            raise damaged(file, f"{len(self._data)} bytes of data, not {max(ends, default=0)}")

    def _check(self, name: str) -> int:
        """Where an array ends; ValueError when its bytes are not those of its shape."""
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        bits, _ = _TYPES[entry["dtype"]]
        if not 0 <= start <= stop or stop - start != math.prod(entry["shape"]) * bits().itemsize:
            raise ValueError(f"{name} has {stop - start} bytes for the shape {entry['shape']}")
        return int(stop)

    def names(self) -> list[str]:
        """Of all arrays."""
        return list(self._entries)

    def read(self, name: str) -> mx.array:
        """One array, copied out of the map; KeyError when it is not there."""
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        bits, dtype = _TYPES[entry["dtype"]]
        mapped = self._data[start:stop].view(bits).reshape(entry["shape"])
        array = mx.array(mapped if mapped.flags.aligned else mapped.copy())
        return array if array.dtype == dtype else array.view(dtype)
