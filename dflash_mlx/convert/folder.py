"""The folder a conversion writes: marked unfinished until it is whole, resumable, removable."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from dflash_mlx.convert.write import PART, sha256_of, write_json
from dflash_mlx.errors import UsageError
from dflash_mlx.weights import UNFINISHED

_NOTE = "This conversion is not finished: run the same command again, or delete the folder."


class WorkFolder:
    """An opened destination. `hashes` are of the finished files, by path below the folder."""

    def __init__(self, path: Path, fingerprint: str, hashes: dict[str, str]) -> None:
        self.path, self.hashes, self._fingerprint = path, hashes, fingerprint
        self._made = False
        self._lock: int | None = None

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> WorkFolder:
        """Make the folder, or take up an unfinished one of the same `fingerprint`.

        UsageError when the folder holds anything else, or another conversion is at work in it.
        """
        folder = cls(path, fingerprint, {})
        content = check_free(path)
        if content is not None:
            if content.get("fingerprint") != fingerprint:
                raise UsageError(
                    f"{path} holds an unfinished conversion of another source or with other "
                    "options; delete it or give another folder."
                )
            folder.hashes = dict(content.get("files", {}))
        else:
            folder._made = not path.exists()
            path.mkdir(exist_ok=True)
        folder._take_lock()
        folder._save()
        return folder

    def has(self, name: str) -> bool:
        """Whether a file was finished by an earlier run and is still what it was."""
        file = self.path / name
        return name in self.hashes and file.is_file() and sha256_of(file) == self.hashes[name]

    def record(self, name: str, sha256: str) -> None:
        """A file is finished; it will not be written again."""
        self.hashes[name] = sha256
        self._save()

    def finish(self) -> None:
        """Nothing is missing any more: take the mark away."""
        for part in self.path.rglob(f"*{PART}"):
            part.unlink()
        (self.path / UNFINISHED).unlink()
        self.close()

    def discard(self) -> None:
        """Remove what was written, and the folder unless it was there before."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if not self._made and not self.path.exists():
            self.path.mkdir()

    def close(self) -> None:
        """Let another process take the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UsageError(
                f"Another conversion is writing {self.path}; wait for it or give another folder."
            ) from None

    def _save(self) -> None:
        content = {"note": _NOTE, "fingerprint": self._fingerprint, "files": self.hashes}
        write_json(self.path / UNFINISHED, content)


def check_free(path: Path) -> dict[str, object] | None:
    """The mark of an unfinished conversion there; None when nothing is there at all.

    UsageError for a folder that holds anything else, and without a folder to make it in.
    """
    if (path / UNFINISHED).is_file():
        try:
            content = json.loads((path / UNFINISHED).read_text("utf-8"))
        except (ValueError, RecursionError):
            content = {}
        return content if isinstance(content, dict) else {}
    if path.is_dir() and not any(path.iterdir()):
        return None
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already; delete it or give another folder.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder {path.parent} does not exist; make it or give another.")
    return None
