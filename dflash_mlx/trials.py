"""Every kernel on the shapes and number types of one model; the weights are made up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import hub, registry
from dflash_mlx.cache import CacheStack, LayerCache
from dflash_mlx.draft.checkpoint import check_fit, is_quantized, refuse_uneven
from dflash_mlx.draft.config import DFlashConfig, parse_config
from dflash_mlx.draft.dflash import DFlashDrafter, DFlashModel
from dflash_mlx.draft.dflash2 import DFlash2Drafter, DFlash2Model
from dflash_mlx.errors import SourceError
from dflash_mlx.features import Features
from dflash_mlx.kernels import attention, kernels_active, matmul, rows_matmul
from dflash_mlx.layers.attention import Attention
from dflash_mlx.layers.gated_delta_net import GatedDeltaNet
from dflash_mlx.layers.gemma_attention import GemmaAttention
from dflash_mlx.loader import empty_target, resolve_dtype
from dflash_mlx.models.base import Target
from dflash_mlx.models.decoder import DecoderTarget
from dflash_mlx.segment import Segment
from dflash_mlx.weights import bundled_drafter, read_config

#: rows of a small block: kernels of up to eight rows are compiled apart
FEW = 5
#: rows of context, so that attention is cut into several splits
CONTEXT = 300

Mixer = Attention | GemmaAttention | GatedDeltaNet


@dataclass(frozen=True)
class Subject:
    """What is tried. drafter: its config, None without one; bits: 4 or 8 of a quantized drafter."""

    target: DecoderTarget
    drafter: DFlashConfig | None
    bits: int | None
    remarks: tuple[str, ...]  # on what could not be found


def subject(
    model: str, draft: str | None = None, bits: int | None = None, dtype: str = "auto"
) -> Subject:
    """The shapes of a model and its drafter, which have to be on this disk; nothing is fetched.

    SourceError where the model, or a drafter given by name, is not. Arguments are those of
    `engine.load`; no weight is read.
    """
    found = registry.resolve(model, drafter=draft)
    path = hub.local_path(found.target_spec, revision=found.target_revision)
    if path is None and found.target_spec.startswith((".", "/", "~")):
        raise SourceError(f"{found.label} is no folder of a model and no GGUF file.")
    if path is None:
        raise SourceError(
            f"{found.label} is not on this disk, so its shapes are not known. `dflash-mlx plan "
            f"{model}` tells whether it fits; `dflash-mlx chat {model}` fetches it."
        )
    target = empty_target(path, resolve_dtype(dtype, metal=True))
    spec, place = found.drafter_spec, None
    if spec is not None:
        place = hub.local_path(spec, revision=found.drafter_revision)
    elif bundled := bundled_drafter(path):
        (place, own), spec = bundled, str(bundled[0])
        bits = bits or own
    if place is None or not place.is_dir():
        why = "no drafter is known for it" if spec is None else f"{spec} is not on this disk"
        if draft is not None:
            raise SourceError(f"The drafter {why}. Give a folder.")
        return Subject(target, None, None, (f"The kernels of a drafter were not tried: {why}.",))
    config = parse_config(read_config(place))
    check_fit(config, target)
    return Subject(target, replace(config, vocab_size=target.vocab_size), bits, ())


def try_model(given: Subject) -> None:
    """Run every kernel that is active as the model would; `kernels.rejections` tells the rest."""
    if not kernels_active():
        return
    target, config = given.target, given.drafter
    block = matmul.MAX_ROWS if config is None else config.block_size
    for mixer, make_cache in _mixers(target):
        _try_mixer(mixer, make_cache, target)
    _try_products(target, block)
    if config is not None:
        _try_drafter(config, target, given.bits)
    mx.clear_cache()


def _noise(target: Target, rows: int, width: int | None = None) -> mx.array:
    return mx.random.normal((1, rows, width or target.hidden_size)).astype(target.dtype)


def _mixers(target: DecoderTarget) -> Iterator[tuple[Mixer, Callable[[], LayerCache]]]:
    """One layer's attention or recurrence of each kind, and what makes a cache for it."""
    seen: set[Hashable] = set()
    for layer in target.model.layers:
        for module in layer.modules():
            if not isinstance(module, Mixer) or getattr(module, "borrows", False):
                continue
            if (kind := _kind(module)) not in seen:
                seen.add(kind)
                yield module, layer.make_cache


def _kind(module: Mixer) -> Hashable:
    if isinstance(module, GatedDeltaNet):
        return module.sizes
    return module.heads, module.kv_heads, module.head_dim, module.window


def _try_mixer(mixer: Mixer, make_cache: Callable[[], Any], target: Target) -> None:
    """Every count of rows that kernels take, at the beginning and behind contexts."""
    for context in (0, 1, CONTEXT):
        cache = make_cache()
        stack = CacheStack([cache])

        def run(rows: int, kept: int, stack: CacheStack = stack, cache: Any = cache) -> None:
            segment = Segment(mx.zeros((rows,), mx.int32), stack)
            mx.eval(mixer(_noise(target, rows), [segment], [cache]), stack.arrays())
            stack.commit(kept)
            mx.eval(stack.arrays())

        if context:
            run(context, context)
        for rows in range(1, attention.MAX_ROWS + 1):
            run(rows, 0)
        run(FEW, FEW - 1)  # as a block whose last draft is refused


def _try_products(target: DecoderTarget, block: int) -> None:
    """Exact mode's: every kind of matrix that the target has."""
    seen: set[Hashable] = set()
    kinds = nn.Linear | nn.QuantizedLinear
    modules = [m for m in target.modules() if isinstance(m, kinds)]
    if "lm_head" not in target:
        modules.append(target.model.embed_tokens)
    for module in modules:
        weights = matmul.weights_of(module)
        if weights is None or weights.variant in seen:
            continue
        seen.add(weights.variant)
        for rows in {FEW, min(block, matmul.MAX_ROWS)}:
            mx.eval(rows_matmul(_noise(target, rows, weights.columns), module))


class _Tables:
    """Stands for the target's embedding and head, which no kernel sees."""

    def __init__(self, target: DecoderTarget) -> None:
        self._target = target
        self.vocab_size, self.dtype = target.vocab_size, target.dtype

    def embed(self, ids: mx.array) -> mx.array:
        return _noise(self._target, ids.shape[1])

    def head(self, rows: mx.array) -> mx.array:
        return rows[..., : self.vocab_size]


def _try_drafter(config: DFlashConfig, target: DecoderTarget, bits: int | None) -> None:
    model = (DFlash2Model if config.parts else DFlashModel)(config)
    # As loading holds it: float16 overflows in the fused features.
    model.set_dtype(mx.float32 if target.dtype == mx.float32 else mx.bfloat16)
    if bits is not None:
        refuse_uneven(model, 64)
        nn.quantize(model, 64, bits, class_predicate=is_quantized)
    kind: Any = DFlash2Drafter if config.parts else DFlashDrafter
    drafter = kind(model, config, _Tables(target))
    cache = drafter.make_cache()
    anchor = mx.zeros((1,), mx.int32)
    sizes = range(2, config.block_size + 1)
    for rows in (*sizes, CONTEXT, *sizes):
        taps = [_noise(target, rows) for _ in config.target_layer_ids]
        drafter.observe(Features(taps), cache)
        proposal = drafter.propose(anchor, min(rows, config.block_size) - 1, None, cache)
        mx.eval(proposal.tokens, cache.arrays())
