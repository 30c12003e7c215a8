"""Which drafter an engine gets, and why; or why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import mlx.core as mx

from dflash_mlx import hub, registry
from dflash_mlx.draft.base import Drafter
from dflash_mlx.draft.checkpoint import open_drafter, unfinished
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.registry import Resolved
from dflash_mlx.weights import bundled_drafter


@dataclass
class Drafting:
    """The drafter of an engine (None: it decodes plainly) and what is to be said of it."""

    reason: str
    drafter: Drafter | None = None
    name: str | None = None
    revision: str | None = None
    warnings: list[str] = field(default_factory=list)


def choose_drafter(
    found: Resolved,
    path: Path,
    model: str,
    target: Target,
    named: bool,
    bits: int | None,
    progress: bool,
) -> Drafting:
    """Fetch and open the drafter of `found`, else the one a conversion put beside the target.

    path: the target's folder or file.
    named: the person asked for this drafter, so that what keeps it from serving is an error;
    otherwise decoding goes on plainly, and the reason says why.
    """
    spec, origin = found.drafter_spec, f"the registry's drafter for {model}"
    if named:
        origin = "the drafter given"
    elif spec is None:
        try:
            bundled = bundled_drafter(path)
        except DFlashError as error:
            return _plainly(f"what is beside {model} cannot be told: {error}")
        if bundled is not None:
            if not bundled[0].is_dir():
                return _plainly(
                    f"the drafter beside {model} is gone: there is no folder {bundled[0]}; "
                    "convert the model again, or give a drafter."
                )
            spec, origin = str(bundled[0]), f"the drafter beside {model}"
            bits = bits or bundled[1]
    if spec is None:
        return _none_known(model, path)
    try:
        fetched = hub.fetch(
            spec, revision=found.drafter_revision, kind="drafter", progress=progress
        )
        drafter = open_drafter(fetched.path, target, dtype=dtype_beside(target), bits=bits)
    except DFlashError as error:
        if named:
            raise
        return _plainly(f"the drafter {spec} could not be used: {error}")
    warnings = []
    if not named and found.pair is not None:
        warnings = found.pair.disagreements(drafter.taps, drafter.block_size)
    if unfinished(fetched.path):
        warnings.append(f"{spec} holds the best drafter so far of a run that is not finished.")
    return Drafting(origin, drafter, spec, fetched.revision, warnings)


def dtype_beside(target: Target) -> mx.Dtype:
    """Of a drafter: float16 overflows in the fused features, so it is bfloat16 there, too."""
    return mx.float32 if target.dtype == mx.float32 else mx.bfloat16


def _plainly(reason: str) -> Drafting:
    return Drafting(reason, warnings=[f"Decoding plainly, since {reason}"])


def _none_known(model: str, path: Path) -> Drafting:
    """Plain decoding; a fine-tune of a known target is offered that one's drafter."""
    reason = f"no drafter is known for {model}"
    if offer := registry.offer(model, hub.base_models(path)):
        reason += f"; {offer}"
        return Drafting(reason, warnings=[f"Decoding plainly: {reason}."])
    return Drafting(reason)


def checked_block_size(block_size: int | Literal["auto"] | None, drafter: Drafter | None) -> int:
    """Rows a cycle verifies: 1 without a drafter, else at most the trained block.

    "auto" and None are the trained block. UsageError for a size that does not fit.
    """
    if drafter is None:
        return 1
    if block_size in (None, "auto"):
        return drafter.block_size
    if type(block_size) is not int or not 1 <= block_size <= drafter.block_size:
        raise UsageError(
            f"Block size {block_size} does not fit this drafter, which was trained for blocks of "
            f"{drafter.block_size}. Give 1 (plain decoding) to {drafter.block_size}."
        )
    return block_size


def check_loading(
    name: str, draft: str | None, draft_bits: int | None, block_size: int | Literal["auto"] | None
) -> None:
    """UsageError for what of `engine.load` is wrong by itself, before anything is fetched."""
    for what, given in (("model's", name), ("drafter's", "" if draft is None else draft)):
        if not isinstance(given, str):
            raise UsageError(
                f"The {what} name is {given!r:.80}. Give a hub id or a folder as text."
            )
    if block_size not in (None, "auto") and type(block_size) is not int:
        raise UsageError(f"block_size is {block_size!r:.80}. Give a whole number, 'auto' or None.")
    if draft_bits not in (None, 4, 8):
        raise UsageError(f"draft_bits is {draft_bits!r}. Drafters are quantized to 4 or 8 bits.")
    if draft is None and (draft_bits or block_size not in (None, 1, "auto")):
        raise UsageError(
            "Block size and draft bits need a drafter. Leave them out to decode plainly."
        )
    if draft is not None and not draft.strip():
        raise UsageError("The drafter's name is empty. Give a hub id or a folder.")
