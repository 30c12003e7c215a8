"""The embedded drafter in the official package: its own loader and classes agree with ours."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from embedded import STEPS, folder, inputs
from tiny_drafter import BorrowedTarget
from tiny_training import read_json

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.paths import registry_file

GOLDEN = registry_file().parent / "tests/goldens/drafters/embedded.safetensors"


class GivenBlocks(BorrowedTarget):
    """A target whose embedding of the next block is the one set here."""

    block: mx.array

    def embed(self, ids: mx.array) -> mx.array:
        return self.block[None, : ids.shape[1]]


@pytest.mark.parametrize("drafts", ["all", "one"])
def test_its_hidden_states_are_those_of_the_official_classes(drafts: str) -> None:
    config = read_json(folder() / "config.json")
    vocab, layers = config["vocab_size"], config["num_target_layers"]
    target = GivenBlocks(hidden=config["hidden_size"], layers=layers, vocab=vocab)
    drafter = open_drafter(folder(), target, dtype=mx.float32)
    features, blocks = (mx.array(array) for array in inputs(config))
    expected = mx.load(str(GOLDEN))["rows"]
    count = drafter.block_size - 1 if drafts == "all" else 1
    cache = drafter.make_cache()
    for cycle, step in enumerate(STEPS):
        drafter.observe(features[None, cache.length : cache.length + step], cache)
        target.block = blocks[cycle]
        rows = drafter._rows(mx.array([1]), count, cache)[0]
        scale = mx.abs(expected[cycle]).max().item()
        assert np.allclose(rows, expected[cycle][:count], atol=2e-5 * scale)


def test_it_is_small_enough_to_ship() -> None:
    assert (folder() / "model.safetensors").stat().st_size <= 30e6
