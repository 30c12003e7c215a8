"""Bytes of a target, its drafter and one sequence: how the program allocates, in numbers.

Buffers grow by steps; the same steps are taken here as in cache/ and decode/session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.plan.quantization import MXFP4_BITS, own_settings, weight_bits
from dflash_mlx.plan.shape import QUANTIZED, Layer, Shape, kind_of

# As in cache/kv, cache/context and decode/session, which are not imported since they need MLX.
GROWTH_ROWS = 256
REWIND_ROWS = 64
SPARE_ROWS, SPARE_SHARE = 64, 8
PREFILL_CHUNK = 512

_ROUTER_BITS = 8  # routers are kept in 8 bits by mlx-lm's recipes


@dataclass(frozen=True)
class Precision:
    """How numbers are held: bytes of a float, bits of a quantized weight by kind and by path."""

    float_bytes: int
    weight_bits: Mapping[str, float] = field(default_factory=dict)
    own_bits: Mapping[str, float] = field(default_factory=dict)  # of single modules, by path

    def weight_bytes(self, shape: Shape) -> int:
        total = sum(count * self._bits(kind) for kind, count in shape.weights.items())
        for path in self.own_bits.keys() & shape.modules.keys():
            total += shape.modules[path] * (self.own_bits[path] - self._bits(kind_of(path)))
        return int(total / 8)

    def _bits(self, kind: str) -> float:
        return self.weight_bits.get(kind, 8 * self.float_bytes)


def precision(
    shape: Shape, *, metal: bool, bits: int | None, quantization: Mapping[str, Any] | None
) -> Precision:
    """What the loader makes of a checkpoint.

    bits: 16, or those of an affine quantization in groups of 64; None: as the checkpoint is,
    `quantization` being that object of its config.json. The CPU back-end holds all weights in
    float32, whatever the checkpoint.
    """
    if not metal:
        return Precision(4)
    if bits is None and quantization:
        held = weight_bits(quantization) or 16
        own = {
            path: weight_bits(quantization, settings) or 16
            for path, settings in own_settings(quantization).items()
        }
        return Precision(2, dict.fromkeys(QUANTIZED, held), own)
    by_kind: dict[str, float] = {}
    if bits is not None and bits < 16:
        by_kind = dict.fromkeys(QUANTIZED, _affine(bits))
        by_kind["router"] = _affine(max(bits, _ROUTER_BITS))
    if shape.experts_mxfp4:
        by_kind["experts"] = MXFP4_BITS
    return Precision(2, by_kind)


def _affine(bits: int) -> float:
    return weight_bits({"bits": bits}) or 16


def draft_precision(float_bytes: int, bits: int | None) -> Precision:
    """What the drafter's loader makes of 4 or 8 bits, on either back-end: groups of 64."""
    if bits is None:
        return Precision(float_bytes)
    # A scale and a bias of a group, in the floats that are not quantized.
    common = bits + 2 * 8 * float_bytes / 64
    return Precision(float_bytes, dict.fromkeys(("linear", "embedding", "head"), common))


def cache_bytes(shape: Shape, context: int, block: int, float_bytes: int) -> dict[str, int]:
    """The most that the target keeps of a sequence of `context` positions, while the prompt is
    read, when windows hold a chunk more, or with the last block in verification."""
    layers = [(layer.kv_width, layer.window) for layer in shape.layers]
    state = sum(_state_bytes(layer, context, block, float_bytes) for layer in shape.layers)
    kv = _most_rows(layers, attention_rows, context, block) * float_bytes
    return {"kv_cache": kv, "recurrent_state": state}


def _most_rows(
    layers: Sequence[tuple[int, int | None]],
    rows_of: Callable[[int | None, int, int], list[int]],
    context: int,
    block: int,
) -> int:
    """Numbers in all layers' rows at the write after which they are most; width, window a layer."""
    widths: dict[int | None, int] = {}
    for width, window in layers:
        widths[window] = widths.get(window, 0) + width
    rows = [[width * n for n in rows_of(w, context, block)] for w, width in widths.items() if width]
    return max(map(sum, zip(*rows, strict=True)), default=0)


def _state_bytes(layer: Layer, context: int, block: int, float_bytes: int) -> int:
    """A state before the block and one behind it, and the block's rows and inputs."""
    if not layer.state:
        return 0
    states = 2 if context > block else 1  # nothing is kept before the first row
    inputs = (states * layer.conv_tail + block) * layer.channels
    return 4 * (states * layer.state + block * layer.row) + float_bytes * inputs


def draft_cache_bytes(shape: Shape, context: int, block: int, float_bytes: int) -> int:
    """The drafter's context K/V."""
    layers = [(layer.kv_width, layer.window) for layer in shape.layers]
    return _most_rows(layers, drafter_rows, context, block) * float_bytes


def attention_rows(window: int | None, context: int, block: int) -> list[int]:
    """Rows a target layer's buffers have room for after each write (cache/kv, cache/window)."""
    if window is not None:
        buffer = _Buffer(window)
        return [buffer.write(rows) for rows in _writes(context, block)]
    end = capacity = 0
    found = []
    for rows in _writes(context, block):
        end += rows
        if end > capacity:
            capacity = _rounded(max(end, capacity + max(GROWTH_ROWS, capacity // 4)))
        found.append(capacity)
    return found


def drafter_rows(window: int | None, context: int, block: int) -> list[int]:
    """Rows that a drafter layer's buffers have room for after each write (cache/context)."""
    buffer = _Buffer(window)
    *prompt, last = _writes(context, block)
    found = []
    for rows in prompt:
        given = rows if window is None else min(rows, window - 1 + REWIND_ROWS)
        if given < rows:
            buffer.held = 0
        found.append(buffer.write(given, superseded=given))
    return [*found, buffer.write(last)]


class _Buffer:
    """The size of a LayerContext's buffer."""

    def __init__(self, window: int | None) -> None:
        self.window, self.held, self.capacity = window, 0, 0

    def write(self, rows: int, superseded: int = 0) -> int:
        """Rows there is room for then."""
        if self.window is None:
            if self.held + rows > self.capacity:
                self.capacity = _roomy(self.held, rows)
        else:
            reach = self.window - 1 + REWIND_ROWS
            spare = max(SPARE_ROWS, self.window // SPARE_SHARE)
            keep = min(self.held, max(0, reach - superseded))
            largest = max(keep + rows, reach + spare)
            if self.held + rows > self.capacity or self.capacity > largest:
                self.held = keep
                self.capacity = min(largest, keep + max(rows, GROWTH_ROWS, keep // 4))
        self.held += rows
        return self.capacity


def _roomy(keep: int, rows: int) -> int:
    return _rounded(keep + max(rows, GROWTH_ROWS, keep // 4))


def _rounded(rows: int) -> int:
    return -(-rows // GROWTH_ROWS) * GROWTH_ROWS


def _writes(context: int, block: int) -> Iterator[int]:
    """A prompt that fills the context but for one block, chunk by chunk, then that block."""
    prompt = max(0, context - block)
    yield from [PREFILL_CHUNK] * (prompt // PREFILL_CHUNK)
    if rest := prompt % PREFILL_CHUNK:
        yield rest
    yield min(block, context)


def feature_bytes(shape: Shape, taps: int, context: int, float_bytes: int) -> int:
    """The tapped features of the largest chunk of a prompt."""
    return min(PREFILL_CHUNK, context) * taps * shape.hidden_size * float_bytes


def activation_bytes(
    shape: Shape, taps: int, context: int, block: int, float_bytes: int, *, fused: bool
) -> int:
    """An estimate of what a forward holds at once beside weights and caches.

    The largest of a prompt's chunk: residual stream, one layer's projections and MLP, and without
    `fused` attention one layer's scores; and of a block: its logits.
    """
    rows = min(PREFILL_CHUNK, context)
    layers = [
        rows
        * (4 * shape.hidden_size + 2 * (a.query_width + a.kv_width) + 3 * a.active_width)
        * float_bytes
        + (0 if fused else 2 * 4 * a.heads * rows * min(context, (a.window or context) + rows))
        + 4 * rows * a.row
        for a in shape.layers
    ]
    tapped = taps * rows * shape.hidden_size * float_bytes
    logits = block * shape.vocab_size * (float_bytes + 8)
    return max(max(layers) + tapped, logits)
