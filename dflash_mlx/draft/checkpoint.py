"""Opens a drafter's checkpoint folder for one target: strict tensors, and a check that both fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.draft.config import DFlashConfig, parse_config
from dflash_mlx.draft.dflash import DFlashDrafter, DFlashModel
from dflash_mlx.draft.dflash2 import UNQUANTIZED, DFlash2Drafter, DFlash2Model
from dflash_mlx.draft.head import token_order
from dflash_mlx.draft.keys import Config
from dflash_mlx.draft.packagings import packaging_of
from dflash_mlx.draft.vocabulary import pop_target_ids
from dflash_mlx.errors import CheckpointError, MismatchError, UsageError
from dflash_mlx.weights import read_config, read_weights

if TYPE_CHECKING:
    from dflash_mlx.models.base import Target

# Parts of tensor names that tell another packaging or drafter, and what to call it.
_OTHERS = {
    "encoder": "Meta's assistant packaging (encoder.fc)",
    "candidate_selector": "DFlash 2 (candidate_selector)",
    "d2t": "a reduced draft vocabulary (d2t)",
    "t2d": "a reduced draft vocabulary (t2d)",
    "mask_embedding": "a mask embedding of its own (mask_embedding)",
    "attention_sink_bias": "attention sinks (attention_sink_bias)",
    "aux_hidden_norms": "Laguna's norms of taps (aux_hidden_norms)",
    "g_proj": "Laguna's attention gates (g_proj)",
    "qkv_proj": "Laguna's fused projections (qkv_proj)",
}

# Tables that a drafter may bring instead of borrowing the target's.
_TABLES = ("embed_tokens", "lm_head")

#: stands in the folder of a training run until it is finished; a stopped one may have no state yet
UNFINISHED = "training.unfinished.json"


def open_drafter(
    folder: Path,
    target: Target,
    *,
    dtype: mx.Dtype,
    bits: int | None = None,
    group_size: int = 64,
) -> DFlashDrafter:
    """Load the DFlash v1 or DFlash 2 drafter in `folder`, in `dtype`, bound to `target`.

    `bits` 4 or 8 quantizes its linear layers and its own tables in groups of `group_size` inputs;
    DFlash 2's convolutions and selector stay in `dtype`. CheckpointError for a folder that is no
    complete drafter, MismatchError when it does not fit the target.
    """
    model, config, weights, target_ids = _checked(folder, target, bits, group_size)
    _load(model, weights, dtype)
    if bits is not None:
        nn.quantize(model, group_size=group_size, bits=bits, class_predicate=is_quantized)
        mx.eval(model.parameters())
    order = None if target_ids is not None else token_order(folder, target.vocab_size)
    kind = DFlash2Drafter if config.parts else DFlashDrafter
    return kind(model, config, target, target_ids, order)


def check_drafter(
    folder: Path, target: Target, *, bits: int | None = None, group_size: int = 64
) -> None:
    """Raise what `open_drafter` would, without reading weights; the target's may be unset."""
    _checked(folder, target, bits, group_size)


def check_config(
    stored: Config, target: Target, *, bits: int | None = None, group_size: int = 64
) -> None:
    """Raise what `open_drafter` would as far as config.json alone tells it."""
    config = parse_config(stored)
    check_fit(config, target)
    if bits is not None:
        config = replace(config, vocab_size=target.vocab_size)
        refuse_uneven((DFlash2Model if config.parts else DFlashModel)(config, []), group_size)


def _checked(
    folder: Path, target: Target, bits: int | None, group_size: int
) -> tuple[DFlashModel, DFlashConfig, dict[str, mx.array], mx.array | None]:
    """Model with unset weights, config, the weights that are exactly the model's, target ids."""
    if bits not in (None, 4, 8):
        raise UsageError(f"Drafters cannot be quantized to {bits} bits; choose 4 or 8.")
    if folder.is_file():
        raise CheckpointError(
            f"The drafter {folder} is a file, and drafters are folders of safetensors; give such a "
            "folder or a hub repo."
        )
    if unfinished(folder) and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} is a training run's and has no drafter yet; give the command of the run "
            "again, and use the folder after its first measurement."
        )
    stored = read_config(folder)
    config = parse_config(stored)
    check_fit(config, target)
    config = replace(config, vocab_size=target.vocab_size)
    weights = packaging_of(stored).rename(read_weights(folder))
    target_ids = pop_target_ids(weights, config, folder)
    own = [table for table in _TABLES if f"{table}.weight" in weights]
    model = (DFlash2Model if config.parts else DFlashModel)(config, own)
    _check_tensors(model, config, weights, folder)
    if bits is not None:
        refuse_uneven(model, group_size)
    return model, config, weights, target_ids


def unfinished(folder: Path) -> bool:
    """Whether the folder is a training run's that has not come to its end."""
    return (folder / UNFINISHED).exists()


def check_fit(config: DFlashConfig, target: Target) -> None:
    """MismatchError, both values named, unless the drafter was made for a target like this."""
    taps, layers = config.target_layer_ids, target.num_layers
    if config.hidden_size != target.hidden_size:
        raise _mismatch(
            f"reads hidden states of width {config.hidden_size} (fc takes {len(taps)} taps, "
            f"{config.feature_size} in all)",
            f"gives {target.hidden_size} ({len(taps) * target.hidden_size} in all)",
        )
    if max(taps) >= layers:
        raise _mismatch(f"taps layer {max(taps)}", f"has {layers} layers, 0 to {layers - 1}")
    if config.num_target_layers not in (None, layers):
        raise _mismatch(
            f"was made for a target of {config.num_target_layers} layers", f"has {layers}"
        )
    if config.vocab_size not in (None, target.vocab_size):
        raise _mismatch(
            f"has a vocabulary of {config.vocab_size}", f"has one of {target.vocab_size}"
        )
    if config.mask_token_id >= target.vocab_size:
        raise _mismatch(
            f"uses mask token id {config.mask_token_id}",
            f"knows ids up to {target.vocab_size - 1}",
        )


def _mismatch(drafter: str, target: str) -> MismatchError:
    return MismatchError(
        f"The drafter {drafter}, the target {target}; use the drafter that was made for this "
        "target, or none."
    )


def _load(model: DFlashModel, weights: dict[str, mx.array], dtype: mx.Dtype) -> None:
    """Move checked tensors into the model one by one, evaluated."""
    for name in list(weights):
        tensor = weights.pop(name).astype(dtype)
        mx.eval(tensor)
        model.load_weights([(name, tensor)], strict=False)


def _check_tensors(
    model: DFlashModel, config: DFlashConfig, weights: dict[str, mx.array], folder: Path
) -> None:
    """CheckpointError unless the weights are the model's parameters, by name, shape and type."""
    wanted = {name: array.shape for name, array in _parameters(model)}
    _check_names(weights, set(wanted), folder)
    fc = weights["fc.weight"].shape
    if fc != (config.hidden_size, config.feature_size):
        raise CheckpointError(
            f"fc.weight of {folder} has shape {fc}, but {len(config.target_layer_ids)} taps of "
            f"width {config.hidden_size} need {(config.hidden_size, config.feature_size)}; use a "
            "drafter whose config.json belongs to its weights."
        )
    for name, shape in wanted.items():
        tensor = weights[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"Tensor {name} of {folder} has shape {tensor.shape}, its config.json asks for "
                f"{shape}; use a drafter whose config.json belongs to its weights."
            )
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise CheckpointError(
                f"Tensor {name} of {folder} is stored as {tensor.dtype}; use a drafter with "
                "floating-point weights."
            )


def _parameters(model: DFlashModel) -> list[tuple[str, mx.array]]:
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    return flat


def _check_names(weights: dict[str, mx.array], wanted: set[str], folder: Path) -> None:
    for name in sorted(weights.keys() - wanted):
        for part in name.split("."):
            if part in _OTHERS:
                raise CheckpointError(
                    f"The drafter in {folder} is packaged with {_OTHERS[part]}, which its "
                    "config.json does not announce or which is not supported; use a drafter in "
                    "the official DFlash format."
                )
    if missing := sorted(wanted - weights.keys()):
        raise CheckpointError(
            f"The drafter in {folder} lacks {_listed(missing)}; fetch the drafter again."
        )
    if extra := sorted(weights.keys() - wanted):
        raise CheckpointError(
            f"The drafter in {folder} holds tensors its config.json does not explain: "
            f"{_listed(extra)}; use a drafter in the official DFlash format."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def is_quantized(name: str, module: nn.Module) -> bool:
    kept = any(part in UNQUANTIZED for part in name.split("."))
    return isinstance(module, nn.Linear | nn.Embedding) and not kept


def refuse_uneven(model: DFlashModel, group_size: int) -> None:
    for name, module in model.named_modules():
        if is_quantized(name, module) and module.weight.shape[-1] % group_size:
            raise UsageError(
                f"The drafter's {name} has {module.weight.shape[-1]} inputs, no multiple of the "
                f"group size {group_size}; leave --draft-bits out."
            )
