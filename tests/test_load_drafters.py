"""Drafters of every kind on the families they are made for, from files to text through `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_folder
from tiny import tiny_config, tiny_weights
from tiny_drafter import BLOCK, drafter_config, write_drafter
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx import load
from dflash_mlx.draft.dflash2 import DFlash2Drafter

PROMPT = "A prompt that is longer than every window here."
TAPS = [0, 3]
# The output head knows these two tokens only, so that target and drafter agree now and then.
SAID = (65, 66)
TOKENS = 30


def write_target(folder: Path, family: str) -> Path:
    config = tiny_config(family, vocab_size=VOCAB, tie_word_embeddings=False)
    weights = tiny_weights(config)
    head = np.zeros_like(weights["lm_head.weight"])
    # One of two opposite logits is above the zero of all other tokens.
    head[SAID[0]] = np.random.default_rng(7).standard_normal(head.shape[1])
    head[SAID[1]] = -head[SAID[0]]
    weights["lm_head.weight"] = head
    return write_tokenizer(write_folder(folder, config, weights))


def write_fitting(folder: Path, variant: str, **changes: Any) -> Path:
    config = drafter_config(
        variant, hidden_size=48, vocab_size=VOCAB, num_target_layers=4, **changes
    )
    config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": TAPS}
    return write_drafter(folder, config)


@pytest.mark.parametrize(
    ("family", "variant", "changes"),
    [
        ("gpt_oss", "yarn", {"attention_bias": True}),
        ("qwen3_5", "second", {}),
        ("gemma4", "second_mixed", {}),
        ("gemma4", "sliding", {"attention_bias": True}),
    ],
    ids=["gpt_oss-yarn-bias", "qwen3_5-dflash2", "gemma4-dflash2", "gemma4-sliding-bias"],
)
def test_text_equals_plain_decoding(
    tmp_path: Path, family: str, variant: str, changes: dict[str, Any]
) -> None:
    target = write_target(tmp_path / "target", family)
    drafter = write_fitting(tmp_path / "drafter", variant, **changes)
    plain = load(str(target), draft=None, dtype="float32").generate(PROMPT, max_tokens=TOKENS)
    engine = load(str(target), draft=str(drafter), dtype="float32", block_size=None)
    assert isinstance(engine.drafter, DFlash2Drafter) == variant.startswith("second")
    answer = engine.generate(PROMPT, max_tokens=TOKENS)
    assert len(answer.token_ids) == TOKENS
    assert set(answer.token_ids) == set(SAID)
    assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
    stats = answer.stats
    assert (stats.engine, stats.drafter) == ("dflash", str(drafter))
    assert plain.stats.cycles == 0
    # The first token comes with the prompt, and every cycle adds one to what it accepts; the
    # last token may come from a plain step.
    assert stats.cycles + stats.accepted in (TOKENS - 2, TOKENS - 1)
    assert 0 < stats.accepted < stats.drafted
    assert stats.accept_histogram[0] < stats.cycles
    assert len(stats.accept_histogram) == BLOCK
