"""Repos of the hub, through huggingface_hub's own cache, token and transfer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_mlx import paths
from dflash_mlx.errors import SourceError
from dflash_mlx.hub.request import Request, write_whole

# What inference reads. Sub-folders hold other formats of the same weights (original/, onnx/), and
# consolidated*.safetensors repeats the shards.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]
UNWANTED = ["*/*", "consolidated*.safetensors"]

REPO = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(?P<file>.+\.gguf))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch_repo(repo: str, file: str | None, request: Request) -> Path:
    """The snapshot folder of `repo`, or one of its files."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    pinned = request.revision is None or _COMMIT.fullmatch(request.revision)
    with hub_sentences(repo, file, request), progress_bars(request.progress):
        if (pinned or request.offline) and (cached := _cached_repo(repo, file, request.revision)):
            return cached
        if not pinned and not request.offline:
            # The download would quietly take an older copy when the hub cannot be reached.
            HfApi().model_info(repo, revision=request.revision)
        if file:
            return Path(
                hf_hub_download(
                    repo, file, revision=request.revision, local_files_only=request.offline
                )
            )
        snapshot = Path(
            snapshot_download(
                repo,
                revision=request.revision,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                local_files_only=request.offline,
            )
        )
        _refuse_partial(snapshot, repo, request)
    if not request.offline:
        _record_snapshot(snapshot, repo)
    return snapshot


def _cached_repo(repo: str, file: str | None, revision: str | None) -> Path | None:
    """A file that is in the hub's cache, or a snapshot that an earlier fetch completed."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file or "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    if file:
        return Path(found)
    snapshot = Path(found).parent
    try:
        names = json.loads(_snapshot_record(snapshot, repo).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return snapshot if all((snapshot / name).exists() for name in names) else None


def _snapshot_record(snapshot: Path, repo: str) -> Path:
    """JSON list of the files of a snapshot, written when it is complete.

    The hub's cache shows a file that has not arrived yet in the same way as one that never was.
    """
    return paths.home_dir() / "hub" / repo.replace("/", "--") / f"{snapshot.name}.json"


def _record_snapshot(snapshot: Path, repo: str) -> None:
    names = sorted(f.name for f in snapshot.iterdir())
    with suppress(OSError):  # without the record the next use asks the hub again
        write_whole(_snapshot_record(snapshot, repo), json.dumps(names))


def _refuse_partial(snapshot: Path, repo: str, request: Request) -> None:
    """SourceError unless config.json and all shards of the weights are there."""
    names = {f.name for f in snapshot.iterdir()} if snapshot.is_dir() else set()
    weights = {name for name in names if name.endswith(".safetensors")}
    where = f"The {request.kind} {repo} at {snapshot.name[:12]}"
    lacking = sorted(_shards(snapshot, where) - weights)
    lacking += [] if weights else ["*.safetensors"]
    lacking += [] if "config.json" in names else ["config.json"]
    if not lacking:
        return
    if request.offline:
        raise SourceError(
            f"{where} has no {lacking[0]} on this machine. Fetch it once without offline mode."
        )
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(repo, revision=snapshot.name)
    if ggufs := [f"{repo}/{f}" for f in files if f.endswith(".gguf")]:
        raise SourceError(f"{where} has no {lacking[0]}. Name a GGUF file: {', '.join(ggufs)}.")
    raise SourceError(
        f"{where} has no {lacking[0]}. Give a repo with a config.json and safetensors weights."
    )


def _shards(snapshot: Path, where: str) -> set[str]:
    """The files that the index of the weights names; none without an index."""
    index = snapshot / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(
            f"{where} has a broken {index.name}. Report it to the repo's owner."
        ) from None


def commit_of(path: Path, file: str | None) -> str:
    """The commit in .../snapshots/COMMIT[/file]."""
    return path.parents[file.count("/")].name if file else path.name


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub import utils

    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def hub_sentences(repo: str, file: str | None, request: Request) -> Iterator[None]:
    """Turn huggingface_hub's errors into sentences that say what to do."""
    from huggingface_hub import constants, errors

    hub, what = constants.ENDPOINT, f"The {request.kind} {request.spec}"
    token = "sign in with `hf auth login` or set HF_TOKEN"
    transfer = (errors.HTTPError, OSError, RuntimeError)  # RuntimeError: hf-xet's
    try:
        yield
    except errors.GatedRepoError:
        raise SourceError(
            f"{what} is gated: its owner asks you to accept the licence first. "
            f"Do so on {hub}/{repo}, then {token}."
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{what} is no file or folder here, and {hub} shows no repo {repo}. "
            f"Check the spelling; for a private repo {token}."
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(
            f"{what} has no revision {request.revision!r}. Take one of {hub}/{repo}/commits/main."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if request.offline:
            raise SourceError(
                f"{what} is not complete on this machine, and offline mode is on. "
                "Unset HF_HUB_OFFLINE to fetch it."
            ) from None
        raise SourceError(
            f"{what} is not on this machine, and {hub} does not answer "
            f"({_reason(error.__cause__ or error)}). Check the connection and run again."
        ) from error
    except errors.EntryNotFoundError:
        raise SourceError(
            f"{what}: the repo {repo} has no file {file}. "
            f"See {hub}/{repo}/tree/{request.revision or 'main'} for its files."
        ) from None
    except errors.HFValidationError:
        raise SourceError(f"{what} is no valid repo id. A hub repo is written ORG/NAME.") from None
    except transfer as error:
        raise SourceError(
            f"{what} could not be fetched from {hub}: {_reason(error)}. "
            "Run again: files that are complete are kept."
        ) from error


def _reason(error: BaseException) -> str:
    """An error of another library on one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
