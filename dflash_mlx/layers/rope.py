"""Rotary position embedding, half-split pairs, with the scalings that checkpoints name.

Frequencies follow the definitions of transformers' modeling_rope_utils, computed in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError

_Periods = np.ndarray  # [D/2] float64: 1 / angular frequency, positions per radian


class Rope:
    """Rotates [B, H, T, D] by absolute positions offset .. offset + T - 1 (an offset [B], or one).

    With fewer periods than D / 2 the dimensions behind those stay as they are.
    `magnitude` multiplies the rotated ones (YaRN's cos/sin factor; 1 for every other kind). With
    `theta`, unscaled periods are made by MLX itself, so logits equal mlx-lm's to the last bit.
    """

    def __init__(
        self,
        periods: Sequence[float] | np.ndarray,
        magnitude: float = 1.0,
        *,
        theta: float | None = None,
    ) -> None:
        self.periods = mx.array(np.asarray(periods, dtype=np.float32))
        self.dims = 2 * self.periods.shape[0]
        self.magnitude = magnitude
        self.theta = theta

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        if self.magnitude != 1.0:
            turned, kept = x[..., : self.dims] * self.magnitude, x[..., self.dims :]
            x = mx.concatenate([turned, kept], axis=-1) if kept.size else turned
        return mx.fast.rope(
            x,
            self.dims,
            traditional=False,
            base=self.theta,
            scale=1.0,
            offset=offset,
            freqs=self.periods if self.theta is None else None,
        )


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The rotary embedding a HF config describes, over all `head_dim` dimensions.

    Reads rope_theta (top level or in rope_parameters), rope_scaling or rope_parameters (type
    default, linear, llama3, yarn) and rope_freq_factors (GGUF: a divisor a frequency).
    CheckpointError for a missing key or an unknown type.
    """
    scaling = rope_scaling(config)
    kind = rope_type(scaling)
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"The config's rope type {kind!r:.80} is not supported; use a checkpoint with one of "
            f"{', '.join(_SCALINGS)}."
        )
    for source in (scaling, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"The config's partial_rotary_factor {source['partial_rotary_factor']} is not "
                "supported; use a checkpoint that rotates whole heads."
            )
    theta = _number({"rope_theta": rope_theta(config, scaling)}, "rope_theta")
    periods = theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factors = _freq_factors(config, head_dim // 2)
    if kind == "default" and factors is None:
        return Rope(periods, theta=theta)
    periods, magnitude = _SCALINGS[kind](periods, {**scaling, "rope_theta": theta}, config)
    return Rope(periods if factors is None else periods * factors, magnitude)


def proportional_rope(scaling: Mapping[str, Any], head_dim: int) -> Rope:
    """Gemma 4's kind: the first partial_rotary_factor of the pairs turn, the others stand still.

    Unlike a partial rope of `head_dim * partial_rotary_factor` dimensions, pairs and periods are
    those of the whole head.
    """
    share = _number(scaling, "partial_rotary_factor", 1.0)
    if share > 1.0:
        raise CheckpointError(
            f"The config's partial_rotary_factor {share} is more than 1; correct config.json."
        )
    turning = int(share * head_dim // 2)
    pairs = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    periods = _number(scaling, "rope_theta") ** pairs * _number(scaling, "factor", 1.0)
    return Rope(np.where(np.arange(head_dim // 2) < turning, periods, np.inf))


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters or rope_scaling of the config; empty when neither is set."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        if value := config.get(key):
            if not isinstance(value, Mapping):
                raise CheckpointError(f"The config's {key} is no object; correct config.json.")
            found.append(dict(value))
    if len(found) == 2 and rope_type(found[0]) != rope_type(found[1]):
        raise CheckpointError(
            f"The config's rope_parameters say {rope_type(found[0])!r} and its rope_scaling "
            f"{rope_type(found[1])!r}; remove the one that is wrong from config.json."
        )
    return found[0] if found else {}


def rope_type(scaling: Mapping[str, Any]) -> str:
    """The scaling's kind; older configs call the key `type`."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def rope_theta(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Any:
    """rope_theta from rope_parameters, else from the top level."""
    for source in (scaling, config):
        if source.get("rope_theta") is not None:
            return source["rope_theta"]
    raise CheckpointError("The config has no rope_theta; add the value the model was made with.")


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(
            f"The config's rope scaling has no {key}; add the value the model was made with."
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise CheckpointError(
            f"The config's {key} is {value!r:.80}, not a positive number; correct config.json."
        )
    return float(value)


def _freq_factors(config: Mapping[str, Any], count: int) -> np.ndarray | None:
    factors = config.get("rope_freq_factors")
    if factors is None:
        return None
    numbers = isinstance(factors, list) and all(
        isinstance(factor, int | float) and 0 < factor < math.inf for factor in factors
    )
    if not numbers and not isinstance(factors, np.ndarray):
        raise CheckpointError(
            f"The config's rope_freq_factors are {factors!r:.80}, not numbers above zero; correct "
            "config.json."
        )
    if len(factors) != count:
        raise CheckpointError(
            f"The checkpoint has {len(factors)} rope frequency factors for {count} frequencies; "
            "fetch the checkpoint again."
        )
    return np.asarray(factors, dtype=np.float64)


def original_length(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Positions before the extension; transformers falls back to max_position_embeddings."""
    key = "original_max_position_embeddings"
    for source in (scaling, config):
        if source.get(key) is not None:
            return _number(source, key)
    return _number(config, "max_position_embeddings")


def _default(
    periods: _Periods, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[_Periods, float]:
    return periods, 1.0


def _linear(
    periods: _Periods, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[_Periods, float]:
    return periods * _number(scaling, "factor"), 1.0


def _llama3(
    periods: _Periods, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[_Periods, float]:
    """Llama 3.1: slow frequencies stretched by factor, fast ones kept, between them a blend."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"The config's low_freq_factor {low} is not below its high_freq_factor {high}; correct "
            "config.json."
        )
    turns = original_length(scaling, config) / (2 * math.pi * periods)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return periods / (keep + (1.0 - keep) / factor), 1.0


def _yarn(
    periods: _Periods, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[_Periods, float]:
    """YaRN (arXiv 2309.00071, section 3): a ramp over dimensions between kept and stretched."""
    factor = _number(scaling, "factor")
    theta, original = scaling["rope_theta"], original_length(scaling, config)
    dims = 2 * len(periods)
    if theta <= 1:
        raise CheckpointError(
            f"The config's rope_theta is {theta}, and YaRN needs one above 1; correct config.json."
        )

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(scaling, "beta_fast", 32.0))
    high = dimension(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # as transformers does, a step instead of a division by zero
    stretch = np.clip((np.arange(len(periods)) - low) / (high - low), 0.0, 1.0)
    return periods / ((1.0 - stretch) + stretch / factor), yarn_magnitude(scaling, factor)


def yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cosine and sine by: attention_factor, else made from `factor`."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(_number(scaling, "mscale")) / grown(_number(scaling, "mscale_all_dim"))
    return grown(1.0)


_SCALINGS: dict[
    str,
    Callable[[_Periods, Mapping[str, Any], Mapping[str, Any]], tuple[_Periods, float]],
] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
