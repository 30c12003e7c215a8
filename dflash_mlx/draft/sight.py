"""Which positions each layer of a drafter sees: windows, and the order inside the block."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mlx.draft.keys import (
    Config,
    either,
    flag,
    malformed,
    positive_int,
    required,
    whole,
)
from dflash_mlx.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_TYPES = (_FULL, _SLIDING)


@dataclass(frozen=True)
class Sight:
    """One entry a layer: how many positions a query sees, itself included (None: all), and whether
    it sees only earlier rows of its block."""

    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]


def parse_sight(config: Config, nested: Config, layers: int) -> Sight:
    """From layer_types, sliding_window, is_causal and, in exports of ModelOpt, use_swa."""
    kinds = _layer_types(config, layers)
    # It means a window on every layer, unless layer_types already say which ones slide.
    everywhere = flag({"use_swa": either(config, nested, "use_swa")}, "use_swa")
    chosen = _in_block_order(config, nested)
    if everywhere and _SLIDING not in kinds:
        return Sight((_window(config, nested),) * layers, (bool(chosen),) * layers)
    window = _window(config, nested) if _SLIDING in kinds else None
    return Sight(
        tuple(window if kind == _SLIDING else None for kind in kinds),
        tuple(kind == _SLIDING if chosen is None else chosen for kind in kinds),
    )


def _layer_types(config: Config, layers: int) -> list[str]:
    """One kind a layer; absent, layers from max_window_layers on slide when a window is active."""
    kinds = config.get("layer_types")
    if kinds is None:
        if not (config.get("sliding_window") and flag(config, "use_sliding_window")):
            return [_FULL] * layers
        first = whole("max_window_layers", required(config, "max_window_layers"), 0)
        return [_LAYER_TYPES[i >= first] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        malformed("layer_types", kinds, f"a list of {layers} entries, one a layer")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            malformed("layer_types", kind, f"one of {', '.join(_LAYER_TYPES)}")
    return kinds


def _window(config: Config, nested: Config) -> int:
    own = either(config, nested, "swa_window_size")
    if own is not None:
        return whole("swa_window_size", own, 1)
    # A false use_sliding_window takes the window away from sliding layers in transformers.
    if flag(config, "use_sliding_window") is False:
        raise CheckpointError(
            "The drafter's layer_types have sliding_attention while use_sliding_window is false; "
            "correct the one that is wrong in config.json."
        )
    return positive_int(config, "sliding_window")


def _in_block_order(config: Config, nested: Config) -> bool | None:
    """is_causal, else dflash_config.causal, for all layers; None: sliding layers are causal."""
    outer, inner = flag(config, "is_causal"), flag(nested, "causal")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(
            f"The drafter's is_causal is {outer} and its dflash_config.causal {inner}; remove the "
            "one that is wrong from config.json."
        )
    return inner if outer is None else outer
