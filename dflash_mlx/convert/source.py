"""A checkpoint to convert: every weight by the model's name, its shape known before it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

#: bytes of dense rows at once, so that no second copy of a large tensor is held
CHUNK = 4_000_000

Rows = Callable[[int, int], mx.array]


@dataclass(frozen=True)
class Weight:
    """One parameter, to be read once; afterwards nothing here holds it.

    `open` reads it as it is stored and returns what gives rows start .. stop - 1 of its dense
    values in `dtype`: [stop - start, in], all leading axes counted as one; a vector is one row.
    A packed matrix is so never held as the numbers it stands for.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    open: Callable[[], Rows]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def read(self) -> mx.array:
        """All of it at once, in its own shape."""
        return self.open()(0, self.rows).reshape(self.shape)

    def chunks(self) -> Iterator[mx.array]:
        """All of it, some CHUNK bytes of rows at a time."""
        take = self.open()
        step = max(1, CHUNK // max(1, math.prod(self.shape[-1:]) * self.dtype.size))
        for start in range(0, self.rows, step):
            yield take(start, min(start + step, self.rows))


@dataclass(frozen=True)
class Packed:
    """A module that is quantized already: how, and its tensors as stored, each to be read once."""

    settings: Settings
    parts: Mapping[str, Weight]  # by parameter name


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. A weight is read once; what is opened `again` gives it again."""

    path: Path
    config: dict[str, Any]
    weights: dict[str, Weight]  # by parameter name; of packed modules the values they stand for
    packed: dict[str, Packed]  # by module path
    again: Callable[[], Source]


def open_source(path: Path) -> Source:
    """A folder (HF or MLX, quantized or not) or a .gguf file; CheckpointError as `load_target`."""
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    return open_folder(path, partial(open_checkpoint, path))


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


def open_folder(path: Path, checkpoint_of: Callable[[], Checkpoint]) -> Source:
    """A folder whose weights `checkpoint_of` names."""
    checkpoint = checkpoint_of()
    stored, groups = checkpoint.weights, checkpoint.groups
    weights: dict[str, Weight] = {}
    packed: dict[str, Packed] = {}
    for module in sorted(n.removesuffix(".scales") for n in stored if n.endswith(".scales")):
        settings = groups.of(module)
        names = [module + part for part in _PARTS if module + part in stored]
        # Two ways to the same tensors: as they are, and as the weight they stand for.
        packed[module] = Packed(settings, {name: _stored(stored, name) for name in names})
        dense = partial(take_dense, module, groups=settings, source=path)
        of_all = dense({name: stored[name] for name in names})  # for its shape, never evaluated
        weights[f"{module}.weight"] = Weight(
            of_all.shape, of_all.dtype, partial(_dense_rows, stored, names, dense)
        )
    taken = {name for entry in packed.values() for name in entry.parts}
    for name in stored.keys() - taken:
        weights[name] = _stored(stored, name)
    return Source(
        path, checkpoint.config, weights, packed, partial(open_folder, path, checkpoint_of)
    )


def _stored(stored: dict[str, mx.array], name: str) -> Weight:
    array = stored[name]
    return Weight(array.shape, array.dtype, lambda: _sliced(stored.pop(name)))


def _flat(array: mx.array) -> mx.array:
    """Read now, its leading axes as one."""
    mx.eval(array)
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)


def _sliced(array: mx.array) -> Rows:
    flat = _flat(array)
    return lambda start, stop: flat[start:stop]


def _dense_rows(
    stored: dict[str, mx.array],
    names: Sequence[str],
    dense: Callable[[dict[str, mx.array]], mx.array],
) -> Rows:
    parts = {name: _flat(stored.pop(name)) for name in names}
    return lambda start, stop: dense({name: part[start:stop] for name, part in parts.items()})


def _open_gguf(path: Path) -> Source:
    # Here, because the reader's package is slow to import and folders need none of it.
    from dflash_mlx.gguf import open_gguf

    model = open_gguf(path)
    config = model.config()
    weights = {
        model.hf_name(name): Weight(shape, mx.float32, partial(model.rows, name, mx.float32))
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
    return Source(path, config, weights, packed, partial(_open_gguf, path))


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

    def sliced(name: str) -> Any:
        return _sliced(take(name))

    *rows, inputs = shape
    scales = ((*rows, inputs // settings["group_size"]), mx.float32)
    parts = (((*rows, inputs * settings["bits"] // 32), mx.uint32), scales, scales)
    return {
        name: Weight(*part, partial(sliced, name))
        for name, part in zip((module + p for p in _PARTS), parts, strict=True)
    }
