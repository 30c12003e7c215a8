"""What a repo of the hub would bring, asked before it is fetched: its config and its bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dflash_mlx.errors import SourceError
from dflash_mlx.hub.repo import REPO, UNWANTED, WANTED, hub_sentences
from dflash_mlx.hub.request import Request


@dataclass(frozen=True)
class Preview:
    """A download that has not begun. `config` is empty for a GGUF file."""

    config: dict[str, Any]
    nbytes: int
    folder: Path  # where the download would go


def preview_repo(request: Request) -> Preview:
    """The config and the size of a repo's files that a fetch would take. Raises SourceError."""
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.hf_api import RepoFile

    found = REPO.fullmatch(request.spec)
    assert found is not None
    repo, file = found["repo"], found["file"]
    config: dict[str, Any] = {}
    with hub_sentences(repo, file, request):
        entries = HfApi().list_repo_tree(repo, recursive=bool(file), revision=request.revision)
        sizes = {e.path: e.size for e in entries if isinstance(e, RepoFile)}
        if not file and "config.json" in sizes:
            path = hf_hub_download(repo, "config.json", revision=request.revision)
            config = _read(Path(path), request)
    chosen = {n: size for n, size in sizes.items() if n == file or (not file and _is_wanted(n))}
    return Preview(config, sum(chosen.values()), Path(constants.HF_HUB_CACHE))


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, p) for p in WANTED) and not any(fnmatch(name, p) for p in UNWANTED)


def _read(path: Path, request: Request) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise SourceError(
            f"The {request.kind} {request.spec} has a broken config.json. "
            "Report it to the repo's owner."
        )
    return config
