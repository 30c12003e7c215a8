"""From a checkpoint on disk to a target with every weight in its place, evaluated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.models import build_target, family_of
from dflash_mlx.models.base import Target
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.models.sizes import check_sizes
from dflash_mlx.quantization import KEYS, check_settings
from dflash_mlx.weights import is_mlx_format, read_config, read_weights

_log = logging.getLogger(__name__)

#: float types by the names that options and files give them
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def dtype_name(dtype: mx.Dtype) -> str:
    """As in DTYPES: "float32"."""
    return str(dtype).removeprefix("mlx.core.")


@dataclass(frozen=True)
class Precision:
    """How weights are held. `dtype` None: bfloat16, or a quantized checkpoint's own float type."""

    dtype: mx.Dtype | None
    keep_quantized: bool


def resolve_dtype(name: str, *, metal: bool | None = None) -> Precision:
    """What `--dtype NAME` means on this back-end (`metal` None: the one MLX has).

    On the CPU back-end quantized weights are dequantized once, and auto is float32: bfloat16 and
    quantized matmul are some twenty times slower there.
    """
    metal = mx.metal.is_available() if metal is None else metal
    if name == "auto":
        return Precision(None, True) if metal else Precision(mx.float32, False)
    if name not in DTYPES:
        raise UsageError(f"The dtype {name!r} is not known; use one of auto, {', '.join(DTYPES)}.")
    return Precision(DTYPES[name], metal)


def read_target_config(path: Path) -> dict[str, Any]:
    """The config.json of a target's folder, or what it would be for a GGUF file."""
    if path.suffix.lower() != ".gguf":
        return read_config(path)
    # Here, because the reader's package is slow to import and folders need none of it.
    from dflash_mlx.gguf import open_gguf

    return dict(open_gguf(path).config())


def load_target(path: Path, dtype: str = "auto") -> Target:
    """Load a folder (HF or MLX safetensors) or a .gguf file.

    Every tensor of the checkpoint is used and every parameter set, or CheckpointError names it.
    All parameters are evaluated, so another thread may run the model.
    """
    return load_target_as(path, resolve_dtype(dtype))


def load_target_as(path: Path, precision: Precision) -> Target:
    """`load_target` with the precision decided by the caller."""
    if path.suffix.lower() == ".gguf":
        model = _load_gguf(path, precision)
    else:
        model = _load_folder(path, precision)
    # The dropped originals of converted weights go back to the system, not to MLX's cache.
    gc.collect()
    mx.clear_cache()
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A folder's config and weights under the model's names, not read from disk yet."""

    config: dict[str, Any]
    groups: Groups
    weights: dict[str, mx.array]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check a target's folder and name its weights; CheckpointError as `load_target`."""
    config = read_config(folder)
    refuse_drafter(folder, config)
    groups = Groups.read(folder, config)
    family = family_of(config)
    weights = read_weights(folder)
    check_sizes(config, weights, folder)
    (family.remap_mlx if is_mlx_format(folder) else family.remap_hf)(weights, config)
    _drop_harmless(weights, config)
    return Checkpoint(config, groups, weights)


def _load_folder(folder: Path, precision: Precision) -> Target:
    checkpoint = open_checkpoint(folder)
    model = build_target(checkpoint.config)
    weights, groups = checkpoint.weights, checkpoint.groups
    dtype = precision.dtype or _float_type(weights)
    keep, keep_type = precision.keep_quantized, family_of(checkpoint.config).keep_type
    _fill(model, weights, groups, folder, dtype, keep_quantized=keep, keep_type=keep_type)
    return model


def _float_type(weights: Mapping[str, mx.array]) -> mx.Dtype:
    """That of a quantized checkpoint's scales, else bfloat16."""
    scales = [array.dtype for name, array in weights.items() if name.endswith(".scales")]
    own = [kind for kind in scales if kind in DTYPES.values()]
    return own[0] if own else mx.bfloat16


def empty_target(path: Path, precision: Precision) -> DecoderTarget:
    """What `load_target_as` would fill: the same modules and types, with lazy made-up parameters.

    CheckpointError for a checkpoint that is not whole or not understood.
    """
    if path.suffix.lower() == ".gguf":
        from dflash_mlx.gguf import open_gguf

        source = open_gguf(path)
        groups, dtype = Groups({}, source.quantization()), precision.dtype or mx.bfloat16
        model, quantized = build_target(source.config()), list(groups.by_path)
    else:
        checkpoint = open_checkpoint(path)
        model, groups = build_target(checkpoint.config), checkpoint.groups
        dtype = precision.dtype or _float_type(checkpoint.weights)
        quantized = _quantized(checkpoint.weights)
    model.set_dtype(dtype)
    if precision.keep_quantized:
        _quantize_modules(model, quantized, groups, path)
    return model


def _load_gguf(file: Path, precision: Precision) -> Target:
    # Here, because the reader's package is slow to import and folders need none of it.
    from dflash_mlx.gguf import open_gguf

    source = open_gguf(file)
    config = source.config()
    model = build_target(config)
    dtype = precision.dtype or mx.bfloat16
    keep = precision.keep_quantized
    groups = Groups({}, source.quantization() if keep else {})
    weights = source.weights(keep, dtype)
    _drop_harmless(weights, config)
    keep_type = family_of(config).keep_type
    _fill(model, weights, groups, file, dtype, keep_quantized=keep, keep_type=keep_type)
    return model


@dataclass(frozen=True)
class Groups:
    """Quantization of a checkpoint: what all modules have in common, and exceptions by path."""

    common: Mapping[str, Any]
    by_path: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> Groups:
        """MLX's `quantization` object, or what the family makes of its own HF checkpoints' method.

        Any other quantization is refused by name.
        """
        foreign = config.get("quantization_config")
        own = config.get("quantization")
        method = foreign.get("quant_method") if isinstance(foreign, Mapping) else foreign
        known = family_of(config).quantization(method) if isinstance(method, str) else None
        if (method and known is None) or (foreign and not (own or known)):
            raise CheckpointError(
                f"{folder} is quantized by {method or 'an unnamed method'!s:.80}, which is not "
                "supported; use the unquantized checkpoint, an MLX or a GGUF conversion."
            )
        own = known if own is None else own
        if own is None:
            return cls({}, {})
        if not isinstance(own, Mapping) or not {"group_size", "bits"} <= own.keys():
            raise CheckpointError(
                f"The quantization in config.json of {folder} has no group_size and bits; "
                "convert the checkpoint again."
            )
        check_settings(f"config.json of {folder}", own)
        common = {key: own[key] for key in KEYS if key in own}
        return cls(common, {k: v for k, v in own.items() if k not in KEYS})

    def leaves_out(self, path: str) -> bool:
        """Whether the module is stated not to be quantized."""
        return self._exception(path) is False

    def _exception(self, path: str) -> Any:
        # MLX conversions of multimodal checkpoints hold the language model under the second name.
        return self.by_path.get(path, self.by_path.get(f"language_model.{path}"))

    def of(self, path: str) -> dict[str, Any]:
        """group_size, bits and mode of a quantized module; CheckpointError when not stated."""
        exception = self._exception(path)
        groups = dict(self.common)
        if isinstance(exception, Mapping):
            # As MLX reads it: an exception without a mode is affine, whatever the others are.
            groups = {**groups, "mode": "affine", **exception}
        if not groups or exception is False:
            raise CheckpointError(
                f"{path} has quantized weights, but the config states no quantization for it; "
                "convert the checkpoint again."
            )
        if unknown := groups.keys() - KEYS:
            raise CheckpointError(
                f"The quantization of {path} has {', '.join(sorted(unknown))}, which is not "
                "supported; convert the checkpoint with group_size, bits and mode only."
            )
        groups = {"mode": "affine", **groups}
        check_settings(path, groups)
        return groups


def _fill(
    model: nn.Module,
    weights: dict[str, mx.array],
    groups: Groups,
    source: Path,
    dtype: mx.Dtype,
    *,
    keep_quantized: bool,
    keep_type: Collection[str] = (),
) -> None:
    """Move `weights` into `model`, one module's at a time, emptying the dict."""
    quantized = _quantized(weights)
    if keep_quantized:
        _quantize_modules(model, quantized, groups, source)
    else:
        for path in quantized:
            _dequantize(path, weights, groups.of(path), source, dtype)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    expected = {name: array.shape for name, array in parameters}
    del parameters
    check_names(expected.keys(), weights.keys(), source)
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{name} of {source} has shape {weights[name].shape}, its config asks for {shape}; "
                "use the config.json that belongs to these weights."
            )
    for name in expected:
        array = weights.pop(name)
        if mx.issubdtype(array.dtype, mx.floating) and name.split(".")[-1] not in keep_type:
            array = array.astype(dtype)
        mx.eval(array)
        model.update(tree_unflatten([(name, array)]))
    mx.eval(model.parameters())


def _quantized(weights: Mapping[str, mx.array]) -> list[str]:
    """Paths of the quantized modules."""
    return sorted(name.removesuffix(".scales") for name in weights if name.endswith(".scales"))


def _quantize_modules(model: nn.Module, paths: list[str], groups: Groups, source: Path) -> None:
    wanted = {path: groups.of(path) for path in paths}
    modules = {path for path, _ in model.named_modules()}
    if unknown := sorted(wanted.keys() - modules):
        raise _unexpected([f"{unknown[0]}.scales"], source)
    try:
        nn.quantize(model, class_predicate=lambda path, _: wanted.get(path, False))
    except ValueError as error:
        raise CheckpointError(
            f"The quantization in {source} does not fit its weights ({error}); convert the "
            "checkpoint again."
        ) from None


def _dequantize(
    path: str, weights: dict[str, mx.array], groups: dict[str, Any], source: Path, dtype: mx.Dtype
) -> None:
    """Replace the module's weight, scales (and biases) by the weight they stand for."""
    dense = take_dense(path, weights, groups, source).astype(dtype)
    mx.eval(dense)
    weights[f"{path}.weight"] = dense


def take_dense(
    path: str, weights: dict[str, mx.array], groups: dict[str, Any], source: Path
) -> mx.array:
    """Take a quantized module's tensors out of `weights`: their float32 weight, not evaluated."""
    if f"{path}.weight" not in weights:
        raise _missing([f"{path}.weight"], source)
    packed, scales = weights.pop(f"{path}.weight"), weights.pop(f"{path}.scales")
    biases = weights.pop(f"{path}.biases", None)
    if groups["mode"] == "affine":
        if biases is None:
            raise _missing([f"{path}.biases"], source)
        # In float32, or the rounding of a 16-bit product would be added to that of the scales.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    try:
        return mx.dequantize(packed, scales, biases, **groups, dtype=mx.float32)
    except ValueError as error:
        raise CheckpointError(
            f"{path} of {source} does not fit its quantization ({error}); convert the checkpoint "
            "again."
        ) from None


def refuse_drafter(folder: Path | str, config: Mapping[str, Any]) -> None:
    """CheckpointError when the config is a drafter's."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(
            f"The config of {folder} has architectures {names!r:.80}, which is no list of names; "
            "correct config.json."
        )
    own_keys = {"dflash_config", "target_layer_ids"} & config.keys()
    if own_keys or any("dflash" in str(name).lower() for name in names):
        raise CheckpointError(
            f"{folder} is a DFlash drafter, not a model; give the model it was made for, and this "
            "as its drafter."
        )


def _drop_harmless(weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Drop what never takes part: old rotary tables, and the head of a tied model (as HF does)."""
    for name in list(weights):
        tied_head = config.get("tie_word_embeddings") and name.startswith("lm_head.")
        if name.endswith(".rotary_emb.inv_freq") or tied_head:
            _log.debug("not used: %s", name)
            del weights[name]


def check_names(expected: Any, found: Any, source: Path) -> None:
    """CheckpointError that names missing or unexpected tensors."""
    if missing := sorted(expected - found):
        raise _missing(missing, source)
    if extra := sorted(found - expected):
        raise _unexpected(extra, source)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _missing(names: list[str], source: Path) -> CheckpointError:
    return CheckpointError(f"{source} lacks {_listed(names)}; fetch or convert it again.")


def _unexpected(names: list[str], source: Path) -> CheckpointError:
    return CheckpointError(
        f"{source} holds {_listed(names)}, which its model_type does not use; use a checkpoint "
        "that fits its config.json."
    )
