"""The folder of a training run: one run's at a time, and nothing else's."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_mlx.draft.checkpoint import UNFINISHED as MARK
from dflash_mlx.errors import UsageError
from dflash_mlx.train.checkpoint import has_state
from dflash_mlx.train.files import make_folder, partial_of, reason, write_text

_NOTE = "This training run is not finished: give the same command again, or delete the folder."


@contextmanager
def taken(folder: Path, *, finished: bool = True) -> Iterator[None]:
    """Have `folder` for one run. What fails before it leaves a file takes the folder away again.

    finished: what is done inside ends the run, and not only one of its stages.

    UsageError for a folder with other things in it than a run's, and while another run has it.
    """
    with locked(folder):
        new = _mark(folder)
        try:
            yield
        except BaseException:
            if new:
                _withdraw(folder)
            raise
        if finished:
            (folder / MARK).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have `folder`, made if need be, against other runs; it goes again if nothing came into it.

    UsageError while another run has it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_folder(folder)
        with _lock(folder):
            yield
    finally:
        if folder in missing:
            _clear(folder)
        for path in missing:
            with suppress(OSError):  # it is not empty, or was never made
                path.rmdir()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({reason(error)}). Give another.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another training run is writing {folder}. Wait for it, or give another folder."
            ) from None
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be locked ({reason(error)}). Give one on another disk."
            ) from None
        yield
    finally:
        os.close(lock)


def _mark(folder: Path) -> bool:
    """Whether the folder is new, and marked now; False for that of an earlier run."""
    names = _names(folder) - {partial_of(folder / MARK).name}  # of a run killed at once
    if has_state(folder) or MARK in names:
        return False
    if names:
        raise UsageError(
            f"{folder} holds other things than a training run ({min(names)}). Give a new or an "
            "empty folder."
        )
    write_text(folder / MARK, json.dumps({"note": _NOTE}) + "\n")
    return True


def _withdraw(folder: Path) -> None:
    """Take the mark away where the run left nothing to go on from."""
    for name in _names(folder):
        _clear(folder / name)
    if _names(folder) == {MARK}:
        (folder / MARK).unlink()


def _clear(folder: Path) -> None:
    """Take away the empty folders in it, and itself where nothing is left."""
    for below, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # it holds something
            os.rmdir(below)


def _names(folder: Path) -> set[str]:
    """What is in the folder, without hidden files: version control and file managers make those."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
