"""One run of a compiled kernel over numpy arrays: bindings, schedules, faults and their lines."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from metal_cpu.build import kernel_library, runtime
from metal_cpu.lines import lines_at
from metal_cpu.source import Capture, to_cpp

# Orders of threads and threadgroups: forward, reverse, and two shuffled ones.
SCHEDULES = (0, 1, 2, 3)
_SMALL = 4096  # threads of a launch that take less time than the compiler's optimisation
_seconds = 60.0  # of processor time a launch may take


class Mode(Enum):
    """CHECK watches every access. FAST runs optimised code, only guard pages and poison watch."""

    CHECK = "check"
    FAST = "fast"


class Fault(Exception):
    """What the kernel did wrong; the text begins with the kind."""


@dataclass
class Binding:
    """One buffer: `memory` is flat and C-contiguous; outputs are written back into it."""

    name: str
    memory: np.ndarray
    writable: bool = False
    initialised: bool = True
    misalignment: int = 0  # of its first byte, to 16


class _HostBuffer(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("granule", ctypes.c_uint32),
        ("misalignment", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
        ("name", ctypes.c_char * 48),
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A launch inside that takes longer is a fault."""
    global _seconds
    before, _seconds = _seconds, seconds
    try:
        yield
    finally:
        _seconds = before


def run(call: Capture, bindings: list[Binding], mode: Mode, schedule: int) -> None:
    """Run one dispatch, outputs in place. Fault when the kernel breaks a rule."""
    threads = int(np.prod(np.minimum(call.grid, call.threadgroup)))
    if threads > 1024:
        raise Fault(f"threadgroup of {threads} threads; Metal has 1024")
    if len(bindings) > 31:
        raise Fault(f"{len(bindings)} buffers; Metal has 31")
    small = int(np.prod(call.grid)) <= _SMALL
    library = kernel_library(to_cpp(call.source), check=mode is Mode.CHECK, small=small)
    buffers = (_HostBuffer * len(bindings))()
    for buffer, b in zip(buffers, bindings, strict=True):
        assert b.memory.ndim == 1
        assert b.memory.flags.c_contiguous
        buffer.memory, buffer.size = b.memory.ctypes.data, b.memory.nbytes
        buffer.granule, buffer.misalignment = b.memory.itemsize, b.misalignment
        buffer.writable, buffer.initialised = b.writable, b.initialised
        buffer.name = b.name.encode()[:47]
    message, codes = ctypes.create_string_buffer(1024), (ctypes.c_void_p * 2)()
    size = np.minimum(call.grid, call.threadgroup)
    failed = runtime().msl_launch(
        library.msl_entry,
        buffers,
        len(bindings),
        (ctypes.c_uint32 * 3)(*call.grid),
        (ctypes.c_uint32 * 3)(*(int(n) for n in size)),
        int(mode is Mode.CHECK),
        schedule,
        ctypes.c_double(_seconds),
        message,
        codes,
    )
    if failed:
        lines = [line for code in codes if code and (line := _line_of(library, code))]
        raise Fault(_with_source(message.value.decode(), lines, call.source))


def _line_of(library: ctypes.CDLL, code: int) -> int | None:
    """The kernel's source line of a code address; None where the compiler named none."""
    base = ctypes.cast(library._handle, ctypes.POINTER(ctypes.c_size_t))[0]
    found = lines_at(Path(library._name), code - base - 1, "kernel")
    return found[-1] if found else None


def _with_source(message: str, lines: list[int], source: str) -> str:
    text = source.splitlines()
    lines = lines + [int(n) for n in re.findall(r"line (\d+)", message)]
    shown = [f"\n  line {n}: {text[n - 1].strip()}" for n in lines if 0 < n <= len(text)]
    return message + "".join(shown)
