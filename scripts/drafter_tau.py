"""Tokens a cycle of a drafter on prompts, set by set, from the cycles of generation replayed.

    scripts/drafter_tau MODEL --prompts FILE... --work FOLDER [--draft FOLDER...] [--prompts-each N]

Answers (greedy, of first turns, or given with --answers) and features are kept in --work.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

# This one comes first: it has to act before MLX is imported.
from dflash_mlx import fast_blas

# isort: split
import dflash_mlx
from dflash_mlx.loader import dtype_name
from dflash_mlx.train.answer_file import AnswerSettings
from dflash_mlx.train.answers import answer_prompts
from dflash_mlx.train.corpus import Text, read_answers
from dflash_mlx.train.features import FeatureSpec
from dflash_mlx.train.naming import target_name
from dflash_mlx.train.order import Order
from dflash_mlx.train.prompts import read_prompts
from dflash_mlx.train.replay import joined, replay_sets
from dflash_mlx.train.sources import offline

_PLACES = 64


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/drafter_tau",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("model", help="a name that `dflash-mlx chat` takes")
    given_texts = parser.add_mutually_exclusive_group(required=True)
    given_texts.add_argument(
        "--prompts", type=Path, action="append", help="JSONL of prompts; several times"
    )
    # Trained texts against held-out ones: how far a drafter has learned its texts by heart.
    given_texts.add_argument(
        "--answers", type=Path, action="append", help="JSONL of answers; several times"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of answers and features")
    parser.add_argument(
        "--draft", action="append", help="a drafter; several times; the model's own without"
    )
    parser.add_argument(
        "--prompts-each", type=int, default=64, help="of each file or set; 64 without it"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer; 128 without it")
    return parser.parse_args(given)


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def answers(options: argparse.Namespace, engine: dflash_mlx.Engine, name: str) -> list[Text]:
    if options.answers:
        sets: dict[str, list[Text]] = {}
        for text in read_answers(options.answers, engine.target.vocab_size):
            sets.setdefault(text.set_name, []).append(text)
        return [text for texts in sets.values() for text in texts[: options.prompts_each]]
    read_prompts(options.prompts)  # together, since an id of two prompts would mix answers up
    prompts = []
    for file in options.prompts:
        first = read_prompts([file])[: options.prompts_each]
        prompts += [replace(prompt, further=()) for prompt in first]
    settings = AnswerSettings(name, 0.0, options.max_tokens, 0)
    done = answer_prompts(
        engine.target,
        engine.tokenizer,
        prompts,
        options.work / "answers.jsonl",
        settings,
        places=_PLACES,
        progress=lambda done, total, speed: say(f"answers {done}/{total}, {speed:.0f} tokens/s"),
    )
    return done.texts


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    options.work.mkdir(parents=True, exist_ok=True)
    engines = [dflash_mlx.load(options.model, draft=draft) for draft in options.draft or ["auto"]]
    # Bound to the target's weights, as in training: a model changed in place is another one.
    name = target_name(Order(options.model, options.work), engines[0])
    texts = answers(options, engines[0], name)
    print(f"{engines[0].model}, {fast_blas.CHOICE.name}, greedy, {options.max_tokens} tokens\n")
    print("| drafter | set | prompts | tokens a cycle | cycles accepting 1, 2, ... drafts |")
    print("|---|---|---|---|---|")
    for engine in engines:
        drafter, target = engine.drafter, engine.target
        if drafter is None:
            say(f"No drafter for {engine.model}: {engine.reason}")
            return 1
        kind = FeatureSpec(name, drafter.taps, 0, dtype_name(target.dtype))
        (source,) = offline(
            options.work / "features",
            [(kind, texts)],
            target,
            None,
            say,
            lambda done, total: say(f"features {done}/{total}"),
        )
        known = ((text, source.read_all([text])[0].features) for text in texts)
        sets = replay_sets(drafter, known, engine.tokenizer.end_ids, options.max_tokens)
        counts = {name: sum(text.set_name == name for text in texts) for name in sets}
        for name, part in {**sets, "all": joined(sets)}.items():
            shares = " ".join(f"{share:.2f}" for share in part.acceptance(drafter.block_size))
            row = f"| {engine.drafter_name} | {name} | {counts.get(name, len(texts))} |"
            print(f"{row} {part.tokens_per_cycle:.3f} | {shares} |", flush=True)
            say(json.dumps({"set": name, "tau": part.tokens_per_cycle}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
