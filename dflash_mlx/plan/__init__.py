"""Whether a model fits a machine, before anything is fetched: arithmetic on its config.

Sizes are read by `shape`, turned into bytes by `memory`; `source` finds the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mlx.machine import memory_bytes, working_set_bytes
from dflash_mlx.plan.memory import (
    activation_bytes,
    cache_bytes,
    draft_cache_bytes,
    draft_precision,
    feature_bytes,
    precision,
)
from dflash_mlx.plan.shape import read_draft_shape, read_shape
from dflash_mlx.plan.source import Model, find_model
from dflash_mlx.registry import Pair

__all__ = [
    "BITS",
    "DEFAULT_CONTEXT",
    "Fit",
    "Memory",
    "Model",
    "drafter_bytes",
    "find_model",
    "mac_memory",
    "part_bytes",
    "plan",
    "target_bytes",
    "this_machine",
]

DEFAULT_CONTEXT = 8192
MAC_GIGABYTES = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
BITS = (16, 8, 6, 5, 4, 3, 2)
_GIB = 2**30
# What macOS lets the GPU use by default, of memory up to this size and above it.
_SMALL_MEMORY, _SMALL_SHARE, _LARGE_SHARE = 36 * _GIB, 2 / 3, 3 / 4


@dataclass(frozen=True)
class Memory:
    """A machine's memory in bytes and how much of it the program may use."""

    total: int
    limit: int
    metal: bool
    name: str


def mac_memory(gigabytes: float) -> Memory:
    """A Mac of this memory; its working-set limit by macOS's usual share, an estimate."""
    total = int(gigabytes * _GIB)
    share = _SMALL_SHARE if total <= _SMALL_MEMORY else _LARGE_SHARE
    return Memory(total, int(total * share), True, f"a Mac with {gigabytes:g} GB")


def this_machine() -> Memory:
    """This machine: on Metal its working-set limit, else all memory the process may use."""
    total, working_set = memory_bytes(), working_set_bytes()
    if working_set is None:
        return Memory(total, total, False, "this machine (CPU back-end, float32)")
    return Memory(total, working_set, True, "this machine")


@dataclass(frozen=True)
class Fit:
    """The bytes of every part, and what follows."""

    model: Model
    memory: Memory
    context: int
    bits: int | None  # None: the checkpoint as it is
    parts: dict[str, int]  # bytes, as far as they are known
    unknown: tuple[str, ...]  # parts whose sizes are not known: the total lacks them
    largest_context: int | None  # that fits; None when not even one block does
    advice: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.memory.limit


def plan(model: Model, memory: Memory, context: int | None = None, bits: int | None = None) -> Fit:
    """Bytes at `context` positions (by default 8192, or the model's limit) and what to change.

    bits: 16, or those of a quantization still to be made; None takes the checkpoint as it is.
    """
    limit = model.context
    if context is None:
        context = min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    parts = part_bytes(model, memory, context, bits)
    largest = _largest_context(model, memory, bits, limit or max(context, DEFAULT_CONTEXT))
    advice = _advice(model, memory, context, bits, largest)
    fits = sum(parts.values()) <= memory.limit
    too_long = limit is not None and context > limit
    told = [f"The model was made for {limit} positions; {context} are more."] if too_long else []
    told += [] if fits else advice
    return Fit(model, memory, context, bits, parts, _unknown(model), largest, tuple(told))


def target_bytes(pair: Pair) -> dict[int, int] | None:
    """Bytes of the pair's target by bits of its weights (16, 8, 4); None when not known.

    gpt-oss experts are published in MXFP4 and stay so at any number of bits.
    """
    if pair.config is None:
        return None
    shape = read_shape(pair.config)
    return {
        bits: precision(shape, metal=True, bits=bits, quantization=None).weight_bytes(shape)
        for bits in (16, 8, 4)
    }


def drafter_bytes(pair: Pair) -> int | None:
    """Bytes of the pair's drafter in 16 bits; None when not known."""
    if pair.draft is None or pair.config is None or pair.taps is None:
        return None
    shape = read_draft_shape(pair.draft, len(pair.taps), read_shape(pair.config).vocab_size)
    return draft_precision(2, None).weight_bytes(shape)


def part_bytes(model: Model, memory: Memory, context: int, bits: int | None) -> dict[str, int]:
    """Bytes by part: target, drafter, kv_cache, recurrent_state, draft_cache, tap_features,
    activations (an estimate). A drafter of unknown sizes has no parts here."""
    how = precision(model.target, metal=memory.metal, bits=bits, quantization=model.quantization)
    size, block = how.float_bytes, model.block
    draft = model.draft
    parts = {
        "target": how.weight_bytes(model.target),
        "drafter": draft_precision(size, model.draft_bits).weight_bytes(draft) if draft else 0,
        **cache_bytes(model.target, context, block, size),
        "draft_cache": draft_cache_bytes(draft, context, block, size) if draft else 0,
        "tap_features": feature_bytes(model.target, model.taps, context, size),
        "activations": activation_bytes(
            model.target, model.taps, context, block, size, fused=memory.metal
        ),
    }
    return {part: size for part, size in parts.items() if part not in _unknown(model)}


def _unknown(model: Model) -> tuple[str, ...]:
    """Parts that the model has and whose sizes are not known."""
    has_unknown = model.drafter is not None and model.draft is None
    return ("drafter", "draft_cache") if has_unknown else ()


def _largest_context(model: Model, memory: Memory, bits: int | None, most: int) -> int | None:
    """The most positions up to `most` that fit, to a multiple of 256 (or `most` itself)."""
    step = 256

    def fits(context: int) -> bool:
        return sum(part_bytes(model, memory, context, bits).values()) <= memory.limit

    if fits(most):
        return most
    if not fits(min(step, most)):
        return None
    low, high = 1, -(-most // step)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def _quantize_advice(bits: int, model: Model) -> str:
    """What to quantize to, and the ready conversion of no more bits."""
    fits = f"Quantize the target to {bits} bits: then it fits."
    ready = next(((b, spec) for b, spec in model.conversions if b <= bits), None)
    if ready is None:
        return fits
    has, spec = ready
    return f"{fits} {spec} is ready" + (f", with {has} bits." if has < bits else ".")


def _advice(
    model: Model, memory: Memory, context: int, bits: int | None, largest: int | None
) -> list[str]:
    """What would make it fit, one sentence each."""

    def fits(other: Memory, other_bits: int | None) -> bool:
        return sum(part_bytes(model, other, context, other_bits).values()) <= other.limit

    told = []
    if memory.metal:
        now = bits or (model.quantization or {}).get("bits", 16)
        if fewer := next((b for b in BITS if b < now and fits(memory, b)), None):
            told.append(_quantize_advice(fewer, model))
    if largest is not None and largest < context:
        told.append(f"Keep to a context of {largest}: then it fits.")
    if model.draft is not None:
        alone = part_bytes(model, memory, context, bits)
        without = sum(alone.values()) - alone["drafter"] - alone["draft_cache"]
        if without - alone["tap_features"] <= memory.limit:
            told.append("Decode without the drafter (--no-draft): then it fits, and is slower.")
    larger = next((gb for gb in MAC_GIGABYTES if fits(mac_memory(gb), bits)), None)
    if larger is not None and mac_memory(larger).total > memory.total:
        told.append(f"A Mac with {larger} GB is enough as it is.")
    return told or ["No smaller quantization of this model fits either. Choose a smaller model."]
