"""The estimate of a pass's memory against what MLX really held."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from tiny import tiny_target
from tiny_drafter import drafter_config

from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import UsageError
from dflash_mlx.train.batches import Work
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import Seen
from dflash_mlx.train.loss import HeadSubset, position_weights
from dflash_mlx.train.memory import fitted, pass_bytes
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.start import new_model, random_start
from dflash_mlx.train.step import Objective, Streams, build_pass, gradients


@pytest.mark.parametrize(
    ("layers", "inner", "block", "blocks", "rows"),
    [(2, 80, 8, 64, 300), (1, 400, 8, 64, 50), (3, 80, 16, 32, 600), (2, 80, 4, 200, 100)],
)
def test_the_estimate_is_from_above_and_not_far(layers, inner, block, blocks, rows):
    target = tiny_target("llama", vocab_size=48)
    stored = drafter_config(
        num_hidden_layers=layers, intermediate_size=inner, hidden_size=target.hidden_size
    )
    stored["dflash_config"] = {**stored["dflash_config"], "block_size": block}
    config = parse_config(stored)
    ids = tuple(np.random.default_rng(0).integers(0, 48, rows + 40).tolist())
    text = Text("a", ids[:10], ids[10:])
    zeros = mx.zeros((len(text.answer_ids), 4))
    seen = Seen(mx.zeros((text.length, config.feature_size)), zeros.astype(mx.int32), zeros)
    head = HeadSubset(target, range(48))
    anchors = np.linspace(10, rows, blocks).astype(int)
    work = [build_pass([Work(text, anchors)], [seen], head, position_weights(block, 4))]
    objective = Objective(new_model(config), config, target, head, 0.0, mx.float32)
    parameters = tree_unflatten(list(random_start(config, 0).weights.items()))
    mx.eval(parameters)
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradients(objective, parameters, work, Streams(1))[0])
    taken = mx.get_peak_memory() - held
    assert taken <= pass_bytes(config, 48, blocks, rows) <= 2.7 * taken


def test_blocks_a_pass_shrink_to_what_fits():
    config, recipe = parse_config(drafter_config()), Recipe(pass_blocks=64, max_length=500)

    def fits(blocks, streams=2):
        room = streams * pass_bytes(config, 1000, blocks, 500) + 4 * 6 * 10_000 + 1000
        limit = mx.get_active_memory() + room
        return fitted(recipe, config, 10_000, 1000, limit, streams).pass_blocks

    assert [fits(n) for n in (1, 7, 63, 64, 100)] == [1, 7, 63, 64, 64]
    with pytest.raises(UsageError, match="--max-length"):
        fitted(recipe, config, 10_000, 1000, mx.get_active_memory(), 1)
