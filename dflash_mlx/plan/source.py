"""What is known of a model before it is fetched: the registry's sizes, or a config on disk."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mlx import hub, registry
from dflash_mlx.errors import CheckpointError, SourceError
from dflash_mlx.plan.quantization import MXFP4, stated_quantization, uncounted
from dflash_mlx.plan.shape import Shape, kind_of, read_draft_shape, read_shape
from dflash_mlx.registry import Pair

if TYPE_CHECKING:
    from dflash_mlx.draft.config import DFlashConfig

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
    draft_bits: int | None  # it is held in; None: as floats
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
    pair = None if "/" in name and os.path.exists(place) else registry.find(name)
    if pair is None:
        config = _local_config(name, place)
        beside = _drafter_beside(place) if drafted else None
        return _of_config(name, config, None, drafted, beside)
    if pair.config is not None:
        config = {"max_position_embeddings": pair.context, **pair.config}
        for bits, spec in _conversions(pair):
            if spec.casefold() == name.casefold():
                config["quantization"] = {"group_size": 64, "bits": bits, **_mxfp4_experts(config)}
        return _of_config(name, config, pair, drafted)
    found = hub.local_path(pair.target, revision=pair.target_revision)
    if found is None:
        raise SourceError(
            f"The sizes of {pair.name} are not known yet. Fetch the config.json of {pair.target} "
            "and give its path."
        )
    return _of_config(name, _read(found), pair, drafted)


@dataclass(frozen=True)
class _Bundled:
    """The drafter that a conversion put into the target's folder."""

    config: DFlashConfig
    tables: tuple[str, ...]  # embed_tokens, lm_head: what it does not borrow
    bits: int | None  # to hold it in


def _drafter_beside(folder: Path) -> _Bundled | None:
    # Here, because they bring MLX with them and pairs are planned without.
    from dflash_mlx.draft.config import parse_config
    from dflash_mlx.weights import bundled_drafter, read_config, read_weights

    if not folder.is_dir() or not (found := bundled_drafter(folder)):
        return None
    place, bits = found
    has_weights = any(place.glob("*.safetensors"))  # a config alone can be planned as well
    names = {name.removesuffix(".weight") for name in read_weights(place)} if has_weights else set()
    if bits not in (None, 4, 8):
        raise CheckpointError(
            f"config.json of {folder} records a drafter of {bits!r:.80} bits, not of 4 or 8; "
            "convert the model again."
        )
    tables = tuple(table for table in ("embed_tokens", "lm_head") if table in names)
    return _Bundled(parse_config(read_config(place)), tables, bits)


def _draft_sizes(config: DFlashConfig) -> dict[str, Any]:
    """Sizes by the keys of [pair.draft]."""
    windows = [window for window in config.windows if window is not None]
    sliding = {"num_sliding_layers": len(windows), "sliding_window": max(windows, default=None)}
    return asdict(config) | (asdict(config.parts) if config.parts else {}) | sliding


def _is_conversion(name: str, pair: Pair) -> bool:
    return name.casefold() in (spec.casefold() for spec in pair.conversions)


def _conversions(pair: Pair | None) -> tuple[tuple[int, str], ...]:
    """Ready conversions, more bits first."""
    specs = [(8, pair.target_8bit), (4, pair.target_4bit)] if pair else []
    return tuple((bits, spec) for bits, spec in specs if spec)


def _local_config(name: str, place: Path) -> Mapping[str, Any]:
    if os.path.exists(place):  # a name too long for a path does not
        return _read(place)
    found = hub.local_path(name)
    if found is None:
        near = registry.suggest(name)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise SourceError(
            f"Nothing is known of {name!r:.80} before it is fetched: it is no known pair and not "
            f"on this disk. {hint}Give the path of its config.json, or a name of "
            "`dflash-mlx models`."
        )
    return _read(found)


def _read(place: Path) -> dict[str, Any]:
    """The config of a folder, a GGUF file or a config file."""
    if place.suffix.lower() == ".gguf":
        from dflash_mlx.gguf import open_gguf

        source = open_gguf(place)
        config = source.config()
        return {**config, "quantization": _kept_bits(source.quantization(), read_shape(config))}
    file = place / "config.json" if place.is_dir() else place
    _refuse_unfinished(file)
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError:
        raise SourceError(f"{file} cannot be read. Give a model folder or a config.json.") from None
    except (ValueError, RecursionError):
        raise SourceError(f"{file} is not JSON. Give a model folder or a config.json.") from None
    if not isinstance(config, dict):
        raise SourceError(f"{file} is no JSON object. Give a model folder or a config.json.")
    _refuse_drafter(place, config)
    return config


def _refuse_unfinished(file: Path) -> None:
    from dflash_mlx.weights import UNFINISHED, read_config

    if (file.parent / UNFINISHED).exists():
        read_config(file.parent)


def _refuse_drafter(place: Path, config: Mapping[str, Any]) -> None:
    from dflash_mlx.loader import refuse_drafter

    refuse_drafter(place, config)


def _mxfp4_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of experts that conversions leave in the MXFP4 they are published in."""
    shape = read_shape(config)
    paths = [path for path in shape.modules if kind_of(path) == "experts"]
    return dict.fromkeys(paths, MXFP4) if shape.experts_mxfp4 else {}


def _kept_bits(kept: Mapping[str, Mapping[str, int]], shape: Shape) -> dict[str, Any] | None:
    """MLX's `quantization` object for a GGUF file of which the modules `kept` stay quantized.

    False marks what is dequantized.
    """
    if not kept:
        return None
    most = Counter((groups["group_size"], groups["bits"]) for groups in kept.values())
    group_size, bits = most.most_common(1)[0][0]
    common = {"group_size": group_size, "bits": bits}
    own = {path: kept.get(path, False) for path in shape.modules}
    return common | {path: settings for path, settings in own.items() if settings != common}


def _of_config(
    name: str,
    config: Mapping[str, Any],
    pair: Pair | None,
    drafted: bool,
    beside: _Bundled | None = None,
) -> Model:
    target = read_shape(config)
    quantization = stated_quantization(config)
    remarks = uncounted(quantization, target.modules)
    draft, taps, drafter, block = None, 0, None, pair.block_size if pair else None
    draft_bits = None
    if beside is not None:
        own, drafter = beside.config, f"{name}/drafter"
        taps, block, draft_bits = len(own.target_layer_ids), own.block_size, beside.bits
        draft = read_draft_shape(_draft_sizes(own), taps, target.vocab_size, beside.tables)
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
        quantization=quantization,
        context=target.context,
        drafter=drafter,
        draft=draft,
        draft_bits=draft_bits,
        taps=taps,
        block=block,
        conversions=_conversions(pair),
        remarks=tuple(remarks),
    )
