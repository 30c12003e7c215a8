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
_LENGTH = 8  # bytes of the number in front: the header's length


def damaged(file: Path, why: object) -> CheckpointError:
    """What to tell of a shard whose content cannot be used."""
    return CheckpointError(
        f"The cached features in {file} are damaged ({why}); delete that file and start again."
    )


class Shard:
    """One file, checked against its header now; its arrays are mapped when they are asked for.

    Nothing stays open: a corpus may have more shards than a process may have files.
    """

    def __init__(self, file: Path) -> None:
        """CheckpointError when the file cannot be read, is cut short or is no safetensors file."""
        self.file = file
        try:
            self._as_it_was = _state(file)
            size = self._as_it_was[0]
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH), "little")
                if not 0 < length <= size - _LENGTH:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(stream.read(length))
            self._start = _LENGTH + length
            self._entries = {k: v for k, v in header.items() if k != "__metadata__"}
            end = max((self._check(name) for name in self._entries), default=0)
            if self._start + end != size:
                raise ValueError(f"{size - self._start} bytes of data, not {end}")
        except OSError as error:
            raise _unreadable(file, error) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(file, error) from None

    def _check(self, name: str) -> int:
        """Where an array ends; ValueError when its bytes are not those of its shape."""
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        bits, _ = _TYPES[entry["dtype"]]
        numbers = [start, stop, *entry["shape"]]
        if not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise ValueError(f"{name} has the offsets {start}, {stop} and shape {entry['shape']}")
        if stop - start != math.prod(entry["shape"]) * bits().itemsize:
            raise ValueError(f"{name} has {stop - start} bytes for the shape {entry['shape']}")
        return stop

    def names(self) -> list[str]:
        """Of all arrays."""
        return list(self._entries)

    def read(self, name: str) -> mx.array:
        """One array, copied out of the map; KeyError when it is not there.

        CheckpointError when the file is gone or has become shorter.
        """
        entry = self._entries[name]
        bits, dtype = _TYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        offset = self._start + entry["data_offsets"][0]
        try:
            if _state(self.file) != self._as_it_was:
                raise ValueError("it was changed while it was in use")
            if 0 in shape:  # numpy maps no empty array
                return mx.zeros(shape, dtype)
            mapped = np.memmap(self.file, bits, "r", offset, shape)
        except OSError as error:
            raise _unreadable(self.file, error) from None
        except ValueError as error:
            raise damaged(self.file, error) from None
        # Data may begin at any byte; MLX takes whole numbers.
        array = mx.array(mapped if mapped.flags.aligned else mapped.copy())
        return array if array.dtype == dtype else array.view(dtype)


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    """The file may be whole: nothing is to be deleted."""
    return CheckpointError(f"The cached features in {file} cannot be read ({error.strerror}).")
