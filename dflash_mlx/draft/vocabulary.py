"""The reduced vocabulary of a drafter: which of the target's tokens its output head knows."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.errors import CheckpointError


def pop_target_ids(
    weights: dict[str, mx.array], config: DFlashConfig, folder: Path
) -> mx.array | None:
    """The target's id of each draft token [draft_vocab_size] int32, evaluated; None if not reduced.

    Takes `d2t` (how far each draft id lies below its target id) and, if it is there, `t2d` (which
    target ids are known) out of `weights`. CheckpointError when they or the head are missing or
    contradict one another.
    """
    size, vocabulary = config.draft_vocab_size, config.vocab_size
    if size is None:
        return None
    assert vocabulary is not None
    for name in ("d2t", "lm_head.weight"):
        if name not in weights:
            raise CheckpointError(
                f"The drafter in {folder} has a vocabulary of {size} out of {vocabulary} tokens, "
                f"but no {name}; fetch the drafter again."
            )
    steps = _integers(weights.pop("d2t"))
    if steps is None or steps.shape != (size,):
        raise _broken(folder, f"is no list of {size} whole numbers")
    ids = np.arange(size) + steps
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise _broken(folder, f"points outside the {vocabulary} tokens of the target")
    if len(np.unique(ids)) < size:
        raise _broken(folder, "gives two draft tokens the same meaning")
    if (known := weights.pop("t2d", None)) is not None:
        mask = np.zeros(vocabulary, bool)
        mask[ids] = True
        if known.shape != mask.shape or (np.array(known.astype(mx.bool_)) != mask).any():
            raise _broken(folder, "contradicts its t2d")
    target_ids = mx.array(ids.astype(np.int32))
    mx.eval(target_ids)
    return target_ids


def _integers(tensor: mx.array) -> np.ndarray | None:
    return np.array(tensor) if mx.issubdtype(tensor.dtype, mx.integer) else None


def _broken(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"Tensor d2t of the drafter in {folder} {how}; use a drafter whose config.json belongs to "
        "its weights."
    )
