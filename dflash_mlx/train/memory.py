"""How much memory a forward and backward pass takes, and how many blocks fit."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.errors import UsageError
from dflash_mlx.train.recipe import Recipe

_FLOAT = 4
#: copies of every weight beside the forward pass: master, both moments, gradient, its clipped form
_WEIGHT_COPIES = 6
#: arrays of a row's attention weights that are alive at once: scores, masked, joined, softmax, and
#: the gradients of these
_SCORE_COPIES = 8
_LOGIT_COPIES = 5
#: measured peaks are up to 1.65 times the sum of the shapes
_SLACK = 1.9


def pass_bytes(config: DFlashConfig, head_tokens: int, blocks: int, context_rows: int) -> int:
    """Bytes of one pass over `blocks` blocks whose sequences have `context_rows` rows in all.

    An estimate from above: the shapes of what the backward pass keeps, in float32, with slack.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    rows = blocks * config.block_size
    one_layer = rows * (8 * hidden + 6 * inner + 6 * heads + 6 * kv_heads)
    one_layer += context_rows * 6 * kv_heads
    scores = config.num_attention_heads * rows * (context_rows + config.block_size)
    total = config.num_hidden_layers * one_layer + 3 * rows * hidden
    total += _SCORE_COPIES * scores * config.num_hidden_layers // 2
    total += context_rows * (2 * config.feature_size + 4 * hidden)
    total += _LOGIT_COPIES * rows * head_tokens
    return round(total * _FLOAT * _SLACK)


def fitted(
    recipe: Recipe,
    config: DFlashConfig,
    weights: int,
    head_tokens: int,
    limit_bytes: int,
    streams: int,
) -> Recipe:
    """The recipe with as few blocks a pass as `limit_bytes` ask for, besides what is held now.

    weights: numbers of the drafter. UsageError when not even one block fits.
    """
    held = mx.get_active_memory() + weights * _FLOAT * _WEIGHT_COPIES
    for blocks in range(recipe.pass_blocks, 0, -1):
        one = pass_bytes(config, head_tokens, blocks, recipe.max_length)
        if held + streams * one <= limit_bytes:
            return replace(recipe, pass_blocks=blocks)
    least = held + streams * pass_bytes(config, head_tokens, 1, recipe.max_length)
    raise UsageError(
        f"A pass over one block takes {least / 1e9:.1f} GB with the target and the drafter, more "
        f"than the {limit_bytes / 1e9:.1f} GB there are. Lower --max-length (now "
        f"{recipe.max_length}), or raise --memory."
    )
