"""Files and folders of a run: each file is the old one or the new one, whole, or a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from dflash_mlx.errors import UsageError

#: how MLX's messages about files begin; others of its errors have nothing to do with the disk
_MLX_FILE_ERRORS = ("[write]", "[save_safetensors]")


def make_folder(folder: Path) -> None:
    """Make a folder unless it is there; UsageError where none can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be a folder ({reason(error)}). Give another.") from None


def partial_of(file: Path) -> Path:
    """Where a file is written before it takes its place."""
    return file.with_name(f"partial-{file.name}")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Where to write what then takes `file`'s place in one step.

    What is written so far is removed when that fails; UsageError when the disk is why.
    """
    partial = partial_of(file)
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, file)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if _is_of_disk(error):
            raise unwritable(file, error) from None
        raise


def unwritable(file: Path, error: BaseException) -> UsageError:
    """The sentence for a file that cannot be written."""
    return UsageError(
        f"{file} cannot be written ({reason(error)}). Free space there, or give another folder."
    )


def reason(error: BaseException) -> str:
    """What the system says, without the path that the sentence around it names."""
    known = error.strerror if isinstance(error, OSError) else None
    return known or str(error).rstrip(".")


def write_text(file: Path, text: str) -> None:
    """Replace a text file in one step; UsageError when it cannot be written."""
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(
    file: Path, arrays: Mapping[str, mx.array], described: Mapping[str, str] | None = None
) -> None:
    """Replace a safetensors file in one step; UsageError when it cannot be written."""
    mx.eval(list(arrays.values()))  # so that errors below are those of writing
    with replacing(file) as partial:
        mx.save_safetensors(str(partial), dict(arrays), dict(described or {}))


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) or (
        isinstance(error, RuntimeError) and str(error).startswith(_MLX_FILE_ERRORS)
    )
