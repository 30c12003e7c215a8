"""Which drafter an engine gets, and why; or why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from dflash_mlx import hub
from dflash_mlx.draft.base import Drafter
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import DFlashError
from dflash_mlx.models.base import Target
from dflash_mlx.registry import Resolved


@dataclass
class Drafting:
    """The drafter of an engine (None: it decodes plainly) and what is to be said of it."""

    reason: str
    drafter: Drafter | None = None
    name: str | None = None
    revision: str | None = None
    warnings: list[str] = field(default_factory=list)


def choose_drafter(
    found: Resolved, model: str, target: Target, named: bool, bits: int | None, progress: bool
) -> Drafting:
    """Fetch and open the drafter of `found`.

    named: the person asked for this drafter, so that what keeps it from serving is an error;
    otherwise decoding goes on plainly, and the reason says why.
    """
    if found.drafter_spec is None:
        return Drafting(f"no drafter is known for {model}")
    origin = "the drafter given" if named else f"the registry's drafter for {model}"
    try:
        return _open(found, target, origin, bits, progress)
    except DFlashError as error:
        if named:
            raise
        reason = f"the drafter {found.drafter_spec} could not be used: {error}"
        return Drafting(reason, warnings=[f"Decoding plainly, since {reason}"])


def _open(
    found: Resolved, target: Target, origin: str, bits: int | None, progress: bool
) -> Drafting:
    spec, revision = found.drafter_spec, found.drafter_revision
    assert spec is not None
    fetched = hub.fetch(spec, revision=revision, kind="drafter", progress=progress)
    # float16 overflows in the fused features, so a drafter is bfloat16 beside such a target.
    dtype = mx.float32 if target.dtype == mx.float32 else mx.bfloat16
    drafter = open_drafter(fetched.path, target, dtype=dtype, bits=bits)
    return Drafting(origin, drafter, spec, fetched.revision)
