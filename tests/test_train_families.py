"""Training works on every family: a tiny drafter learns 20 texts, and generation confirms its τ."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conversions import tiny_families
from tiny_training import own_texts, until, write_answers, write_target

import dflash_mlx
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.train import run, trainer
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.shape import Shape

pytestmark = pytest.mark.usefixtures("no_picture")

TEXTS, BLOCK, ANSWER = 20, 4, 8
RECIPE = Recipe(
    block_size=BLOCK,
    epochs=22,  # one step each: all blocks of all texts in one pass
    step_blocks=1000,
    pass_blocks=1000,
    learning_rate=2e-2,
    negatives=8,
    measure_every=1000,
)


def end_token(texts: list[Text]) -> int:
    """The token that ends the most answers behind two tokens of theirs, and leaves some whole."""
    early = {token for text in texts for token in text.answer_ids[:2]}
    found = Counter(token for text in texts for token in {*text.answer_ids} - early)
    return next(token for token, count in found.most_common() if count < TEXTS)


def texts_that_end(folder: Path) -> tuple[list[Text], int]:
    """Texts of the target, of which some end with an end token that it is given for this."""
    texts = own_texts(dflash_mlx.load(str(folder), draft=None), TEXTS, ANSWER)
    end = end_token(texts)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return [replace(text, answer_ids=until([end], text.answer_ids)) for text in texts], end


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every cycle of generation: the drafts emitted, and all tokens emitted."""
    seen: list[tuple[int, int]] = []
    count = GenerationStats.count_cycle

    def watched(
        self: GenerationStats, drafted: int, accepted: int, emitted: int, *more: bool
    ) -> None:
        seen.append((min(accepted, emitted), emitted))
        count(self, drafted, accepted, emitted, *more)

    monkeypatch.setattr(GenerationStats, "count_cycle", watched)
    return seen


@pytest.mark.parametrize("family", tiny_families())
def test_a_drafter_overfits_and_its_tau_is_that_of_generation(
    family, tmp_path, cycles, monkeypatch
):
    folder, out = write_target(tmp_path / "target", family), tmp_path / "drafter"
    texts, end = texts_that_end(folder)
    assert 0 < sum(text.answer_ids[-1] == end for text in texts) < TEXTS
    # What is measured on is trained on: the aim is to learn by heart.
    monkeypatch.setattr(run, "split", lambda texts, held_out: (texts, texts))
    replays, joined = [], trainer.joined

    def kept(sets):
        replays.append(joined(sets))
        return replays[-1]

    monkeypatch.setattr(trainer, "joined", kept)
    answers = write_answers(tmp_path / "answers.jsonl", texts)
    shape = Shape(layers=1, taps=2)
    # Drafters for Gemma learn more slowly: 1.4 after as many steps as suffice for the others.
    recipe = replace(RECIPE, epochs=44) if family.startswith("gemma4") else RECIPE
    result = run.train(run.Order(str(folder), out, recipe, shape, answers=[answers]))
    engine = dflash_mlx.load(str(folder), draft=str(out), block_size=None)
    cycles.clear()
    for text in texts:
        # Nothing but its end token ends a text that has one.
        most = 2 * ANSWER if text.answer_ids[-1] == end else ANSWER
        done = engine.generate(list(text.prompt_ids), max_tokens=most)
        assert tuple(done.token_ids) == text.answer_ids
    accepts, emitted = zip(*cycles, strict=True)
    assert list(accepts) == replays[-1].accepts
    assert result["tau"] == sum(emitted) / len(emitted)
    assert result["tau"] > 2.0
