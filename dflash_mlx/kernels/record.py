"""Kernels that were rejected on this machine, kept in a small file for later processes to show."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dflash_mlx.machine import chip, versions
from dflash_mlx.paths import home_dir, write_whole

MOST = 100  # rejections; the newest stay


class Rejection(NamedTuple):
    """Why a kernel was not used, and of which code and sizes: `variant`."""

    operation: str
    variant: str
    reason: str
    date: str  # and time, of this machine
    machine: str  # chip and versions; another one's rejections say nothing


def record_file() -> Path:
    return home_dir() / "kernels.json"


def keep(operation: str, variant: Hashable, reason: str) -> str | None:
    """Keep a rejection; a sentence where the file cannot be written."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M")
    new = Rejection(operation, repr(variant), reason, now, _machine())
    try:
        with _alone():
            _write([*_without(_read()[0], new), new])
    except OSError as error:
        return f"This could not be kept in {record_file()} ({error.strerror})."
    return None


def drop(operation: str, variant: Hashable) -> None:
    """Forget the rejection of a kernel that has now agreed with its twin."""
    # Where the folder cannot be read or written, doctor says so and shows the rejection once more.
    with suppress(OSError):
        if not record_file().exists():
            return
        with _alone():
            found, _ = _read()
            rest = _without(found, Rejection(operation, repr(variant), "", "", _machine()))
            if len(rest) < len(found):
                _write(rest)


def kept() -> tuple[list[Rejection], str | None]:
    """The rejections on this machine with these versions, and why the file cannot be read."""
    found, fault = _read()
    here = _machine() if found else ""
    return [one for one in found if one.machine == here], fault


@contextmanager
def _alone() -> Iterator[None]:
    """Keep other processes from changing the file between its reading and its writing."""
    folder = record_file().parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _machine() -> str:
    own = versions()
    return f"{chip()}, MLX {own['mlx']}, dflash-mlx {own['dflash-mlx']}"


def _without(found: list[Rejection], other: Rejection) -> list[Rejection]:
    def key(one: Rejection) -> tuple[str, str, str]:
        return one.operation, one.variant, one.machine

    return [one for one in found if key(one) != key(other)]


def _read() -> tuple[list[Rejection], str | None]:
    """All that is kept, nothing of a file that is damaged, and what is wrong with it."""
    file = record_file()
    try:
        entries = json.loads(file.read_text("utf-8"))
        found = [Rejection(**entry) for entry in entries]
        if not all(isinstance(value, str) for one in found for value in one):
            raise TypeError("not all values are text")
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return [], (
            f"{file}, which keeps the kernels that were rejected, cannot be read ({error}); the "
            "next rejection begins it anew."
        )
    return found, None


def _write(found: list[Rejection]) -> None:
    text = json.dumps([one._asdict() for one in found[-MOST:]], indent=1)
    write_whole(record_file(), text + "\n")
