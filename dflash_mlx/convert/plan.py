"""What is asked for, and everything that is refused or decided before the first byte is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from jinja2 import TemplateSyntaxError

from dflash_mlx import __version__, hub, registry
from dflash_mlx.convert.bundled import find_bundled
from dflash_mlx.convert.check import PROMPT, PROMPT_TOKENS
from dflash_mlx.convert.disk import Demand, refuse_too_little
from dflash_mlx.convert.jobs import (
    Decision,
    decide,
    expected_bytes,
    plain_jobs,
    recipe_json,
)
from dflash_mlx.convert.quantize import Recipe
from dflash_mlx.convert.source import Source, check_against, open_folder, open_source
from dflash_mlx.convert.write import Shard, make_shards
from dflash_mlx.draft.checkpoint import check_config, check_drafter
from dflash_mlx.errors import CheckpointError, DFlashError, UsageError
from dflash_mlx.hub.preview import Preview
from dflash_mlx.loader import Checkpoint, Groups, refuse_drafter
from dflash_mlx.models import build_target
from dflash_mlx.models.base import Target
from dflash_mlx.tokenizer import Tokenizer, load_tokenizer
from dflash_mlx.weights import UNFINISHED, read_config, read_weights

#: a file of the result; what a stopped run has begun of one is written again
SHARD_BYTES = 500_000_000


@dataclass(frozen=True)
class Order:
    """What to convert and how. `destination` None: a folder here, named by model and recipe."""

    source: str  # alias, folder, hub id, GGUF file
    destination: Path | None = None
    recipe: Recipe = field(default_factory=Recipe)
    drafter: str | None = None  # None: the registry's own for an alias, else none
    draft_bits: int | None = None  # recorded for loading; the drafter itself is kept in bfloat16
    revision: str | None = None
    dry_run: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Report:
    """What was done, or with `dry_run` would be."""

    source: str
    revision: str | None
    destination: str
    recipe: dict[str, Any]
    drafter: str | None
    dry_run: bool
    source_bytes: int | None
    result_bytes: int  # weights of target and drafter; about, when nothing is fetched yet
    download_bytes: int
    modules_quantized: int | None = None
    modules_kept: int | None = None  # quantized in the source already
    resumed_bytes: int = 0
    hashes: dict[str, str] = field(default_factory=dict)
    self_check: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)  # sentences on what is to be known of it
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Loads:
    """Source and drafter on disk."""

    spec: str
    revision: str | None
    path: Path
    drafter: Path | None
    drafter_spec: str | None
    drafter_revision: str | None
    draft_bits: int | None = None  # to hold the drafter in
    bundled: bool = False  # the drafter lies in the source, which was converted with it


@dataclass(frozen=True)
class Plan:
    """All that is decided before the first byte is written."""

    order: Order
    loads: Loads
    destination: Path
    source: Source
    decision: Decision
    shards: list[Shard]
    draft_shards: list[Shard]
    tokenizer: Tokenizer
    prompt: list[int]  # of the self-check
    files: list[tuple[str, int, int]]  # of source and drafter, as `list_files` found them

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in (*self.shards, *self.draft_shards))

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes a byte of the result."""
        jobs = [o for s in (*self.shards, *self.draft_shards) for j in s.jobs for o in j.outputs]
        everything = [
            __version__,
            mx.__version__,
            str(self.loads.path.resolve()),
            asdict(self.order.recipe),
            self.order.shard_bytes,
            self.files,
            [(o.name, o.shape, str(o.dtype)) for o in jobs],
        ]
        return hashlib.sha256(json.dumps(everything).encode()).hexdigest()

    def report(self, start: float, **done: Any) -> Report:
        loads = self.loads
        return Report(
            source=loads.spec,
            revision=loads.revision,
            destination=str(self.destination),
            recipe=self.decision.recipe,
            drafter=loads.drafter_spec,
            dry_run=self.order.dry_run,
            source_bytes=hub.size_on_disk(loads.path),
            result_bytes=self.nbytes,
            download_bytes=0,
            modules_quantized=self.decision.quantized,
            modules_kept=self.decision.kept,
            remarks=self.decision.remarks,
            seconds=round(time.monotonic() - start, 3),
            **done,
        )


def destination_of(order: Order) -> Path:
    """Where the result goes: a name for it here, but never inside of the folder to convert.

    UsageError for a name that is not UTF-8, which no config.json can record, and for a folder
    inside of the source.
    """
    for given in (order.source, order.drafter or "", str(order.destination or "")):
        _refuse_not_utf8(given)
    source = Path(order.source).expanduser()
    if order.destination is not None:
        given = order.destination.expanduser()
        if source.is_dir() and source.resolve() in Path(os.path.realpath(given)).parents:
            raise UsageError(f"{given} lies inside of what is converted. Give a folder elsewhere.")
        return given
    name = order.source.partition("#")[0].rstrip("/").rsplit("/", 1)[-1]
    place = Path()
    if source.is_dir() and (name in ("", ".", "..") or source.samefile(place)):
        source = source.resolve()
        name = source.name or "model"
        if source in (cwd := Path.cwd()).parents or source == cwd:
            place = source.parent
    return place / f"{name.removesuffix('.gguf')}-{order.recipe.label}"


def _refuse_not_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode(errors="surrogateescape").decode(errors="replace")
        raise UsageError(
            f"The name {shown} is not UTF-8, and config.json records names; rename it."
        ) from None


def preview(order: Order, found: registry.Resolved, destination: Path) -> Report | None:
    """Refuse before any download; a report of what is known when something would be fetched."""
    revision = order.revision or found.target_revision
    target = hub.preview(found.target_spec, revision=revision)
    drafter = None
    if found.drafter_spec:
        drafter = hub.preview(found.drafter_spec, revision=found.drafter_revision, kind="drafter")
    ahead = [preview for preview in (target, drafter) if preview is not None]
    if not ahead:
        return None
    result = _refuse_by_config(order, found, target, drafter)
    demands = [Demand("to fetch", preview.folder, preview.nbytes) for preview in ahead]
    if result is None:
        result = int(target.nbytes * _share_of_gguf(order, found)) if target else 0
    result += drafter.nbytes if drafter else 0
    refuse_too_little([*demands, Demand("to write", destination, result)])
    return Report(
        source=found.target_spec,
        revision=revision,
        destination=str(destination),
        recipe=recipe_json(order.recipe),
        drafter=found.drafter_spec,
        dry_run=True,
        source_bytes=target.nbytes if target else None,
        result_bytes=result,
        download_bytes=sum(preview.nbytes for preview in ahead),
    )


def _refuse_by_config(
    order: Order, found: registry.Resolved, target: Preview | None, drafter: Preview | None
) -> int | None:
    """Refuse what config.json alone tells that it cannot be; the bytes of the target that it makes.

    A GGUF file has none, and None is returned.
    """
    place = Path(found.target_spec)
    if target is not None:
        config = target.config
    else:
        local = hub.local_path(found.target_spec, revision=order.revision or found.target_revision)
        config = read_config(local) if local is not None and local.is_dir() else {}
    if not config:
        return None
    refuse_drafter(place, config)
    groups = Groups.read(place, config)
    model = build_target(config)
    result = expected_bytes(config, groups, model, order.recipe)
    if drafter is not None:
        check_config(drafter.config, model, bits=order.draft_bits)
    return result


def _share_of_gguf(order: Order, found: registry.Resolved) -> float:
    """About how large the result will be by the size of a GGUF file, whose name tells its bits."""
    settings = order.recipe.settings
    named = re.search(r"(?:BF|F|Q)(\d+)[^/]*\.gguf$", found.target_spec, re.IGNORECASE)
    stored = float(named[1]) if named else 16.0
    # Of MLX, two 16-bit numbers a group; of GGUF, scales of blocks of 32.
    wanted = settings["bits"] + 32 / settings["group_size"]
    return wanted / (stored if stored > 8 else stored + 0.5)


def fetch(order: Order, found: registry.Resolved, show: bool) -> Loads:
    revision = order.revision or found.target_revision
    target = hub.fetch(found.target_spec, revision=revision, progress=show)
    if found.drafter_spec is None:
        loads = Loads(found.target_spec, target.revision, target.path, None, None, None)
        bundled = find_bundled(target.path)
        if bundled is None:
            return loads
        return replace(
            loads,
            drafter=bundled.path,
            drafter_spec=bundled.spec,
            drafter_revision=bundled.revision,
            draft_bits=order.draft_bits or bundled.bits,
            bundled=True,
        )
    drafter = hub.fetch(
        found.drafter_spec, revision=found.drafter_revision, kind="drafter", progress=show
    )
    return Loads(
        found.target_spec,
        target.revision,
        target.path,
        drafter.path,
        found.drafter_spec,
        drafter.revision,
        order.draft_bits,
    )


def list_files(*places: Path | None) -> list[tuple[str, int, int]]:
    """Name, bytes and time of the last change (ns) of files and of all files of folders."""
    found = [place for place in places if place is not None]
    files = [f for p in found for f in ([p] if p.is_file() else sorted(p.iterdir()))]
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]


def make_plan(order: Order, loads: Loads, destination: Path) -> Plan:
    """Open and check everything; no weight is read yet."""
    files = list_files(loads.path)  # before it is opened
    source = open_source(loads.path)
    model = build_target(source.config)
    check_against(source, model)
    decision = decide(source, model, order.recipe)
    tokenizer = load_tokenizer(loads.path)
    prompt = _prompt(tokenizer, model.vocab_size, loads.path)
    loads, remarks = _checked_drafter(order, loads, model)
    remarks += _of_template(tokenizer)
    decision = replace(decision, remarks=[*decision.remarks, *remarks])
    files += list_files(loads.drafter)
    draft_shards: list[Shard] = []
    if loads.drafter is not None:
        place = loads.drafter
        drafter = open_folder(place, lambda: Checkpoint({}, Groups({}, {}), read_weights(place)))
        draft_shards = make_shards(plain_jobs(drafter, mx.bfloat16), order.shard_bytes)
    shards = make_shards(decision.jobs, order.shard_bytes)
    plan = Plan(
        order, loads, destination, source, decision, shards, draft_shards, tokenizer, prompt, files
    )
    begun = (destination / UNFINISHED).is_file()
    there = hub.size_on_disk(destination) if begun else 0
    refuse_too_little([Demand("to write", destination, max(0, plan.nbytes - there))])
    return plan


def _prompt(tokenizer: Tokenizer, vocab_size: int, path: Path) -> list[int]:
    """Ids of the self-check; CheckpointError when there are none or the model lacks some."""
    prompt = tokenizer.encode(PROMPT)[:PROMPT_TOKENS]
    if not prompt:
        raise CheckpointError(
            f"The tokenizer of {path} makes no tokens of an English sentence, which the self-check "
            "needs; use the tokenizer that belongs to the model."
        )
    if max(prompt) >= vocab_size:
        raise CheckpointError(
            f"The tokenizer of {path} gives id {max(prompt)}, and the model knows ids up to "
            f"{vocab_size - 1}; use the tokenizer that belongs to it."
        )
    return prompt


def _checked_drafter(order: Order, loads: Loads, model: Target) -> tuple[Loads, list[str]]:
    """A drafter that was asked for fits or is refused; one that lies in the source is left out."""
    if loads.drafter is None:
        return loads, []
    try:
        check_drafter(loads.drafter, model, bits=loads.draft_bits)
    except DFlashError as error:
        if not loads.bundled or order.draft_bits:
            raise
        without = replace(loads, drafter=None, drafter_spec=None, drafter_revision=None)
        return without, [f"The drafter inside of the source is not taken along: {error}"]
    return loads, []


def _of_template(tokenizer: Tokenizer) -> list[str]:
    """A remark on a chat template that fails; one that only refuses the messages tried is whole."""
    if not tokenizer.has_template:
        return []
    try:
        tokenizer.render([{"role": "user", "content": PROMPT}])
    except CheckpointError as error:
        return [str(error)]
    except UsageError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            return [str(error)]
    return []
