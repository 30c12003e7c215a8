"""A tiny target on disk, texts it answered itself, and a training run over them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import write_folder
from tiny import tiny_config
from tiny_engine import write_tokenizer

import dflash_mlx
from dflash_mlx.segment import Segment
from dflash_mlx.train.corpus import Text

PROMPT_ROWS, ANSWER_ROWS = 6, 18


def write_target(folder: Path, family: str, **overrides: Any) -> Path:
    """A random target of the family whose vocabulary holds every byte of its tokenizer."""
    write_folder(folder, tiny_config(family, vocab_size=288, **overrides))
    return write_tokenizer(folder)


def own_texts(engine: dflash_mlx.Engine, count: int, answer: int = ANSWER_ROWS) -> list[Text]:
    """Random prompts with the target's greedy answers, of two tokens at least."""
    target, random = engine.target, np.random.default_rng(3)
    prompts = random.integers(0, 256, (count + 8, PROMPT_ROWS))
    caches, rows, answers = [target.make_cache() for _ in prompts], prompts, []
    for _ in range(answer):  # all side by side
        segments = [Segment(mx.array(r), c) for r, c in zip(rows, caches, strict=True)]
        hidden, _ = target.forward(segments)
        for cache in caches:
            cache.commit(rows.shape[1])
        last = target.logits(hidden[0, rows.shape[1] - 1 :: rows.shape[1]])
        rows = np.array(mx.argmax(last, axis=-1))[:, None]
        answers.append(rows)
    found = np.concatenate(answers, axis=1).tolist()
    pairs = zip(prompts.tolist(), found, strict=True)
    whole = [(p, until(engine.tokenizer.end_ids, ids)) for p, ids in pairs]
    kept = [(tuple(p), ids) for p, ids in whole if len(ids) > 1][:count]
    assert len(kept) == count
    return [Text(f"text/{i}", *pair) for i, pair in enumerate(kept)]


def answered_target(folder: Path, count: int) -> tuple[str, Path]:
    """A random Llama's folder, and a file with `count` texts it answered itself."""
    target = write_target(folder / "target", "llama")
    texts = own_texts(dflash_mlx.load(str(target), draft=None), count)
    return str(target), write_answers(folder / "answers.jsonl", texts)


def until(ends: Collection[int], ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to and with the first one that ends an answer."""
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[: at + 1])


def write_answers(file: Path, texts: Sequence[Text]) -> Path:
    file.write_text("".join(text.as_json() + "\n" for text in texts))
    return file


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())
