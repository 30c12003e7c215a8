"""The config.json of a result: the source's own, its quantization, and where it all came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mlx import __version__
from dflash_mlx.convert.plan import Plan, recipe_json
from dflash_mlx.convert.quantize import for_mlx_lm
from dflash_mlx.weights import BUNDLED_DRAFTER as DRAFTER

if TYPE_CHECKING:
    from dflash_mlx.convert.check import SelfCheck

#: keys about files and towers that the result does not have
_DROPPED = ("_name_or_path", "vision_config", "audio_config")

#: Llama 3.1 and 3.2 differ in the first; GGUF files hold the divisors these numbers make
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def result_config(plan: Plan, hashes: Mapping[str, str], check: SelfCheck) -> dict[str, Any]:
    """config.json, with `conversion` telling source, revision, recipe, hashes and self-check."""
    config = {k: v for k, v in plan.source.config.items() if k not in _DROPPED}
    if "rope_freq_factors" in config:
        config = with_llama3_scaling(config)
    config = for_mlx_lm(config)
    quantization = plan.decision.quantization
    if dtype := plan.order.recipe.dtype:
        config["torch_dtype"] = dtype
    # mlx-lm and the hub's own readers look for the second name.
    config |= {"quantization": quantization, "quantization_config": quantization}
    loads = plan.loads
    config["conversion"] = {
        "tool": f"dflash-mlx {__version__}",
        "source": loads.spec,
        "revision": loads.revision,
        "recipe": recipe_json(plan.order.recipe),
        "sha256": dict(hashes),
        "self_check": check.to_json()["worst"],
    }
    if loads.drafter is not None:
        config["conversion"]["drafter"] = {
            "folder": DRAFTER,
            "source": loads.drafter_spec,
            "revision": loads.drafter_revision,
            "bits": plan.order.draft_bits,
        }
    return dict(sorted(config.items()))


def with_llama3_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Llama 3's rope scaling by name where its divisors are exactly that.

    mlx-lm knows the name and not the divisors. Other divisors stay as they are.
    """
    theta, dim = float(config["rope_theta"]), int(config["head_dim"])
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    )
    keep = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        divisors = 1 / (keep + (1 - keep) / factor)
        if np.allclose(divisors, config["rope_freq_factors"], rtol=1e-5):
            rest = {k: v for k, v in config.items() if k != "rope_freq_factors"}
            return {**rest, "rope_scaling": {**_LLAMA3, "factor": factor}}
    return dict(config)
