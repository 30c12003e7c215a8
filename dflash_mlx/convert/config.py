"""The config.json of a result: the source's own, its quantization, and where it all came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_mlx import __version__, hub
from dflash_mlx.convert.plan import Plan
from dflash_mlx.convert.reading import for_mlx_lm
from dflash_mlx.weights import BUNDLED_DRAFTER as DRAFTER

if TYPE_CHECKING:
    from dflash_mlx.convert.check import SelfCheck

#: keys about files and towers that the result does not have
_DROPPED = ("_name_or_path", "vision_config", "audio_config")


def result_config(plan: Plan, hashes: Mapping[str, str], check: SelfCheck) -> dict[str, Any]:
    """config.json, with `conversion` telling source, revision, recipe, hashes and self-check."""
    config = {k: v for k, v in plan.source.config.items() if k not in _DROPPED}
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
        "base_models": list(dict.fromkeys((loads.spec, *hub.base_models(loads.path)))),
        "recipe": plan.decision.recipe,
        "sha256": dict(hashes),
        "remarks": plan.decision.remarks,
        "self_check": check.record(),
    }
    if loads.drafter is not None:
        config["conversion"]["drafter"] = {
            "folder": DRAFTER,
            "source": loads.drafter_spec,
            "revision": loads.drafter_revision,
            "bits": loads.draft_bits,
        }
    return dict(sorted(config.items()))
