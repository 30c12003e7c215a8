"""From an opened checkpoint and a recipe to the tensors to write and the config that tells of them.

Reads and writes nothing: jobs carry out what is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.convert.quantize import (
    DTYPES,
    Output,
    Recipe,
    Rules,
    Settings,
    encode,
    outputs_of,
)
from dflash_mlx.convert.source import Source, Weight
from dflash_mlx.convert.write import Job
from dflash_mlx.layers.moe import ExpertLinear
from dflash_mlx.loader import Groups


@dataclass(frozen=True)
class Decision:
    """All jobs of a target in the model's order, and `quantization` as config.json states it."""

    jobs: list[Job]
    quantization: dict[str, Any]
    recipe: dict[str, Any]  # what is in the file: the recipe, corrected by what stays
    prefix: str  # before every name that is written
    kept: int  # modules that stay as the source has them quantized
    quantized: int  # modules quantized anew
    again: int  # of those, modules that the source has in other bits
    remarks: list[str]  # sentences on what is to be known of the result

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def decide(source: Source, model: nn.Module, recipe: Recipe) -> Decision:
    """What becomes of every parameter of `model`.

    A module that the source holds quantized with the bits asked for, and with the mode and the
    group size if they are asked for, stays as it is, since doing it again would only add an error;
    one in a floating-point format (the experts of gpt-oss) stays also when more bits are asked for.
    """
    rules = Rules(recipe, source.config, model)
    dtype = float_type(recipe, source)
    modules = dict(model.named_modules())
    parameters: Any = tree_flatten(model.parameters())
    jobs: list[Job] = []
    chosen: dict[str, Settings] = {}
    stay: list[Settings] = []
    kept = quantized = again = 0
    for name, _ in parameters:
        path, _, leaf = name.rpartition(".")
        settings = rules.settings(path, modules[path]) if leaf == "weight" else None
        packed = source.packed.get(path) if leaf == "weight" else None
        own = dtype if rules.casts(name) else None
        if packed and _stays(packed.settings, settings, recipe):
            jobs += [_job(source, n, p, own, None, rules.prefix) for n, p in packed.parts.items()]
            settings = packed.settings
            stay.append(dict(settings))
            kept += 1
        else:
            weight = source.weights[name]
            jobs.append(_job(source, name, weight, own, settings, rules.prefix))
            quantized += settings is not None
            again += packed is not None and settings is not None
        if settings is not None:
            chosen[rules.prefix + path] = settings
    common = _common(rules.common, list(chosen.values()), recipe)
    quantization = {**common, **{k: v for k, v in chosen.items() if v != common}}
    record = recipe_json(recipe, common, stay)
    remarks = [*_of_quantized(kept, again), *rules.remarks]
    return Decision(jobs, quantization, record, rules.prefix, kept, quantized, again, remarks)


def expected_bytes(
    config: Mapping[str, Any], groups: Groups, model: nn.Module, recipe: Recipe
) -> int:
    """Bytes of what `decide` will write of a checkpoint of which the config alone is known."""
    rules = Rules(recipe, config, model)
    stated = next((n for n in _stated_types(recipe, config) if n in DTYPES), "bfloat16")
    modules = dict(model.named_modules())
    parameters: Any = tree_flatten(model.parameters())
    total = 0
    for name, array in parameters:
        path, _, leaf = name.rpartition(".")
        settings = None
        if leaf == "weight":
            settings = rules.settings(path, modules[path])
            packed = _packed_by_config(config, groups, path, modules[path])
            if packed and _stays(packed, settings, recipe):
                settings = packed
        outputs = outputs_of(name, array.shape, DTYPES[stated], settings)
        total += sum(output.nbytes for output in outputs)
    return total


def _packed_by_config(
    config: Mapping[str, Any], groups: Groups, path: str, module: nn.Module
) -> Settings | None:
    """How a checkpoint of this config holds the module; None when it is not quantized there."""
    if not groups.common or not hasattr(module, "to_quantized") or groups.leaves_out(path):
        return None
    # Of a family's own method, experts alone are quantized.
    if config.get("quantization") is None and not isinstance(module, ExpertLinear):
        return None
    settings = groups.of(path)
    return None if module.weight.shape[-1] % settings["group_size"] else settings


def _common(asked: Settings, chosen: list[Settings], recipe: Recipe) -> Settings:
    """The settings stated for all modules: those asked for, unless no module came to have them."""
    if recipe.mixed or not chosen or asked in chosen:
        return asked
    return dict(max(chosen, key=chosen.count))


def recipe_json(
    recipe: Recipe, common: Settings | None = None, stay: Sequence[Settings] = ()
) -> dict[str, Any]:
    """The recipe with its defaults filled in.

    common: what the result's modules have, where that is another. stay: settings of modules taken
    over from the source; those that differ from the common ones are listed as `taken_over`.
    """
    settings = dict(common or recipe.settings)
    others = [s for i, s in enumerate(stay) if s != settings and s not in stay[:i]]
    if recipe.mixed:
        del settings["bits"]  # the recipe's own, layer by layer
    record = {**settings, "mixed": recipe.mixed, "dtype": recipe.dtype}
    return {**record, "taken_over": others} if others else record


def _of_quantized(kept: int, again: int) -> list[str]:
    if not kept and not again:
        return []
    more = f", and {again} are quantized a second time, which adds to their errors" if again else ""
    return [f"The source is quantized itself: {kept} of its modules stay as they are{more}."]


def _stays(has: Settings, wanted: Settings | None, recipe: Recipe) -> bool:
    if wanted is None:
        return True
    if recipe.mode is not None and has["mode"] != wanted["mode"]:
        return False
    if recipe.group_size is not None and has["group_size"] != wanted["group_size"]:
        return False
    more = has["mode"] != "affine" and has["bits"] < wanted["bits"]
    return more or has["bits"] == wanted["bits"]


def float_type(recipe: Recipe, source: Source) -> mx.Dtype | None:
    """The type of what is not quantized and of scales; None leaves each tensor its own.

    As in mlx-lm the config's dtype decides when the recipe names none. GGUF files state none, and
    half of them hold float32 norms beside packed matrices: they become bfloat16.
    """
    for name in _stated_types(recipe, source.config):
        if name in DTYPES:
            return DTYPES[name]
    if source.path.suffix.lower() == ".gguf":
        return mx.bfloat16
    scales = (part.dtype for p in source.packed.values() for part in p.parts.values())
    return next((dtype for dtype in scales if dtype in DTYPES.values()), None)


def _stated_types(recipe: Recipe, config: Mapping[str, Any]) -> list[str]:
    """Names of float types that recipe and config state, what decides first."""
    nested = config.get("text_config")
    levels = (config, nested if isinstance(nested, dict) else {})
    stated = [recipe.dtype, *(c.get(key) for c in levels for key in ("torch_dtype", "dtype"))]
    return [name for name in stated if isinstance(name, str)]


def plain_jobs(source: Source, dtype: mx.Dtype) -> list[Job]:
    """Every weight of a source in `dtype`, not quantized, in the order of names."""
    return [_job(source, n, w, dtype, None) for n, w in sorted(source.weights.items())]


def _job(
    source: Source,
    name: str,
    weight: Weight,
    dtype: mx.Dtype | None,
    settings: Settings | None,
    prefix: str = "",
) -> Job:
    is_float = mx.issubdtype(weight.dtype, mx.floating)
    kind = dtype if dtype is not None and is_float else weight.dtype
    outputs: list[Output] = outputs_of(prefix + name, weight.shape, kind, settings)

    def encoded() -> Iterator[memoryview]:
        return encode(weight.chunks(), kind, settings, f"{name} of {source.path}")

    return Job(tuple(outputs), encoded)
