"""Bytes held after 50 and after 500 cycles: only full attention grows, as far as its context does.

Every kind of cache, of targets and of drafters, in the decode loop with nothing or all accepted.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import target_with, tiny_config, tiny_prompt, tiny_weights
from tiny_drafter import drafter_config, write_drafter

from dflash_mlx.cache import BorrowedCache, KVCache, RecurrentCache, WindowCache
from dflash_mlx.cache.context import REWIND_ROWS, SPARE_ROWS, LayerContext
from dflash_mlx.cache.kv import GROWTH_ROWS
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Proposal
from dflash_mlx.draft.checkpoint import open_drafter

BLOCK, WINDOW = 3, 7
TARGETS: dict[str, dict[str, Any]] = {
    "gemma4_shared": {
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"num_hidden_layers": 2},
}
# Kinds of layers of the drafter beside each.
DRAFTERS = {
    "gemma4_shared": ["sliding_attention", "full_attention"],
    "qwen3_5": ["sliding_attention"],
}
KINDS = {
    "gemma4_shared": {KVCache, WindowCache, BorrowedCache, "drafter window", "drafter full"},
    "qwen3_5": {KVCache, RecurrentCache, "drafter window"},
}


class Planned:
    """A real drafter whose tokens are replaced: all are what the target says, or none is."""

    def __init__(self, drafter: Any, token: int) -> None:
        self._drafter, self._token, self._proposals = drafter, token, 0
        self.block_size, self.taps = drafter.block_size, drafter.taps
        self.head_rows = None
        self.make_cache, self.observe = drafter.make_cache, drafter.observe

    def propose(
        self, anchor: mx.array, n: int, sampling: Any, cache: Any, head: Any = None
    ) -> Proposal:
        tokens = mx.full((n,), self._token, mx.int32)
        self._proposals += 1
        if self._proposals % 8 == 1:  # what it writes is the same each time, and takes long
            # 0 · tokens, so that the real drafter's work is part of the step.
            tokens = tokens + 0 * self._drafter.propose(anchor, n, sampling, cache).tokens
        return Proposal(tokens, None, mx.array(True))


def silent_target(family: str):
    """A target whose logits are all equal: it says token 0 whatever it reads."""
    config = tiny_config(family, **TARGETS[family])
    weights = tiny_weights(config)
    weights["lm_head.weight"] = np.zeros_like(weights["lm_head.weight"])
    return target_with(config, weights)


def held_by(session: Session) -> dict[Any, int]:
    """Bytes by kind of cache; what the counted arrays cost is what the process holds."""
    held: dict[Any, int] = defaultdict(int)
    for layer in session.cache:
        held[type(layer)] += layer.nbytes
    for layer in session.draft_cache.layers:
        held["drafter full" if layer.window is None else "drafter window"] += layer.nbytes
    assert sum(held.values()) == session.nbytes
    return dict(held)


def capacities(session: Session) -> list[tuple[int | None, int]]:
    """(window, rows there is room for) of every buffer of keys."""
    layers = itertools.chain(session.cache, session.draft_cache.layers)
    kept = [c for c in layers if isinstance(c, KVCache | LayerContext)]
    return [(getattr(c, "window", None), c.keys.shape[2]) for c in kept]


def active_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.parametrize("accepted", [0, BLOCK - 1])
@pytest.mark.parametrize("family", TARGETS)
def test_bytes_after_50_and_500_cycles(tmp_path: Path, family: str, accepted: int) -> None:
    target = silent_target(family)
    config = drafter_config(
        "mixed",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        num_hidden_layers=len(DRAFTERS[family]),
        layer_types=DRAFTERS[family],
        sliding_window=WINDOW,
        dflash_config={"target_layer_ids": [0], "block_size": BLOCK, "mask_token_id": 5},
    )
    real = open_drafter(write_drafter(tmp_path / "drafter", config), target, dtype=mx.float32)
    session = Session(target, Planned(real, 0 if accepted else 1), nullcontext)
    text = tiny_prompt(target.vocab_size, 30)
    held, active = [], []
    for cycles in (50, 450):
        # The first token comes from the prompt; the last row of a run is not committed.
        tokens, stats = 2 + cycles * (accepted + 1), GenerationStats()
        steps = list(session.run(text, SamplingParams(), tokens, (), stats))
        assert (stats.cycles, stats.accepted) == (cycles, cycles * accepted)
        text += [token for step in steps for token in step]
        held.append(held_by(session))
        active.append(active_memory())
    early, late = held
    assert late.keys() == early.keys() == KINDS[family]
    assert active[1] - active[0] <= session.nbytes - sum(early.values()) + 1024
    for kind in late.keys() - {KVCache, "drafter full"}:
        assert late[kind] == early[kind], kind
    for window, rows in capacities(session):
        if window is None:
            assert rows <= len(session.ids) * 5 // 4 + GROWTH_ROWS
        else:
            assert rows == window - 1 + REWIND_ROWS + SPARE_ROWS
    for layer in session.cache:
        if isinstance(layer, RecurrentCache):
            assert layer.nbytes == layer.state.nbytes + layer.tail.nbytes
