"""Typed reading of a drafter's config.json; every complaint names the key, its value and a way out.

A key inside `dflash_config` wins over one at the top level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from functools import partial
from typing import Any, NoReturn

from dflash_mlx import errors
from dflash_mlx.errors import CheckpointError

Config = Mapping[str, Any]

malformed = partial(errors.malformed, whose="drafter", file="its config.json")

# Others are below 2**31, as MLX counts; these make layers or tables before weights are read.
_MOST = {"num_hidden_layers": 10_000, "head_dim": 65_536}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def either(config: Config, nested: Config, key: str) -> Any:
    """The value of an optional key, nested first; None when it is in neither place."""
    value = nested.get(key)
    return config.get(key) if value is None else value


def draft_value(config: Config, nested: Config, key: str) -> Any:
    """A required key of the drafter, nested first."""
    value = nested.get(key)
    return required(config, key) if value is None else value


def required(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise CheckpointError(
            f"The drafter's config.json has no {key}; use a drafter whose config.json is complete."
        )
    return config[key]


def positive_int(config: Config, key: str) -> int:
    return whole(key, required(config, key), 1)


def optional_int(config: Config, key: str) -> int | None:
    return None if config.get(key) is None else positive_int(config, key)


def whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        malformed(key, value, f"a whole number of at least {least}")
    most = _MOST.get(key, 2**31 - 1)
    if value > most:
        malformed(key, value, f"a whole number of at most {most}")
    return value


def layer_ids(key: str, ids: Any, least: int) -> tuple[int, ...]:
    """A list of layers, none below `least`, in the order given."""
    if not isinstance(ids, list) or not ids:
        malformed(key, ids, "a list of target layers")
    return tuple(whole(key, layer, least) for layer in ids)


def positive_float(config: Config, key: str) -> float:
    return positive_number(key, required(config, key))


def positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        malformed(key, value, "a number above zero")
    return float(value)


def flag(config: Config, key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        malformed(key, value, "true, false or null")
    return value


def refuse_active(source: Config, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a key whose value is not among those under which it changes nothing."""
    for key, harmless in neutral.items():
        if key in source and source[key] not in harmless:
            refuse(key, source[key])


def refuse_unknown(source: Config, known: Set[str], where: str) -> None:
    """A key that is set and not known could change what the drafter computes."""
    for key, value in source.items():
        if key not in known and value is not None:
            raise CheckpointError(
                f"{where} of the drafter sets {key} = {value!r}, whose meaning is not known; use "
                "a drafter without it."
            )


def refuse(key: str, value: Any) -> NoReturn:
    raise CheckpointError(
        f"The drafter uses {key} = {value!r}, which is not supported; use a drafter without it."
    )
