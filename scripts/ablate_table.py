"""Trains a small drafter for SmolLM2-135M once a variant, at equal steps, and prints one table.

    scripts/ablate --answers answers.jsonl --work FOLDER [--steps 480] [--blocks 32] [--only WORD]

Held-out τ comes from training's own passes: some variants have no counterpart at run time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# This one comes first: it has to act before MLX is imported.
from dflash_mlx import fast_blas

# isort: split
import ablate
import mlx.core as mx

import dflash_mlx
from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.loader import read_target_config
from dflash_mlx.train.corpus import read_answers, split, usable
from dflash_mlx.train.features import FeatureSpec
from dflash_mlx.train.folder import locked
from dflash_mlx.train.naming import target_name
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.shape import Shape, drafter_config
from dflash_mlx.train.sources import offline
from dflash_mlx.train.trainer import Task

MODEL, MASK, TAPS = "SmolLM2-135M", 3, (1, 8, 14, 20, 27)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/ablate",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add(name: str, kind: type, text: str, **settings: Any) -> None:
        parser.add_argument(name, type=kind, help=text, **settings)

    several = {"action": "append", "required": True, "default": argparse.SUPPRESS}
    add("--answers", Path, "JSONL of answers; several times", **several)
    add("--work", Path, "folder of features", required=True, default=argparse.SUPPRESS)
    # Many small steps: with as many rows they learn far more than few large ones.
    add("--steps", int, "steps of each drafter", default=480)
    add(
        "--blocks",
        int,
        "blocks of 8 in a step; of other sizes as many as give equal rows",
        default=32,
    )
    add("--texts", int, "answers to train on, at most", default=2000)
    add("--held-out", int, "answers that only measure", default=40)
    add("--tokens", int, "of a held-out answer that count", default=128)
    add("--lr", float, "peak learning rate", default=2e-3)
    add("--seeds", int, "runs of each variant", default=1)
    add("--only", str, "variants whose name holds this, or one of these|these", default="")
    return parser.parse_args()


class Comparison:
    """What all variants share: the target, its texts, and their features."""

    def __init__(self, options: argparse.Namespace, soft: bool) -> None:
        self.options = options
        self.engine = dflash_mlx.load(MODEL, draft=None)
        self.target = self.engine.target
        texts = read_answers(options.answers, self.target.vocab_size)
        texts, _ = usable(texts, 512)
        trained, self.held = split(texts, options.held_out)
        self.trained = trained[: options.texts]
        name = target_name(Order(MODEL, options.work), self.engine)
        with locked(options.work):  # two at once would write the same shards
            self.features = offline(
                options.work / "features",
                [
                    # Likely tokens, for soft labels alone, cost a pass through the head.
                    (FeatureSpec(name, TAPS, 32 if soft else 0, "bfloat16"), self.trained),
                    (FeatureSpec(name, TAPS, 0, "float32"), self.held),
                ],
                self.target,
                None,
                self._say,
                lambda done, total: self._say(f"{done} of {total}"),
            )
        shape = Shape(layers=2, taps=TAPS)
        self.base = drafter_config(
            self.target, read_target_config(self.engine.path), shape, 8, MASK
        )

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run(
        self, variants: Sequence[ablate.Variant], seed: int
    ) -> list[tuple[float, float, float]]:
        """(held-out τ, share of right first drafts, CPU seconds of training) of each variant.

        They are one training, and differ in the rows that a cycle verifies.
        """
        options, variant = self.options, variants[0]
        base = Recipe(
            block_size=8,
            steps=options.steps,
            epochs=10**6,  # `steps` ends the run
            step_blocks=options.blocks,
            pass_blocks=64,
            learning_rate=options.lr,
            max_length=512,
            seed=seed,
            weights="decay",  # the paper's
        )
        recipe = ablate.recipe_of(variant, base)
        config = ablate.config_of(variant, self.base, recipe)
        start = ablate.start_of(variant, config, self.target, seed)
        with tempfile.TemporaryDirectory() as folder:
            task = self._task(variant, config)
            trainer = ablate.VariantTrainer(variant, task, recipe, start.weights, Path(folder))
            began = time.process_time()
            trainer.run()
            seconds = time.process_time() - began
        results = []
        for trainer.variant in variants:
            results.append((*trainer.measured(options.tokens), seconds))
            mx.clear_cache()
        return results

    def _task(self, variant: ablate.Variant, config: DFlashConfig) -> Task:
        features: list[Any] = list(self.features)
        if variant.taps:
            features = [ablate.Chosen(f, TAPS, variant.taps) for f in features]
        ends = self.engine.tokenizer.end_ids
        return Task(self.target, ends, config, self.base, self.trained, self.held, *features, {})


def trained_alike(variants: Sequence[ablate.Variant]) -> list[list[ablate.Variant]]:
    """Variants whose training is the same, together; in the order of the first of each."""
    groups: dict[str, list[ablate.Variant]] = {}
    for variant in variants:
        groups.setdefault(str(replace(variant, name="", verified=None)), []).append(variant)
    return list(groups.values())


def main() -> int:
    options = arguments()
    words = options.only.split("|")
    chosen = [v for v in ablate.variants(TAPS) if any(word in v.name for word in words)]
    comparison = Comparison(options, soft=any("soft" in v.recipe for v in chosen))
    print(f"{fast_blas.CHOICE.name}; {options.steps} steps of {options.blocks * 8} rows,")
    print(f"{len(comparison.trained)} texts, {len(comparison.held)} held out\n")
    print("| variant | held-out τ | first draft right | CPU seconds |\n|---|---|---|---|")
    for alike in trained_alike(chosen):
        found = [comparison.run(alike, seed) for seed in range(options.seeds)]
        for variant, runs in zip(alike, zip(*found, strict=True), strict=True):
            tau, first, seconds = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"| {variant.name} | {tau:.3f} | {first:.3f} | {seconds:.0f} |", flush=True)
            print(json.dumps({"variant": variant.name, "runs": runs}), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
