"""How much memory a training step takes, how many blocks a pass fit, and what to do when it ends.

Sizes are estimates from above: the shapes of what the backward pass keeps, in float32, with slack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from dflash_mlx.cache.kv import GROWTH_ROWS
from dflash_mlx.draft.config import DFlash2Parts, DFlashConfig
from dflash_mlx.errors import UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.segment import packed
from dflash_mlx.train.batches import Work, passes
from dflash_mlx.train.decoding import cache_bytes
from dflash_mlx.train.features import PASS_ROWS
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.start import target_layers
from dflash_mlx.train.wording import shown_bytes

_FLOAT = 4
#: copies of every weight beside the forward pass: master, both moments, gradient, its clipped form
_WEIGHT_COPIES = 6
#: of the head's rows: this epoch's, and the last one's while they are made
_HEAD_COPIES = 2
#: arrays of a row's attention weights that are alive at once: scores, masked, joined, softmax, and
#: the gradients of these
_SCORE_COPIES = 8
#: the same where nothing is kept for gradients
_TARGET_SCORES = 4
#: of the logits: themselves, the steps of exponentials made of products, and their gradients
_LOGIT_COPIES = 9
#: measured peaks are up to 1.65 times the sum of the shapes
_SLACK = 1.9
#: steps that are looked at: those whose contexts are longest
_STEPS = 64


@dataclass(frozen=True)
class Room:
    """What a run holds at a time, besides what MLX has allocated when it is planned.

    weights: numbers of the drafter. head_tokens: rows of the restricted head. feature_size: bytes
    of a token's features. target_pass: bytes of a pass of the target that computes features.
    """

    weights: int
    head_tokens: int
    feature_size: int
    target_pass: int = 0


def pass_bytes(config: DFlashConfig, head_tokens: int, texts: Sequence[tuple[int, int]]) -> int:
    """Bytes of one pass over texts of (blocks, context rows) each."""
    size, heads = config.block_size, config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    rows = size * sum(blocks for blocks, _ in texts)
    context = sum(length for _, length in texts)
    one_layer = rows * (8 * hidden + 6 * inner + 6 * width + 6 * kv_width)
    one_layer += context * 6 * kv_width
    scores = heads * sum(blocks * size * (length + size) for blocks, length in texts)
    total = config.num_hidden_layers * one_layer + 3 * rows * hidden
    total += _SCORE_COPIES * scores * config.num_hidden_layers // 2
    total += context * (2 * config.feature_size + 4 * hidden)
    total += _LOGIT_COPIES * rows * head_tokens
    if config.parts:
        total += rows * _second_numbers(config.parts, config)
    return round(total * _FLOAT * _SLACK)


def _second_numbers(parts: DFlash2Parts, config: DFlashConfig) -> int:
    """Numbers a row that DFlash 2 keeps: coefficients, lagged rows, products, candidates."""
    # Two convolutions a layer, on two sides each; a coefficient comes with its gradient.
    convolutions = 4 * config.num_hidden_layers * parts.conv_kernel_size * 3 * config.hidden_size
    return convolutions + 3 * parts.selector_top_k * parts.selector_rank


def target_pass_bytes(target: Target, features: int, vocab: int, lengths: Sequence[int]) -> int:
    """Bytes of the largest pass of the target over texts of these lengths; 0 without texts.

    features: numbers of a token. vocab: 0 where no likely tokens are kept.
    """
    heads = max(getattr(layer.get("self_attn"), "heads", 0) for layer in target_layers(target))
    caches: dict[int, int] = {}

    def cached(length: int) -> int:
        grown = -(-length // GROWTH_ROWS) * GROWTH_ROWS
        if grown not in caches:
            caches[grown] = cache_bytes(target, grown)
        return caches[grown]

    most = 0
    # Sorted, so that as many short texts as a pass can hold, with a cache each, are together.
    for batch in packed(sorted(lengths), lambda length: length, PASS_ROWS):
        whole, longest = sum(batch), batch[-1]
        rows = min(whole, PASS_ROWS)
        numbers = rows * 24 * target.hidden_size + whole * (target.hidden_size + 2 * features)
        numbers += 4 * vocab * whole
        # A head's scores of one text after another.
        numbers += _TARGET_SCORES * heads * min(longest, PASS_ROWS) * longest
        most = max(most, numbers * _FLOAT + sum(map(cached, batch)))
    return most


def fitted(
    recipe: Recipe,
    config: DFlashConfig,
    room: Room,
    steps: Sequence[Sequence[Work]],
    limit_bytes: int,
    streams: int,
) -> Recipe:
    """The recipe with as few blocks a pass as `limit_bytes` ask for, besides what is held now.

    steps: those of an epoch. UsageError when not even one block a pass fits.
    """
    # A stream's passes have a gradient of their own.
    copies = _WEIGHT_COPIES + streams - 1
    held = mx.get_active_memory() + room.weights * _FLOAT * copies
    held += room.head_tokens * config.hidden_size * _FLOAT * _HEAD_COPIES
    longest = sorted(steps, key=_rows)[-_STEPS:]
    held += room.feature_size * _rows(longest[-1])
    least = one = 0
    for blocks in range(recipe.pass_blocks, 0, -1):
        parts = [part for step in longest for part in passes(step, blocks)]
        one = max(
            pass_bytes(
                config, room.head_tokens, [(len(w.anchors), int(w.anchors.max())) for w in part]
            )
            for part in parts
        )
        least = held + max(room.target_pass, streams * one)
        if least <= limit_bytes:
            return replace(recipe, pass_blocks=blocks)
    if held + streams * one <= limit_bytes:
        raise UsageError(
            f"The target's passes over the texts take {shown_bytes(least)} with what is held "
            f"besides, more than the {shown_bytes(limit_bytes)} there are. Raise --memory, or "
            f"lower --max-length (now {recipe.max_length})."
        )
    raise UsageError(
        f"A pass over one block takes {least / 1e9:.3g} GB with the target and the drafter, more "
        f"than the {limit_bytes / 1e9:.3g} GB there are. Lower --max-length (now "
        f"{recipe.max_length}), or raise --memory."
    )


def _rows(step: Sequence[Work]) -> int:
    """Rows of the texts of a step: each text's features are held once."""
    return sum({id(work.text): work.text.length for work in step}.values())


@contextmanager
def held_to(limit_bytes: int) -> Iterator[None]:
    """MLX gives buffers that it keeps for later back to the system before it takes more than this.

    Without a limit of its own a GPU's cache of freed buffers may grow to most of the machine.
    """
    before = mx.set_memory_limit(limit_bytes)
    try:
        yield
    finally:
        mx.set_memory_limit(before)


@contextmanager
def explained(stage: str, knobs: str) -> Iterator[None]:
    """Turn MLX's error for memory that is not there into a sentence that names what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        if "allocate" in text or "memory" in text or isinstance(error, MemoryError):
            why = str(error) or type(error).__name__
            raise UsageError(f"{stage} ran out of memory ({why}). Lower {knobs}.") from error
        raise
