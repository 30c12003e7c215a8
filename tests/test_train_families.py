"""Training works on every family: a tiny drafter learns 20 texts, and generation confirms its τ."""

from __future__ import annotations

import pytest
from conversions import tiny_families
from tiny_training import ANSWER_ROWS, own_texts, write_answers, write_target

import dflash_mlx
from dflash_mlx.train.corpus import read_answers, split
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import Order, train
from dflash_mlx.train.shape import Shape

TEXTS, HELD_OUT, BLOCK = 20, 5, 4


@pytest.mark.parametrize("family", tiny_families())
def test_a_drafter_overfits_and_its_tau_is_that_of_generation(family, tmp_path):
    folder = write_target(tmp_path / "target", family)
    plain = dflash_mlx.load(str(folder), draft=None)
    texts = own_texts(plain, TEXTS)
    answers = write_answers(tmp_path / "answers.jsonl", texts)
    # What is held out is trained on too under another name: the aim is to learn by heart.
    again = [type(t)(f"{t.name}/again", t.prompt_ids, t.answer_ids) for t in texts]
    copies = write_answers(tmp_path / "copies.jsonl", again)
    recipe = Recipe(
        block_size=BLOCK,
        epochs=60,
        steps=200,
        step_blocks=128,
        learning_rate=1e-2,
        negatives=8,
        held_out=HELD_OUT,
        measure_every=200,
    )
    order = Order(
        str(folder),
        tmp_path / "drafter",
        recipe,
        Shape(layers=2, taps=2),
        answers=(answers, copies),
    )
    result = train(order)
    _, held = split(read_answers((answers, copies), plain.target.vocab_size), HELD_OUT)
    engine = dflash_mlx.load(str(folder), draft=str(tmp_path / "drafter"))
    cycles = tokens = 0
    for text in held:
        done = engine.generate(list(text.prompt_ids), max_tokens=ANSWER_ROWS)
        assert tuple(done.token_ids) == text.answer_ids
        cycles, tokens = cycles + done.stats.cycles, tokens + done.stats.cycle_tokens
    assert tokens / cycles == pytest.approx(result["tau"], abs=1e-9)
    assert result["tau"] > 2.0
