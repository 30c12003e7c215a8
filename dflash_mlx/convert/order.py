"""The order of work: refuse what cannot be, fetch, decide, write, check, and only then finish."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from dflash_mlx import hub, registry
from dflash_mlx.convert.bundled import find_bundled
from dflash_mlx.convert.check import SelfCheck, compare
from dflash_mlx.convert.companions import write_companions
from dflash_mlx.convert.config import DRAFTER, result_config
from dflash_mlx.convert.folder import WorkFolder, check_free
from dflash_mlx.convert.plan import (
    Order,
    Plan,
    Report,
    destination_of,
    fetch,
    list_files,
    make_plan,
    preview,
)
from dflash_mlx.convert.quantize import noise_of
from dflash_mlx.convert.source import open_folder, open_source
from dflash_mlx.convert.write import Shard, sha256_of, write_index, write_json, write_shard
from dflash_mlx.draft.head import ORDER_FILE
from dflash_mlx.errors import DFlashError, SourceError, UsageError
from dflash_mlx.loader import Checkpoint, Groups
from dflash_mlx.weights import read_config, read_weights

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def convert(order: Order, progress: Progress | None = None, *, show_fetch: bool = True) -> Report:
    """Carry out an order. Raises DFlashError, and then leaves nothing behind.

    An interrupted run leaves a folder marked unfinished, which the same order takes up again.
    """
    start = time.monotonic()
    if order.draft_bits not in (None, 4, 8):
        raise UsageError(f"--draft-bits is {order.draft_bits}; a drafter can be held in 4 or 8.")
    found = registry.load_registry().resolve(order.source, drafter=order.drafter)
    if order.draft_bits and found.drafter_spec is None and not _has_drafter(order, found):
        raise UsageError("--draft-bits needs a drafter; name one with --drafter.")
    destination = destination_of(order)
    with _sentences(destination):
        # A link is followed once and for all: what it leads to is written, and removed on failure.
        destination = _resolved(destination)
        taken = _taken(order, destination)
        ahead = preview(order, found, destination)
        if order.dry_run and ahead is not None:
            return replace(ahead, remarks=[*taken, *ahead.remarks])
        loads = fetch(order, found, show_fetch)
        with _no_cache:
            plan = make_plan(order, loads, destination)
            if order.dry_run:
                report = plan.report(start)
                return replace(report, remarks=[*taken, *report.remarks])
            return _carry_out(plan, progress or (lambda done, total: None), start)


def _has_drafter(order: Order, found: registry.Resolved) -> bool:
    """Whether the source is on disk and has a drafter inside."""
    place = hub.local_path(found.target_spec, revision=order.revision or found.target_revision)
    return place is not None and find_bundled(place) is not None


def _resolved(destination: Path) -> Path:
    """What a link to a folder leads to; any other path as it is."""
    if destination.is_symlink() and destination.is_dir():
        return destination.resolve()
    return destination


def _taken(order: Order, destination: Path) -> list[str]:
    """UsageError unless the folder can be written; a dry run, which does not, remarks on it."""
    try:
        check_free(destination)
    except UsageError as error:
        if not order.dry_run:
            raise
        return [str(error)]
    return []


def _carry_out(plan: Plan, progress: Progress, start: float) -> Report:
    folder = WorkFolder.open(plan.destination, plan.fingerprint)
    try:
        resumed = _write_weights(plan, folder, progress)
        for name in write_companions(
            plan.loads.path, folder.path, plan.source.config, plan.tokenizer
        ):
            folder.record(name, sha256_of(folder.path / name))
        check = _self_check(plan)
        _refuse_changed(plan)
        hashes = dict(sorted(folder.hashes.items()))
        # Last, so that no program takes the folder for a model before it is whole.
        write_json(folder.path / "config.json", result_config(plan, hashes, check))
        folder.finish()
    except (DFlashError, OSError):
        folder.discard()
        raise
    except RuntimeError as error:  # MLX's, as of a file that is shorter than its header says
        folder.discard()
        _refuse_changed(plan)
        raise SourceError(
            f"MLX could not convert {plan.loads.path} ({_line(error)}); check disk and memory, "
            "and start again."
        ) from error
    finally:
        folder.close()
    return plan.report(start, resumed_bytes=resumed, hashes=hashes, self_check=check.to_json())


def _refuse_changed(plan: Plan) -> None:
    """SourceError when a file of the source or the drafter is another than when it was opened."""
    if plan.files != list_files(plan.loads.path, plan.loads.drafter):
        raise SourceError(
            f"Files of {plan.loads.path} or of the drafter changed while they were converted; "
            "leave them alone and start again."
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _write_weights(plan: Plan, folder: WorkFolder, progress: Progress) -> int:
    """Write every shard that is not there yet; returns the bytes that were."""
    done = resumed = 0
    total = plan.nbytes

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    def write(shards: list[Shard], below: str, tag: str) -> None:
        nonlocal resumed
        place = folder.path / below
        place.mkdir(exist_ok=True)
        for shard in shards:
            name = f"{below}{shard.name}"
            if folder.has(name):
                resumed += shard.nbytes
                advance(shard.nbytes)
            else:
                folder.record(name, write_shard(place, shard, tag, advance))
        if written := write_index(place, shards):
            folder.record(f"{below}{written}", sha256_of(place / written))

    progress(0, total)
    write(plan.shards, "", "mlx")
    if plan.loads.drafter is not None:
        write(plan.draft_shards, f"{DRAFTER}/", "pt")
        file = folder.path / DRAFTER / "config.json"
        write_json(file, read_config(plan.loads.drafter))
        folder.record(f"{DRAFTER}/config.json", sha256_of(file))
        if (order := plan.loads.drafter / ORDER_FILE).is_file():
            shutil.copyfile(order, folder.path / DRAFTER / ORDER_FILE)
            folder.record(f"{DRAFTER}/{ORDER_FILE}", sha256_of(order))
    return resumed


def _self_check(plan: Plan) -> SelfCheck:
    prefix = plan.decision.prefix
    settings = {k.removeprefix(prefix): v for k, v in plan.decision.quantization.items()}
    groups = Groups(
        {k: v for k, v in settings.items() if not isinstance(v, dict)},
        {k: v for k, v in settings.items() if isinstance(v, dict)},
    )

    def written() -> Checkpoint:
        stored = read_weights(plan.destination)
        weights = {name.removeprefix(prefix): array for name, array in stored.items()}
        return Checkpoint(plan.source.config, groups, weights)

    before, after = open_source(plan.loads.path), open_folder(plan.destination, written)
    kinds = [groups.common, *groups.by_path.values()]
    return compare(before, after, plan.prompt, max(noise_of(dict(kind)) for kind in kinds))


class _NoCache:
    """Give freed arrays back to the system at once: what is held is then what is needed.

    The limit is the process's, so the first user sets it and the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = mx.set_cache_limit(0)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                mx.set_cache_limit(self._before)


_no_cache = _NoCache()


@contextmanager
def _sentences(destination: Path) -> Iterator[None]:
    """Turn the system's errors about files into sentences that say what to do."""
    try:
        yield
    except OSError as error:
        place = error.filename or destination
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UsageError(
                f"There is no room left for {destination} ({error.strerror}); free some or give "
                "a folder on another disk."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise UsageError(
                f"{place} cannot be written or read ({error.strerror}); give a folder of your own."
            ) from error
        reason = error.strerror or str(error)
        raise SourceError(
            f"{place} cannot be read or written ({reason}); check the path and its links."
        ) from error
