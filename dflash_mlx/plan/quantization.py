"""How a checkpoint's weights are quantized: the objects of its config.json, checked and read.

MLX's `quantization` has settings for all modules and, by path, those of single ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.quantization import GROUP_SIZES, KEYS, check_settings

#: bits of a weight in MXFP4, with its share of the scale
MXFP4_BITS = 4.25
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}

_SCALE_BITS = {"affine": 32, "mxfp4": 8, "mxfp8": 8, "nvfp4": 8}  # of one group


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the experts are stored as OpenAI publishes them."""
    return _method(config) == "mxfp4"


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's `quantization`, every setting checked; None for floats and published MXFP4.

    CheckpointError for other programs' quantization and for settings that MLX does not have.
    """
    stated = config.get("quantization")
    method = _method(config)
    if stated is None:
        if method is not None and not (method == "mxfp4" and config.get("model_type") == "gpt_oss"):
            raise CheckpointError(
                f"The checkpoint is quantized by {method!s:.80}, which is not supported; plan the "
                "unquantized checkpoint, an MLX or a GGUF conversion."
            )
        return None
    if not isinstance(stated, Mapping) or "bits" not in stated:
        raise CheckpointError(
            f"The config's quantization is {stated!r:.80}, not an object with group_size and "
            "bits; convert the checkpoint again."
        )
    check_settings("the checkpoint", stated)
    for path, own in stated.items():
        if path not in KEYS and isinstance(own, Mapping):
            check_settings(str(path), _of_module(stated, own))
    return stated


def weight_bits(common: Mapping[str, Any], own: Any = None) -> float | None:
    """Bits of a weight with its share of the group's scale and bias; None where it stays a float.

    own: the module's own settings, or False; anything else means those in common.
    """
    if own is False:
        return None
    stated = _of_module(common, own) if isinstance(own, Mapping) else common
    mode = stated.get("mode", "affine")
    return stated["bits"] + _SCALE_BITS[mode] / stated.get("group_size", GROUP_SIZES[mode])


def own_settings(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by module path, as the text model alone names its modules."""
    own = {path: value for path, value in quantization.items() if path not in KEYS}
    return {str(path).removeprefix("language_model."): value for path, value in own.items()}


def uncounted(quantization: Mapping[str, Any] | None, known: Iterable[str]) -> list[str]:
    """A remark on settings for modules that the text model does not have."""
    odd = sorted(own_settings(quantization or {}).keys() - set(known))
    if not odd:
        return []
    return [f"{len(odd)} quantized modules (such as {odd[0]:.80}) are no part of what is counted."]


def _of_module(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    # As MLX reads it: settings without a mode are affine, whatever the others are.
    return {**{key: common[key] for key in KEYS if key in common}, "mode": "affine", **own}


def _method(config: Mapping[str, Any]) -> object:
    """The name of another program's quantization, None without one."""
    foreign = config.get("quantization_config")
    if not foreign:
        return None
    if isinstance(foreign, Mapping):
        return foreign.get("quant_method") or "an unnamed method"
    return foreign
