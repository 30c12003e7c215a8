"""scripts/drafter_tau: a drafter's τ is that of its generation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tiny_training import own_texts, write_answers, write_target

import dflash_mlx
from dflash_mlx.errors import UsageError
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import train
from dflash_mlx.train.shape import Shape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import drafter_tau

pytestmark = pytest.mark.usefixtures("no_picture")

TOKENS = 9


def test_the_table_is_of_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(write_target(tmp_path / "target", "llama"))
    texts = own_texts(dflash_mlx.load(target, draft=None), 5)
    answers = write_answers(tmp_path / "answers.jsonl", texts)
    recipe = Recipe(block_size=4, steps=2, step_blocks=8, pass_blocks=8, held_out=1)
    drafter = tmp_path / "drafter"
    train(Order(target, drafter, recipe, Shape(layers=1, taps=2), answers=[answers]))
    asked = {"one/0": "Question one?", "one/1": "And two?", "two/0": "Three?"}
    prompts = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"id": name, "prompt": text}) + "\n" for name, text in asked.items()]
    prompts.write_text("".join(rows))
    given = ["--prompts", str(prompts), "--work", str(tmp_path / "work"), "--draft", str(drafter)]
    assert drafter_tau.main([target, *given, "--max-tokens", str(TOKENS)]) == 0
    found = re.findall(r"\| (\w+) \| (\d+) \| ([\d.]+) \|", capsys.readouterr().out)
    taus = {name: float(tau) for name, _, tau in found}
    assert {name: int(count) for name, count, _ in found} == {"one": 2, "two": 1, "all": 3}
    engine = dflash_mlx.load(target, draft=str(drafter), block_size=4)
    cycles = tokens = 0
    for text in asked.values():
        stats = engine.generate(text, max_tokens=TOKENS).stats
        cycles, tokens = cycles + stats.cycles, tokens + stats.cycle_tokens
    assert cycles
    assert taus["all"] == pytest.approx(tokens / cycles, abs=1e-3)
    # An id of two prompts would mix their answers up.
    (tmp_path / "other.jsonl").write_text(rows[0].replace("one?", "of another set?"))
    with pytest.raises(UsageError, match="Give every prompt its own id"):
        drafter_tau.main([target, *given, "--prompts", str(tmp_path / "other.jsonl")])
    # The same answers, given.
    given = ["--answers", str(tmp_path / "work" / "answers.jsonl"), *given[2:]]
    assert drafter_tau.main([target, *given, "--max-tokens", str(TOKENS)]) == 0
    again = re.findall(r"\| (\w+) \| (\d+) \| ([\d.]+) \|", capsys.readouterr().out)
    assert again == found
