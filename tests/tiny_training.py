"""A tiny target on disk, texts it answered itself, and a training run over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_folder
from tiny import tiny_config
from tiny_engine import write_tokenizer

import dflash_mlx
from dflash_mlx.train.corpus import Text

PROMPT_ROWS, ANSWER_ROWS = 6, 18


def write_target(folder: Path, family: str, **overrides: Any) -> Path:
    """A random target of the family whose vocabulary holds every byte of its tokenizer."""
    write_folder(folder, tiny_config(family, vocab_size=288, **overrides))
    return write_tokenizer(folder)


def own_texts(engine: dflash_mlx.Engine, count: int, answer: int = ANSWER_ROWS) -> list[Text]:
    """Random prompts with the target's greedy answers."""
    random = np.random.default_rng(3)
    texts = []
    for index in range(count):
        prompt = random.integers(0, 256, PROMPT_ROWS).tolist()
        answered = engine.generate(prompt, max_tokens=answer).token_ids
        texts.append(Text(f"text/{index}", tuple(prompt), tuple(answered)))
    return texts


def write_answers(file: Path, texts: Sequence[Text]) -> Path:
    file.write_text("".join(text.as_json() + "\n" for text in texts))
    return file


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())
