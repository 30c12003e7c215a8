"""The embedded drafter with the real SmolLM2: its drafts agree with the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.load import load_target
from dflash_mlx.models.base import Target
from dflash_mlx.paths import assets_dir
from dflash_mlx.segment import Segment
from dflash_mlx.tokenizer import load_tokenizer

QUESTION = "Natalia sold clips to 48 friends in April and half as many in May. How many altogether?"


def greedy_text(target: Target, prompt: list[int], count: int) -> list[int]:
    cache, ids, out = target.make_cache(), prompt, []
    while len(out) < count:
        hidden, _ = target.forward([Segment(mx.array(ids), cache)])
        cache.commit(len(ids))
        ids = [int(mx.argmax(target.logits(hidden[:, -1:])).item())]
        out += ids
    return out


def tokens_per_cycle(
    drafter: DFlashDrafter, features: mx.array, prompt: int, text: Sequence[int]
) -> float:
    """Cycles over a known text: drafts are accepted as far as they agree with it."""
    cache = drafter.make_cache()
    drafter.observe(features[:, :prompt], cache)
    at, cycles = 0, 0
    while at < len(text) - 1:
        n = min(drafter.block_size - 1, len(text) - 1 - at)
        drafts = drafter.propose(mx.array([text[at]]), n, None, cache).tokens.tolist()
        agree = [draft == true for draft, true in zip(drafts, text[at + 1 :], strict=False)]
        accepted = agree.index(False) if False in agree else n
        committed = cache.length
        drafter.observe(features[:, committed : committed + accepted + 1], cache)
        at, cycles = at + accepted + 1, cycles + 1
        assert cache.length == prompt + at
    return at / cycles


@pytest.mark.smollm2
def test_drafts_agree_with_the_target(smollm2_gguf: Path) -> None:
    target = load_target(smollm2_gguf, "float32")
    drafter = open_drafter(assets_dir() / "smollm2-135m-dflash-b8", target, dtype=mx.float32)
    prompt = load_tokenizer(smollm2_gguf).chat_ids([{"role": "user", "content": QUESTION}])
    text = greedy_text(target, prompt, 48)
    segment = Segment(mx.array(prompt + text), target.make_cache())
    _, features = target.forward([segment], drafter.taps)
    assert features is not None
    right = tokens_per_cycle(drafter, features, len(prompt), text)
    taps = mx.split(features, len(drafter.taps), axis=-1)
    turned = mx.concatenate(taps[::-1], axis=-1)
    wrong = tokens_per_cycle(drafter, turned, len(prompt), text)
    # Measured: 1.38 and 1.09.
    assert right > 1.3
    assert wrong < 1.2, "features in the wrong order must cost acceptance"
