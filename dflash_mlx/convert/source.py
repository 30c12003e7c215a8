"""A checkpoint to convert: every weight by the model's name, its shape known before it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.convert.quantize import Settings
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loader import Checkpoint, check_names, dtype_name, open_checkpoint, take_dense

_PARTS = (".weight", ".scales", ".biases")


@dataclass(frozen=True)
class Weight:
    """One parameter. `read` gives its dense values once; afterwards nothing here holds them."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    read: Callable[[], mx.array]


@dataclass(frozen=True)
class Packed:
    """A module that is quantized already: how, and its tensors as stored, each to be read once."""

    settings: Settings
    parts: Mapping[str, Weight]  # by parameter name


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. A weight is read once; open the checkpoint again to read it again."""

    path: Path
    config: dict[str, Any]
    weights: dict[str, Weight]  # by parameter name; of packed modules the values they stand for
    packed: dict[str, Packed] = field(default_factory=dict)  # by module path


def open_source(path: Path) -> Source:
    """A folder (HF or MLX, quantized or not) or a .gguf file; CheckpointError as `load_target`."""
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    return open_folder(path, open_checkpoint(path))


def check_against(source: Source, model: nn.Module) -> None:
    """CheckpointError unless the weights are exactly the model's parameters, shape by shape."""
    parameters: Any = tree_flatten(model.parameters())
    expected = {name: array.shape for name, array in parameters}
    check_names(expected.keys(), source.weights.keys(), source.path)
    for name, shape in expected.items():
        found = source.weights[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{name} of {source.path} has shape {found.shape}, its config asks for {shape}; "
                "use the config.json that belongs to these weights."
            )
        if not mx.issubdtype(found.dtype, mx.floating):
            kind = dtype_name(found.dtype)
            raise CheckpointError(
                f"{name} of {source.path} is stored as {kind}; use a checkpoint with "
                "floating-point weights."
            )


def open_folder(path: Path, checkpoint: Checkpoint) -> Source:
    stored, groups = checkpoint.weights, checkpoint.groups
    weights: dict[str, Weight] = {}
    packed: dict[str, Packed] = {}
    for module in sorted(n.removesuffix(".scales") for n in stored if n.endswith(".scales")):
        settings = groups.of(module)
        names = [module + part for part in _PARTS if module + part in stored]
        # Two ways to the same tensors: as they are, and as the weight they stand for.
        twin = {name: stored[name] for name in names}
        packed[module] = Packed(settings, {name: _popping(stored, name) for name in names})
        dense = take_dense(module, dict(twin), settings, path)
        weights[f"{module}.weight"] = Weight(
            dense.shape, dense.dtype, _dense_reader(module, stored, settings, path)
        )
    taken = {name for entry in packed.values() for name in entry.parts}
    for name in stored.keys() - taken:
        weights[name] = _popping(stored, name)
    return Source(path, checkpoint.config, weights, packed)


def _popping(stored: dict[str, mx.array], name: str) -> Weight:
    array = stored[name]
    return Weight(array.shape, array.dtype, lambda: stored.pop(name))


def _dense_reader(
    module: str, stored: dict[str, mx.array], settings: Settings, path: Path
) -> Callable[[], mx.array]:
    return lambda: take_dense(module, stored, settings, path)


def _open_gguf(path: Path) -> Source:
    # Here, because the reader's package is slow to import and folders need none of it.
    from dflash_mlx.gguf import open_gguf

    model = open_gguf(path)
    config = model.config()

    def dense(name: str) -> Callable[[], mx.array]:
        return lambda: model.dense(name, mx.float32)

    weights = {
        model.hf_name(name): Weight(shape, mx.float32, dense(name))
        for name, shape in model.shapes().items()
    }
    names = {model.hf_name(name): name for name in model.shapes()}
    packed = {}
    for module, groups in model.quantization().items():
        name = names[f"{module}.weight"]
        affine = partial(model.affine, name, mx.float32)
        settings = {"mode": "affine", **groups}
        packed[module] = Packed(
            settings, _affine_parts(module, model.shapes()[name], settings, affine)
        )
    return Source(path, config, weights, packed)


def _affine_parts(
    module: str,
    shape: tuple[int, ...],
    settings: Settings,
    read: Callable[[], dict[str, mx.array]],
) -> dict[str, Weight]:
    """Three tensors that one reading brings; whichever is asked for first begins it."""
    waiting: dict[str, mx.array] = {}

    def take(name: str) -> mx.array:
        if name not in waiting:
            waiting.update(read())
        return waiting.pop(name)

    *rows, inputs = shape
    scales = ((*rows, inputs // settings["group_size"]), mx.float32)
    parts = (((*rows, inputs * settings["bits"] // 32), mx.uint32), scales, scales)
    return {
        name: Weight(*part, partial(take, name))
        for name, part in zip((module + p for p in _PARTS), parts, strict=True)
    }
