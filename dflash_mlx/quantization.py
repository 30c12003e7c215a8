"""What MLX's quantization settings can be, and their check; needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mlx.errors import CheckpointError

#: of each mode the group size it has where none is stated
GROUP_SIZES = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
#: what states how a module is quantized
KEYS = ("group_size", "bits", "mode")

_MOST = {"bits": 16, "group_size": 65536}


def check_settings(place: str, settings: Mapping[str, Any]) -> None:
    """CheckpointError unless mode is MLX's, and bits and group size whole numbers in reason."""
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in GROUP_SIZES:
        raise CheckpointError(
            f"The quantization of {place:.200} has mode {mode!r:.80}; MLX knows "
            f"{', '.join(GROUP_SIZES)}. Convert the checkpoint again."
        )
    for key, most in _MOST.items():
        value = settings.get(key, GROUP_SIZES[mode])
        if type(value) is not int or not 0 < value <= most:
            raise CheckpointError(
                f"The quantization of {place:.200} has {key} {value!r:.80}, which is no whole "
                f"number from 1 to {most}; convert the checkpoint again."
            )
