"""What mlx-lm would compute otherwise than this program from the same folder, in sentences.

Both programs' own modules are run on the same numbers, so the remarks are true of the version here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.layers.rope import rope_scaling, rope_type

#: where the sample's positions begin: far enough for small differences of period to show
_OFFSET, _ROWS = 500, 8
_TOLERANCE = 1e-3


def remarks(config: Mapping[str, Any], model: nn.Module, reference: nn.Module) -> list[str]:
    """Sentences about a model and mlx-lm's own of the same config; both may have unset weights."""
    pairs = list(zip(_layers(model), _layers(reference), strict=True))
    found = []
    if turned := [i for i, (ours, theirs) in enumerate(pairs) if _turns_otherwise(ours, theirs)]:
        found.append(_sentence("rotates positions", turned, _unread_rope_keys(config)))
    if bent := [i for i, (ours, theirs) in enumerate(pairs) if _activates_otherwise(ours, theirs)]:
        found.append(
            _sentence("computes the experts' activation", bent, "swiglu_alpha and swiglu_limit")
        )
    return found


def _sentence(what: str, layers: list[int], keys: str) -> str:
    where = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    because = f", since it does not read {keys}" if keys else ""
    return (
        f"mlx-lm {version('mlx-lm')} {what} otherwise than this program in {where}{because}; "
        "the folder answers as its source here, and otherwise there."
    )


def _layers(model: Any) -> list[Any]:
    return list(model.layers if hasattr(model, "layers") else model.model.layers)


def _turns_otherwise(ours: Any, theirs: Any) -> bool:
    if "self_attn" not in ours:  # a recurrent layer
        return False
    ours, theirs = ours.self_attn, theirs.self_attn
    width = ours.o_proj.weight.shape[-1] // ours.heads
    return _differ(ours.rope, lambda x, offset: theirs.rope(x, offset=offset), width)


def _differ(ours: Callable[..., Any], theirs: Callable[..., Any], width: int) -> bool:
    sample = np.random.default_rng(0).standard_normal((1, 1, _ROWS, width)).astype(np.float32)
    rotated = [np.array(rope(mx.array(sample), _OFFSET)) for rope in (ours, theirs)]
    return bool(np.abs(rotated[0] - rotated[1]).max() > _TOLERANCE)


def _activates_otherwise(ours: Any, theirs: Any) -> bool:
    """gpt_oss alone has settings of its activation."""
    experts = getattr(ours.mlp, "experts", None)
    if experts is None or not hasattr(theirs.mlp, "experts"):
        return False
    gate, up = mx.linspace(-20, 20, 64), mx.linspace(20, -15, 64)
    found = experts.activation(gate, up) - theirs.mlp.experts.activation(up, gate)
    return bool(np.abs(np.array(found)).max() > _TOLERANCE)


def _unread_rope_keys(config: Mapping[str, Any]) -> str:
    """The settings that mlx-lm is known to pass over, as far as this config has them."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) and nested else config
    scaling = {} if str(config["model_type"]).startswith("gemma4") else rope_scaling(text)
    if config["model_type"] == "qwen3_moe" and rope_type(scaling) != "default":
        return "rope_scaling of this family"
    keys = ["rope_freq_factors"] if text.get("rope_freq_factors") is not None else []
    if rope_type(scaling) == "yarn" and scaling.get("truncate") is False:
        keys.append("rope_scaling.truncate")
    return " and ".join(keys)
