"""Files of the hub's datasets, through huggingface_hub's own cache, token and transfer."""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.hub.repo import commit_of, hub_sentences, progress_bars
from dflash_mlx.hub.request import Request


def fetch_file(repo: str, file: str, request: Request) -> tuple[Path, str]:
    """One file of a dataset, and the commit it is of. Raises SourceError.

    Without a revision the hub's newest commit answers, or the newest on disk where the hub cannot
    be reached.
    """
    from huggingface_hub import hf_hub_download

    with hub_sentences(f"datasets/{repo}", file, request), progress_bars(request.progress):
        path = Path(
            hf_hub_download(
                repo,
                file,
                repo_type="dataset",
                revision=request.revision,
                local_files_only=request.offline,
            )
        )
    return path, commit_of(path, file)
