"""run.json: every setting of a training run, versions, and hashes of what it was trained on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# This one comes first: it has to act before MLX is imported.
from dflash_mlx import fast_blas

# isort: split
import mlx.core as mx

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.engine import Engine
from dflash_mlx.loader import dtype_name
from dflash_mlx.machine import versions
from dflash_mlx.train.corpus import Text, digest
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.start import Start
from dflash_mlx.train.trainer import Task

#: what rounding depends on
_PLACE = ("versions", "machine", "blas", "device")


def described_run(
    order: Order, engine: Engine, task: Task, recipe: Recipe, start: Start
) -> dict[str, Any]:
    """What run.json holds; it reads the files of prompts and answers for their hashes."""
    return {
        "target": task.described["target"],
        "target_revision": order.revision,
        "init": order.init,
        "init_revision": start.revision,
        "init_content": start.content,
        "drafter": _drafter(task.config),
        "recipe": recipe.as_json(),
        "gamma": recipe.decay if recipe.weights == "decay" else None,
        "prompts": _files(order.prompts),
        "answers": {
            "files": _files(order.answers),
            "temperature": order.temperature,
            "max_answer": order.max_answer,
            "thinking": order.thinking,
            "slots": order.slots,
        },
        "features": {
            "dtype": order.cache_dtype,
            "online": order.online,
            "top_k": order.top_k,
            "cache_limit_gb": order.cache_limit_gb,
        },
        "memory_gb": order.memory_gb,
        "pass_blocks_asked": order.recipe.pass_blocks,
        "dtype": dtype_name(engine.target.dtype),
        "versions": versions(),
        "machine": f"{platform.machine()} {platform.system()}",
        "blas": fast_blas.CHOICE.name,
        "device": str(mx.default_device()),
        "trained": _described(task.trained),
        "held_out": _described(task.held_out),
    }


def described_task(
    order: Order,
    target_name: str,
    stored: Mapping[str, Any],
    trained: Sequence[Text],
    held: Sequence[Text],
    start: Start,
) -> dict[str, Any]:
    """What a run's state keeps besides the recipe; another run has something else in it."""
    return {
        "target": target_name,
        "config": dict(stored),
        "init": order.init,
        "init_revision": start.revision,
        "trained": digest(trained),
        "held_out": digest(held),
        "features": order.cache_dtype,
    }


def earlier_parts(file: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """What parts of the run before this one ran on, from its run.json, where it was another place.

    run: what is known of this part. Arithmetic may differ between versions, BLAS and machines.
    """
    try:
        stored = json.loads(file.read_text("utf-8"))
        before = list(stored.get("earlier") or [])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []  # it is written anew, and nothing else depends on it
    place, ours = (_place(r) for r in (stored, run))
    return before if place == ours else [*before, place]


def _place(run: dict[str, Any]) -> dict[str, Any]:
    features = run.get("features")
    online = features.get("online") if isinstance(features, dict) else None
    place = {key: run.get(key) for key in _PLACE}
    return {**place, "pass_blocks": _recipe(run).get("pass_blocks"), "online": online}


def _recipe(run: dict[str, Any]) -> dict[str, Any]:
    recipe = run.get("recipe")
    return recipe if isinstance(recipe, dict) else {}


def blocks_before(file: Path, asked: int) -> int | None:
    """Blocks a pass of the run's part before this one, from its run.json, if asked for as many.

    Going on with as many sums alike, also where there is more memory now.
    """
    try:
        stored = json.loads(file.read_text("utf-8"))
        known = _recipe(stored).get("pass_blocks")
        same = stored.get("pass_blocks_asked") == asked
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    whole = isinstance(known, int) and not isinstance(known, bool)
    return known if same and whole and known > 0 else None


def _drafter(config: DFlashConfig) -> dict[str, Any]:
    """Its shape: windows and causal hold one entry a layer, selector_rank is None for v1."""
    return {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "taps": list(config.target_layer_ids),
        "windows": list(config.windows),
        "causal": list(config.causal),
        "selector_rank": config.parts.selector_rank if config.parts else None,
        "mask_token_id": config.mask_token_id,
    }


def _files(files: Iterable[Path]) -> list[dict[str, str]]:
    return [
        {"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in files
    ]


def _described(texts: Sequence[Text]) -> dict[str, Any]:
    return {
        "texts": len(texts),
        "answer_tokens": sum(len(text.answer_ids) for text in texts),
        "sha256": digest(texts),
    }
