"""Which modules are quantized and how, decided as mlx-lm decides it; and rows made into bytes.

Knows no files: a recipe and a model's modules in, settings by module path out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.convert.reading import for_mlx_lm, module_of
from dflash_mlx.convert.remarks import remarks
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.loader import dtype_name

Settings = dict[str, Any]  # group_size, bits, mode
Predicate = Callable[[str, nn.Module], bool | Settings]

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# mode -> the group size and the bits it has unless others are given; only affine has a choice.
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

_PREFIXES = ("", "language_model.")


@dataclass(frozen=True)
class Recipe:
    """How a target is quantized; None stands for what the mode or the checkpoint has itself."""

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None  # affine, and what the source has in another mode may stay
    mixed: str | None = None  # one of RECIPES
    dtype: str | None = None  # of what is not quantized, and of scales

    def __post_init__(self) -> None:
        """UsageError for settings that MLX does not have or that contradict each other."""
        if self._mode not in MODES:
            raise UsageError(f"The mode {self.mode!r} is not known; use one of {_list(MODES)}.")
        if self.mixed is not None and self.mixed not in RECIPES:
            raise UsageError(
                f"The recipe {self.mixed!r} is not known; use one of {_list(RECIPES)}."
            )
        if self.mixed and (self._mode != "affine" or self.bits is not None):
            raise UsageError(
                f"The recipe {self.mixed} chooses mode and bits; leave --mode and --bits out."
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"The dtype {self.dtype!r} is not known; use one of {_list(DTYPES)}.")
        allowed = {"bits": BITS, "group_size": GROUP_SIZES}
        if self._mode != "affine":
            group_size, bits = MODES[self._mode]
            allowed = {"bits": (bits,), "group_size": (group_size,)}
        for name, values in allowed.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise UsageError(
                    f"{name.replace('_', ' ').capitalize()} {value} does not exist in mode "
                    f"{self._mode}; use {_list(values)}."
                )

    @property
    def _mode(self) -> str:
        return self.mode or "affine"

    @property
    def settings(self) -> Settings:
        """What modules have in common, with the defaults filled in."""
        group_size, bits = MODES[self._mode]
        return {
            "group_size": self.group_size or group_size,
            "bits": self.bits or bits,
            "mode": self._mode,
        }

    @property
    def label(self) -> str:
        """A short name for folders: 4bit, mxfp4, mixed_3_6."""
        if self.mixed:
            return self.mixed
        return f"{self.settings['bits']}bit" if self._mode == "affine" else self._mode


class Rules:
    """mlx-lm's own choices for one model: what to quantize how, and what keeps its float type.

    `prefix` stands before the model's names where mlx-lm has it inside of a larger one. `remarks`
    say what it computes otherwise.
    """

    def __init__(self, recipe: Recipe, config: Mapping[str, Any], model: nn.Module) -> None:
        reference = reference_model(config)
        self.prefix = _prefix(reference, model)
        self.remarks = remarks(config, model, reference)
        self.common = recipe.settings
        self._predicate: Predicate | None = getattr(reference, "quant_predicate", None)
        if recipe.mixed:
            self._predicate = _mixed(recipe, model)
        self._casts: Callable[[str], bool] = getattr(reference, "cast_predicate", lambda _: True)

    def settings(self, path: str, module: nn.Module) -> Settings | None:
        """How the module is quantized; None when it stays as it is."""
        if not hasattr(module, "to_quantized"):
            return None
        if module.weight.shape[-1] % self.common["group_size"]:
            return None
        chosen = True if self._predicate is None else self._predicate(self.prefix + path, module)
        if isinstance(chosen, Mapping):
            chosen = {"mode": "affine", **chosen}
            # A recipe's or gate's own group size has to divide the rows as well.
            return None if module.weight.shape[-1] % chosen["group_size"] else chosen
        return dict(self.common) if chosen else None

    def casts(self, name: str) -> bool:
        """Whether the parameter takes the dtype asked for."""
        return self._casts(self.prefix + name)


def reference_model(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of this config with unset weights; it carries the family's quantization."""
    read = for_mlx_lm(config)
    module = importlib.import_module(f"mlx_lm.models.{module_of(read['model_type'])}")
    try:
        return module.Model(module.ModelArgs.from_dict(read))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"mlx-lm {version('mlx-lm')}, which the converter asks what to quantize, cannot read "
            f"this config ({error}); correct config.json, or run the model without converting it."
        ) from error


def _prefix(reference: nn.Module, model: nn.Module) -> str:
    """What mlx-lm wants before our names; CheckpointError when it would not read them at all."""
    ours: Any = dict(tree_flatten(model.parameters()))  # shapes alone: nothing is evaluated
    theirs = {n: a.shape for n, a in cast(Any, tree_flatten(reference.parameters()))}
    for prefix in _PREFIXES:
        given = {prefix + name: array for name, array in ours.items()}
        read = reference.sanitize(given) if hasattr(reference, "sanitize") else given
        if {name: array.shape for name, array in read.items()} == theirs:
            return prefix
    shapes = {name: array.shape for name, array in ours.items()}
    named = {name.removeprefix(_PREFIXES[1]): shape for name, shape in theirs.items()}
    odd = sorted(n for n in {*shapes, *named} if shapes.get(n) != named.get(n))
    raise CheckpointError(
        f"mlx-lm {version('mlx-lm')} has no {odd[0]} like this model's, and the converter asks it "
        "what to quantize; the model can be run here but not converted."
    )


def _mixed(recipe: Recipe, model: nn.Module) -> Predicate:
    from mlx_lm.convert import mixed_quant_predicate_builder

    layers = [p for p, _ in model.named_modules() if p.rpartition(".")[2].isdigit()]
    depth = min(path.count(".") for path in layers)
    seen = SimpleNamespace(
        named_modules=model.named_modules, layers=[p for p in layers if p.count(".") == depth]
    )
    return mixed_quant_predicate_builder(recipe.mixed, seen, recipe.settings["group_size"])


class Output(NamedTuple):
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.size * math.prod(self.shape)


def outputs_of(
    name: str, shape: tuple[int, ...], dtype: mx.Dtype, settings: Settings | None
) -> list[Output]:
    """The tensors that a dense one becomes: itself, or packed weight, scales and maybe biases."""
    if settings is None:
        return [Output(name, shape, dtype)]
    module = name.removesuffix("weight")
    parts = mx.quantize(mx.zeros(shape, dtype), **settings)  # never evaluated
    names = (name, f"{module}scales", f"{module}biases")
    return [Output(n, p.shape, p.dtype) for n, p in zip(names, parts, strict=False)]


def encode(
    chunks: Iterable[mx.array], dtype: mx.Dtype, settings: Settings | None, place: str
) -> Iterator[memoryview]:
    """The bytes of `outputs_of`, in their order, from a tensor's rows, a few at a time.

    Rows are quantized independently, so chunks give the same bytes as the whole. CheckpointError
    for a number that is not finite in `dtype`; `place` names the tensor for its message.
    """
    later: list[list[memoryview]] = [[], []]
    for stored in chunks:
        chunk = stored
        if mx.issubdtype(stored.dtype, mx.floating):
            chunk = stored.astype(dtype)
            _refuse_not_finite(chunk, stored.dtype, place)
        parts = (chunk,) if settings is None else mx.quantize(chunk, **settings)
        mx.eval(parts)
        yield _bytes(parts[0])
        for kept, part in zip(later, parts[1:], strict=False):
            kept.append(_bytes(part))
    for kept in later:
        yield from kept


def noise_of(settings: Settings) -> float:
    """The relative error that settings leave in a matrix of normally distributed numbers."""
    values = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    parts = mx.quantize(mx.array(values).astype(mx.bfloat16), **settings)
    back = np.array(mx.dequantize(*parts, **settings, dtype=mx.float32))
    return float(np.linalg.norm(back - values) / np.linalg.norm(values))


def _refuse_not_finite(chunk: mx.array, stored: mx.Dtype, place: str) -> None:
    if chunk.size and not np.isfinite(mx.abs(chunk).max().astype(mx.float32).item()):
        name = dtype_name(chunk.dtype)
        raise CheckpointError(
            f"{place} holds numbers that are not finite in {name}; "
            + ("use another --dtype." if stored != chunk.dtype else "fetch the checkpoint again.")
        )


def _bytes(part: mx.array) -> memoryview:
    if part.dtype == mx.bfloat16:  # which numpy does not have
        part = part.view(mx.uint16)
    return memoryview(np.ascontiguousarray(np.array(part, copy=False))).cast("B")


def _list(names: Any) -> str:
    return ", ".join(str(name) for name in names)
