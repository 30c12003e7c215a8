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
    texts = own_texts(dflash_mlx.load(target, draft=None), 4)
    answers = write_answers(tmp_path / "answers.jsonl", texts)
    asked = {"one/0": "Question one?", "one/1": "And two?", "two/0": "Three?"}
    rows = [json.dumps({"id": name, "prompt": text}) + "\n" for name, text in asked.items()]
    prompts, learned = tmp_path / "prompts.jsonl", tmp_path / "learned.jsonl"
    prompts.write_text("".join(rows))
    learned.write_text("".join(rows[:2]))  # the answer to the third one is not known
    recipe = Recipe(
        block_size=4, epochs=40, step_blocks=1000, pass_blocks=1000, learning_rate=2e-2, held_out=0
    )
    drafter = tmp_path / "drafter"
    shape = Shape(layers=1, taps=2)
    train(Order(target, drafter, recipe, shape, [learned], answers=[answers], max_answer=TOKENS))
    given = ["--prompts", str(prompts), "--work", str(tmp_path / "work"), "--draft", str(drafter)]
    assert drafter_tau.main([target, *given, "--max-tokens", str(TOKENS)]) == 0
    found = re.findall(r"\| (\w+) \| (\d+) \| ([\d.]+) \|", capsys.readouterr().out)
    taus = {name: float(tau) for name, _, tau in found}
    assert {name: int(count) for name, count, _ in found} == {"one": 2, "two": 1, "all": 3}
    engine = dflash_mlx.load(target, draft=str(drafter), block_size=4)
    counts = {"one": [0, 0], "two": [0, 0], "all": [0, 0]}
    for name, text in asked.items():
        stats = engine.generate(text, max_tokens=TOKENS).stats
        for sums in (counts[name.split("/")[0]], counts["all"]):
            sums[0], sums[1] = sums[0] + stats.cycle_tokens, sums[1] + stats.cycles
    expected = {name: tokens / cycles for name, (tokens, cycles) in counts.items()}
    assert taus == pytest.approx(expected, abs=1e-3)
    assert taus["one"] > 2
    assert len(set(taus.values())) == 3
    # An id of two prompts would mix their answers up.
    (tmp_path / "other.jsonl").write_text(rows[0].replace("one?", "of another set?"))
    with pytest.raises(UsageError, match="Give every prompt its own id"):
        drafter_tau.main([target, *given, "--prompts", str(tmp_path / "other.jsonl")])
    # The same answers, given.
    given = ["--answers", str(tmp_path / "work" / "answers.jsonl"), *given[2:]]
    assert drafter_tau.main([target, *given, "--max-tokens", str(TOKENS)]) == 0
    again = re.findall(r"\| (\w+) \| (\d+) \| ([\d.]+) \|", capsys.readouterr().out)
    assert again == found
