"""The embedded drafter with the real SmolLM2: its drafts agree with the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.loader import load_target
from dflash_mlx.paths import assets_dir
from dflash_mlx.segment import Segment
from dflash_mlx.tokenizer import load_tokenizer

QUESTION = "Natalia sold clips to 48 friends in April and half as many in May. How many altogether?"


# The target's greedy answer begins with these ids; the test checks that it does.
ANSWER = [62, 6927, 542, 3459, 216, 36, 40, 1672, 216, 34, 446, 216, 41, 38, 23026, 288, 216, 36]
ANSWER += [40, 2428, 281, 4124, 284, 216, 41, 38, 1672, 216, 34, 446, 216, 33]
DRAFTS = 3  # a cycle; a whole block would mostly cost time of the output head


def tokens_per_cycle(
    drafter: DFlashDrafter, features: mx.array, prompt: int, text: Sequence[int]
) -> float:
    """Cycles over a known text: drafts are accepted as far as they agree with it."""
    cache = drafter.make_cache()
    drafter.observe(features[:, :prompt], cache)
    at, cycles = 0, 0
    while at < len(text) - 1:
        n = min(DRAFTS, len(text) - 1 - at)
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
    segment = Segment(mx.array(prompt + ANSWER), target.make_cache())
    hidden, features = target.forward([segment], drafter.taps)
    assert features is not None
    own = mx.argmax(target.logits(hidden[:, len(prompt) - 1 : -1]), axis=-1)
    assert own[0].tolist() == ANSWER
    # Measured 1.39; with the taps in reverse order 1.11, as good as no agreement.
    assert tokens_per_cycle(drafter, features, len(prompt), ANSWER) > 1.3
