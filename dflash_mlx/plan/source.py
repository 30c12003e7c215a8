"""What is known of a model before it is fetched: the registry's sizes, or a config on disk."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx import hub, registry
from dflash_mlx.errors import SourceError
from dflash_mlx.plan.shape import Shape, read_draft_shape, read_shape
from dflash_mlx.registry import Pair

# Taps of a drafter whose own config is not known; released ones have 5 to 8.
ASSUMED_TAPS = 6
# Of a pair whose block size is not known; the largest of the released ones.
ASSUMED_BLOCK = 16


@dataclass(frozen=True)
class Model:
    """A target and what drafts for it, in sizes."""

    name: str
    target: Shape
    quantization: Mapping[str, Any] | None  # of the checkpoint as it is
    context: int | None  # positions it was made for
    drafter: str | None
    draft: Shape | None
    taps: int
    block: int
    conversions: tuple[tuple[int, str], ...]  # bits and hub id of ready ones
    remarks: tuple[str, ...]


def find_model(name: str, *, drafted: bool = True) -> Model:
    """The sizes of `name`: a known pair, a config.json, a model folder, a GGUF file, or a repo
    that is on disk. Nothing is fetched.

    Raises SourceError when nothing is known of it, CheckpointError for a config that is not
    understood. drafted: whether to count the pair's drafter.
    """
    place = Path(os.path.expanduser(name))
    pair = None if "/" in name and place.exists() else registry.find(name)
    if pair is None:
        config = _local_config(name, place)
        beside = _drafter_beside(place, config) if drafted else None
        return _of_config(name, config, None, drafted, beside)
    if pair.config is not None:
        config = {"max_position_embeddings": pair.context, **pair.config}
        for bits, spec in _conversions(pair):
            if spec.casefold() == name.casefold():
                config["quantization"] = {"group_size": 64, "bits": bits}
        return _of_config(name, config, pair, drafted)
    found = hub.local_path(pair.target, revision=pair.target_revision)
    if found is None:
        raise SourceError(
            f"The sizes of {pair.name} are not known yet. Fetch the config.json of {pair.target} "
            "and give its path."
        )
    return _of_config(name, _read(found), pair, drafted)


def _drafter_beside(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the drafter that a conversion put into the target's folder."""
    conversion = config.get("conversion")
    record = conversion.get("drafter") if isinstance(conversion, dict) else None
    file = folder / "drafter" / "config.json"
    if not isinstance(record, dict) or not file.is_file():
        return None
    return _read(file)


def _is_conversion(name: str, pair: Pair) -> bool:
    return name.casefold() in (spec.casefold() for spec in pair.conversions)


def _conversions(pair: Pair | None) -> tuple[tuple[int, str], ...]:
    """Ready conversions, more bits first."""
    specs = [(8, pair.target_8bit), (4, pair.target_4bit)] if pair else []
    return tuple((bits, spec) for bits, spec in specs if spec)


def _local_config(name: str, place: Path) -> Mapping[str, Any]:
    if place.exists():
        return _read(place)
    found = hub.local_path(name)
    if found is None:
        near = registry.suggest(name)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise SourceError(
            f"Nothing is known of {name!r} before it is fetched: it is no known pair and not on "
            f"this disk. {hint}Give the path of its config.json, or a name of `dflash-mlx models`."
        )
    return _read(found)


def _read(place: Path) -> dict[str, Any]:
    """The config of a folder, a GGUF file or a config file."""
    if place.suffix.lower() == ".gguf":
        from dflash_mlx.gguf import open_gguf

        source = open_gguf(place)
        return {**source.config(), "quantization": _kept_bits(source.quantization())}
    file = place / "config.json" if place.is_dir() else place
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError:
        raise SourceError(f"{file} cannot be read. Give a model folder or a config.json.") from None
    except (ValueError, RecursionError):
        raise SourceError(f"{file} is not JSON. Give a model folder or a config.json.") from None
    if not isinstance(config, dict):
        raise SourceError(f"{file} is no JSON object. Give a model folder or a config.json.")
    return config


def _kept_bits(kept: Mapping[str, Mapping[str, int]]) -> dict[str, Any] | None:
    """MLX's `quantization` object for a GGUF file of which the modules `kept` stay quantized.

    Layers are taken to be all like most of them; False marks what is dequantized.
    """
    if not kept:
        return None
    ends = ("model.embed_tokens", "lm_head")
    layers = Counter(groups["bits"] for path, groups in kept.items() if path not in ends)
    common = {"group_size": next(iter(kept.values()))["group_size"]}
    most = layers.most_common(1)[0][0] if layers else next(iter(kept.values()))["bits"]
    return {**common, "bits": most, **{path: kept.get(path, False) for path in ends}}


def _exceptions(quantization: Mapping[str, Any]) -> list[str]:
    """A remark on modules with bits of their own, which are counted with those of most."""
    counted = ("model.embed_tokens", "lm_head")
    own = [path for path in quantization if "." in path and path not in counted]
    if not own:
        return []
    return [
        f"{len(own)} modules are quantized in their own way (such as {own[0]}); they are counted "
        f"with {quantization.get('bits')} bits."
    ]


def _of_config(
    name: str,
    config: Mapping[str, Any],
    pair: Pair | None,
    drafted: bool,
    beside: Mapping[str, Any] | None = None,
) -> Model:
    target = read_shape(config)
    remarks = _exceptions(config.get("quantization") or {})
    draft, taps, drafter, block = None, 0, None, pair.block_size if pair else None
    if beside is not None:
        own = {**beside, **(beside.get("dflash_config") or {})}
        drafter, taps, block = f"{name}/drafter", len(own["target_layer_ids"]), own["block_size"]
        draft = read_draft_shape(own, taps, target.vocab_size)
    elif pair is not None and drafted:
        drafter, taps = pair.drafter, len(pair.taps or ()) or ASSUMED_TAPS
        if pair.taps is None:
            remarks.append(f"How many layers {drafter} taps is not known; {taps} are assumed.")
        if pair.draft is None:
            remarks.append(
                f"The sizes of {drafter} are not known; the total lacks its weights and context."
            )
        else:
            draft = read_draft_shape(pair.draft, taps, target.vocab_size)
    elif drafted:
        remarks.append(f"No drafter is known for {name}; it is planned without one.")
    block = (block or ASSUMED_BLOCK) if drafter else 1
    return Model(
        name=name if pair is None or _is_conversion(name, pair) else pair.name,
        target=target,
        quantization=config.get("quantization"),
        context=target.context,
        drafter=drafter,
        draft=draft,
        taps=taps,
        block=block,
        conversions=_conversions(pair),
        remarks=tuple(remarks),
    )
