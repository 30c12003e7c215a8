"""Where a drafter's weights start: the target's own last layers, a released drafter, or chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.config import DFlashConfig, parse_config
from dflash_mlx.draft.dflash import DFlashModel
from dflash_mlx.draft.dflash2 import DFlash2Model
from dflash_mlx.draft.packagings import official_config
from dflash_mlx.errors import UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.train.gemma_start import gemma_parts, is_gemma
from dflash_mlx.train.wording import counted
from dflash_mlx.weights import read_config

Weights = dict[str, mx.array]

#: a layer's parts that a target of the same shapes has too
_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
_STD = 0.02


@dataclass(frozen=True)
class Start:
    """First weights by name, float32, and the names of those that came from the target."""

    weights: Weights
    taken: tuple[str, ...]
    revision: str | None = None  # the commit of a drafter from the hub
    content: str | None = None  # a hash of the weights and config of one from elsewhere


def new_model(config: DFlashConfig) -> DFlashModel:
    """A drafter's module for this config, weights not set."""
    return (DFlash2Model if config.parts else DFlashModel)(config)


def random_start(config: DFlashConfig, seed: int) -> Start:
    """Matrices from N(0, 0.02), norms one, convolutions that pass everything, a mute selector."""
    weights: Weights = {}
    for name, like in tree_flatten(new_model(config).parameters()):
        # Named, not in order: a drafter with more layers starts the shared ones the same way.
        random = np.random.default_rng([seed, *name.encode()])
        if "norm" in name:
            value = np.ones(like.shape)
        elif name.endswith("base_kernel"):
            value = np.zeros(like.shape)
            value[:, 0] = 1
        elif name.endswith(("kernel_projection.weight", "successor_codebook", ".bias")):
            value = np.zeros(like.shape)
        elif name.endswith("predecessor_codebook"):
            value = random.normal(0, 0.3, like.shape)
        else:
            value = random.normal(0, _STD, like.shape)
        weights[name] = mx.array(value.astype(np.float32))
    mx.eval(weights)
    return Start(weights, ())


def target_start(config: DFlashConfig, target: Target, seed: int) -> Start:
    """The drafter's layers are the target's last ones, as far as their shapes agree.

    The context projection passes one tap on, the nearest to what the first of those layers reads
    (for two layers exactly that, with the taps of the paper); the other taps start with small
    random weights. Parts that the target does not have alike stay random.
    """
    weights = dict(random_start(config, seed).weights)
    layers = target_layers(target)
    first = len(layers) - config.num_hidden_layers
    taken: list[str] = []

    def put(name: str, found: mx.array | None) -> None:
        if found is not None and name in weights and found.shape == weights[name].shape:
            weights[name] = found
            taken.append(name)

    def take(name: str, module: nn.Module | None) -> None:
        put(name, dense(module) if module is not None else None)

    stream = 1.0  # what the target's layers have multiplied the residual stream by
    for index in range(config.num_hidden_layers):
        if first + index < 0:
            continue
        source = layers[first + index]
        if is_gemma(source):
            for part, value in gemma_parts(source, config, stream, dense).items():
                put(f"layers.{index}.{part}.weight", value)
            stream *= float(source.layer_scalar.item())
            continue
        for part in _PARTS:
            take(f"layers.{index}.{part}.weight", _child(source, part))
    take("norm.weight", _child(target, "model.norm"))
    if first >= 0:
        take("hidden_norm.weight", _child(layers[first], "input_layernorm"))
    hidden, taps = config.hidden_size, config.target_layer_ids
    below = min(range(len(taps)), key=lambda i: (abs(taps[i] - (first - 1)), taps[i]))
    fc = np.array(weights["fc.weight"]) / 4
    fc[:, below * hidden : (below + 1) * hidden] += np.eye(hidden, dtype=np.float32)
    weights["fc.weight"] = mx.array(fc)
    mx.eval(weights)
    return Start(weights, tuple(taken))


def target_layers(target: Target) -> Sequence[nn.Module]:
    """The target's decoder layers, first to last."""
    model: Any = target
    return list(model.model.layers)


def _child(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = module.get(part) if isinstance(module, Mapping) else getattr(module, part, None)
        if module is None:
            return None
    return module


def dense(module: nn.Module) -> mx.array | None:
    """A module's weight in float32, dequantized where it is packed; None when it has none."""
    if "weight" not in module:
        return None
    weight = module["weight"]
    if "scales" in module:
        mode = getattr(module, "mode", "affine")
        weight = mx.dequantize(
            weight,
            module["scales"],
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=mode,
        )
    weight = weight.astype(mx.float32)
    mx.eval(weight)
    return weight


def drafter_start(
    folder: Path,
    target: Target,
    seed: int,
    layers: int | None = None,
    parts: Mapping[str, Any] | None = None,
    block_size: int | None = None,
) -> tuple[dict[str, Any], Start]:
    """A drafter's config.json, official whatever its own, and weights, to be trained for `target`.

    layers: more than it has adds some that change nothing yet. parts: DFlash 2's keys, for a v1
    drafter that gets convolutions and a selector, which change nothing yet either. block_size:
    another than its own, since a block's masks differ by nothing but their positions.
    CheckpointError or MismatchError as when it is opened for generation; UsageError for one that
    brings its own tables or vocabulary, or has more layers or parts already.
    """
    drafter = open_drafter(folder, target, dtype=mx.float32)
    stored = official_config(read_config(folder), target.vocab_size, target.num_layers)
    if block_size is not None:
        stored |= {"block_size": block_size}
        stored["dflash_config"] |= {"block_size": block_size}
    known = {name: mx.array(array) for name, array in tree_flatten(drafter.model.parameters())}
    mx.eval(known)
    config = drafter.config
    tables = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in known]
    if tables or config.draft_vocab_size:
        raise UsageError(
            f"The drafter in {folder} has {', '.join(tables) or 'a vocabulary'} of its own, which "
            "training does not support. Start from a drafter that borrows the target's."
        )
    if layers is not None and layers < config.num_hidden_layers:
        raise UsageError(
            f"The drafter in {folder} has {counted(config.num_hidden_layers, 'layer')}; give as "
            f"many or more, not {layers}."
        )
    if parts and config.parts:
        raise UsageError(f"The drafter in {folder} has a selector already. Leave its rank out.")
    if layers is None and not parts:
        return stored, Start(known, ())
    grown = _grown_config(stored, config, layers or config.num_hidden_layers, parts)
    weights = dict(random_start(parse_config(grown), seed).weights)
    for name in weights:
        index = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if index >= config.num_hidden_layers:
            name_below = name.replace(f"layers.{index}.", f"layers.{config.num_hidden_layers - 1}.")
            silent = name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias"))
            weights[name] = (
                mx.zeros(weights[name].shape) if silent else known.get(name_below, weights[name])
            )
    return grown, Start({**weights, **known}, ())


def _grown_config(
    stored: dict[str, Any], config: DFlashConfig, layers: int, parts: Mapping[str, Any] | None
) -> dict[str, Any]:
    grown = {**stored, "num_hidden_layers": layers}
    kinds = stored.get("layer_types")
    if kinds:
        grown["layer_types"] = [*kinds, *[kinds[-1]] * (layers - config.num_hidden_layers)]
    if parts:
        grown["architectures"] = ["DFlash2DraftModel"]
        grown["dflash_config"] = {**stored["dflash_config"], **parts}
    return grown
