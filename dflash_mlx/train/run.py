"""`dflash-mlx train` without the terminal: prompts, answers, features, drafter, model card.

Every stage leaves files that the next run of the same command finds and does not make again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# This one comes first: it loads the fast BLAS before anything imports MLX.
import dflash_mlx.engine as engines

# isort: split
import mlx.core as mx

from dflash_mlx import hub
from dflash_mlx.draft.checkpoint import check_fit
from dflash_mlx.draft.config import DFlashConfig, parse_config
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.loader import dtype_name, read_target_config
from dflash_mlx.machine import memory_bytes
from dflash_mlx.models.base import Target
from dflash_mlx.train.answer_file import AnswerSettings
from dflash_mlx.train.answers import answer_prompts
from dflash_mlx.train.batches import epoch_steps
from dflash_mlx.train.card import model_card
from dflash_mlx.train.checkpoint import Progress, has_state, load_run
from dflash_mlx.train.corpus import Text, joined_texts, read_answers, split, usable
from dflash_mlx.train.export import save_token_order
from dflash_mlx.train.features import FeatureCache, FeatureSpec, bytes_a_token
from dflash_mlx.train.files import write_text
from dflash_mlx.train.folder import locked, taken
from dflash_mlx.train.memory import Room, explained, fitted, held_to, target_pass_bytes
from dflash_mlx.train.naming import hash_of, target_name
from dflash_mlx.train.order import Order
from dflash_mlx.train.prompts import read_prompts
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.record import blocks_before, described_run, described_task, earlier_parts
from dflash_mlx.train.shape import (
    drafter_config,
    mask_token,
    second_parts,
    with_length,
    with_windows,
)
from dflash_mlx.train.sources import Offline, Online, offline
from dflash_mlx.train.start import Start, drafter_start, random_start, target_start
from dflash_mlx.train.trainer import Report, Task, Trainer, refuse_other
from dflash_mlx.train.wording import counted, shown_bytes

#: of the machine's memory, what a run may take when nobody says how much
_MEMORY_SHARE = 0.75


@dataclass(frozen=True)
class Voice:
    """How a run speaks: sentences, a stage's (name, done, total), measurements."""

    say: Callable[[str], None] = lambda text: None
    stage: Callable[[str, int, int], None] = lambda name, done, total: None
    report: Callable[[Report], None] = lambda report: None


def train(order: Order, voice: Voice | None = None) -> dict[str, Any]:
    """Carry out an order; the last line of `--json`. DFlashError with a sentence to show."""
    voice = voice or Voice()
    if not (order.prompts or order.answers):
        raise UsageError("Nothing to train on. Give --prompts or --answers files.")
    with taken(order.out, finished=order.until is None), held_to(_memory_limit(order)):
        return _carry_out(order, voice)


def _carry_out(order: Order, voice: Voice) -> dict[str, Any]:
    work = order.work or order.out / "work"
    engine = engines.load(order.target, draft=None, dtype=order.dtype, revision=order.revision)
    stored, start, why_mask = _drafter(order, engine)
    config = parse_config(stored)
    check_fit(config, engine.target)
    voice.say(_introduction(engine, config, start, why_mask))
    name = target_name(order, engine)
    # What two runs write into one folder at the same time would be made twice, or mixed.
    with nullcontext() if work.resolve() == order.out.resolve() else locked(work):
        texts = _texts(order, engine, name, work, voice)
        if order.until == "answers":
            return _stage(order, engine, texts, work / "answers.jsonl")
        trained, held = _divided(order, engine, texts, voice)
        # Other programs cut texts there, so a drafter adapted to longer ones says so.
        stored = with_length(stored, max(text.length for text in trained))
        streams = order.streams or _streams()
        # Before hours may go into features.
        kinds = _kinds(order, engine.target, name, config)
        unseen = _unseen(order, work, kinds, trained, held)
        recipe = _within_memory(
            order, engine.target, config, trained, unseen, start, streams, voice
        )
        described = described_task(order, name, stored, trained, held, start)
        # The trainer would refuse it, too, but behind the features.
        if order.until is None and (known := load_run(order.out)) is not None:
            refuse_other(order.out, known, recipe, described, engine.target)
        task = _task(order, engine, name, config, stored, trained, held, described, work, voice)
        if order.until == "features":
            return _stage(order, engine, [*trained, *held], work / "features")
    trainer = Trainer(
        task,
        recipe,
        start.weights,
        order.out,
        voice.report,
        streams=streams,
    )
    if trainer.resumed:
        voice.say(f"Going on behind step {trainer.progress.step} of {trainer.steps}.")
    # Behind the trainer, which refuses another run's folder: that one's files stay as they are.
    save_token_order(order.out, trained)
    run = described_run(order, engine, task, recipe, start)
    run["earlier"] = earlier_parts(order.out / "run.json", run) if trainer.resumed else []
    if run["earlier"]:
        voice.say(
            "Parts of this run ran elsewhere, or with other --pass-blocks or --online (run.json, "
            "earlier): sums may round otherwise."
        )
    write_text(order.out / "run.json", json.dumps(run, indent=2) + "\n")
    progress = trainer.run()
    result = {
        "model": engine.model,
        "drafter": str(order.out),
        "steps": progress.step,
        "tau": progress.best_tau,
        "best_step": progress.best_step,
        "tau_of_start": _tau_of_start(progress),
        "trained_texts": len(trained),
        "held_out_texts": len(held),
        "answer_tokens": sum(len(text.answer_ids) for text in trained),
        "seconds": round(progress.seconds, 1),
    }
    write_text(order.out / "README.md", model_card(task.config, run, result, progress.history))
    if progress.history and task.measures_start and progress.best_step == 0:
        voice.say("Training made the drafter begun with worse, which is kept as it was.")
    elif progress.best_tau == 1:
        voice.say("No draft was right on held-out text: give more texts, or more steps.")
    return result


def _tau_of_start(progress: Progress) -> float | None:
    """Of the drafter begun with; None where the run began with none, and without a cycle."""
    first = progress.history[0] if progress.history else {}
    return first["tau"] or None if first.get("step") == 0 else None


def _drafter(order: Order, engine: Engine) -> tuple[dict[str, Any], Start, str]:
    """config.json of the drafter to be trained, its first weights, and where its mask is from."""
    target, recipe = engine.target, order.recipe
    if order.init not in ("target", "random"):
        shape = order.shape
        if (shape.taps, shape.causal, shape.mask_token_id) != (None, None, None):
            raise UsageError(
                "--init with a drafter takes its taps, mask and order in the block over. Leave "
                "those options out; --layers, --selector-rank, --block-size and --windows may "
                "change it."
            )
        fetched = hub.fetch(order.init, kind="drafter")
        stored, start = drafter_start(
            fetched.path,
            target,
            recipe.seed,
            shape.layers,
            second_parts(shape, target.hidden_size),
            order.block_size,
        )
        if shape.windows is not None:
            stored = with_windows(stored, shape)
        content = None if fetched.revision else hash_of(fetched.path)
        start = replace(start, revision=fetched.revision, content=content)
        return stored, start, "the drafter's own"
    mask, why = mask_token(engine.tokenizer, target, order.shape.mask_token_id)
    assert engine.path is not None
    known = read_target_config(engine.path)
    stored = drafter_config(target, known, order.shape, recipe.block_size, mask)
    config = parse_config(stored)
    if order.init == "random":
        return stored, random_start(config, recipe.seed), why
    return stored, target_start(config, target, recipe.seed), why


def _introduction(engine: Engine, config: DFlashConfig, start: Start, why_mask: str) -> str:
    size = sum(array.size for array in start.weights.values()) / 1e6
    layers, taps = config.num_hidden_layers, ", ".join(map(str, config.target_layer_ids))
    origin = f"{len(start.taken)} of {len(start.weights)} tensors start from the target"
    return (
        f"A drafter for {engine.model}: {counted(layers, 'layer')}, {size:.1f} million weights, "
        f"blocks of {config.block_size}, taps {taps}, mask token {config.mask_token_id} "
        f"({why_mask}); {origin}."
    )


def _stage(order: Order, engine: Engine, texts: list[Text], made: Path) -> dict[str, Any]:
    """The result of a run that was to make its data only."""
    return {
        "model": engine.model,
        "until": order.until,
        "made": str(made),
        "texts": len(texts),
        "answer_tokens": sum(len(text.answer_ids) for text in texts),
    }


def _divided(
    order: Order, engine: Engine, texts: list[Text], voice: Voice
) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out, without those that hold no block."""
    recipe = order.recipe
    texts, short = usable(texts, min(recipe.max_length, engine.target.context_length))
    if short:
        voice.say(
            f"Left out: {counted(short, 'text')} too short to train on, or longer than "
            "--max-length alone."
        )
    if len(texts) < 2:
        raise UsageError("Fewer than two usable texts. Give more prompts or answers.")
    trained, held = split(texts, recipe.held_out)
    if len(held) != recipe.held_out:
        voice.say(
            f"Held out: {counted(len(held), 'text')}, not {recipe.held_out}; a quarter at most, "
            "and all answers of a prompt or none."
        )
    return trained, held


def _texts(order: Order, engine: Engine, name: str, work: Path, voice: Voice) -> list[Text]:
    """Answers given, and those the target gives to the prompts."""
    given = read_answers(order.answers, engine.target.vocab_size)
    if order.prompts:
        settings = AnswerSettings(
            name, order.temperature, order.max_answer, order.recipe.seed, order.thinking
        )
        with explained("Answering prompts", f"--slots (now {order.slots})"):
            answered = answer_prompts(
                engine.target,
                engine.tokenizer,
                read_prompts(order.prompts),
                work / "answers.jsonl",
                settings,
                max_length=order.recipe.max_length,
                places=order.slots,
                cache_limit=max(0, _memory_limit(order) - mx.get_active_memory()),
                given=given,
                progress=lambda done, total, speed: voice.stage("answers", done, total),
            )
        if answered.skipped:
            voice.say(f"Left out: {counted(answered.skipped, 'prompt')} too long for an answer.")
        if answered.made:
            voice.say(answered.pace())
        return joined_texts(given, answered.texts)
    return given


def _kinds(
    order: Order, target: Target, name: str, config: DFlashConfig
) -> tuple[FeatureSpec, FeatureSpec]:
    """Of the features of texts trained on, and of those held out.

    These are measured as generation sees them: with features of the target's own type.
    """
    taps = config.target_layer_ids
    return (
        FeatureSpec(name, taps, order.top_k, order.cache_dtype),
        FeatureSpec(name, taps, 0, dtype_name(target.dtype)),
    )


def _unseen(
    order: Order,
    work: Path,
    kinds: tuple[FeatureSpec, FeatureSpec],
    trained: list[Text],
    held: list[Text],
) -> list[int]:
    """Lengths of the texts that the target has to run over."""
    if order.online:
        return [text.length for text in (*trained, *held)]
    caches = [FeatureCache(work / "features", kind) for kind in kinds]
    return [
        text.length
        for cache, texts in zip(caches, (trained, held), strict=True)
        for text in texts
        if text not in cache
    ]


def _task(
    order: Order,
    engine: Engine,
    name: str,
    config: DFlashConfig,
    stored: Mapping[str, Any],
    trained: list[Text],
    held: list[Text],
    described: Mapping[str, Any],
    work: Path,
    voice: Voice,
) -> Task:
    target = engine.target
    spec, exact = _kinds(order, target, name, config)
    features: Offline | Online
    held_features: Offline | Online
    if order.online:
        features, held_features = Online(target, spec), Online(target, exact)
    else:
        limit = None if order.cache_limit_gb is None else int(order.cache_limit_gb * 1e9)
        with explained("Computing features", f"--max-length (now {order.recipe.max_length})"):
            features, held_features = offline(
                work / "features",
                [(spec, trained), (exact, held)],
                target,
                limit,
                voice.say,
                lambda done, total: voice.stage("features", done, total),
            )
    return Task(
        target,
        engine.tokenizer.end_ids,
        config,
        stored,
        trained,
        held,
        features,
        held_features,
        described,
        measures_start=order.init not in ("target", "random"),
    )


def _memory_limit(order: Order) -> int:
    """Bytes that the run may take."""
    gb = order.memory_gb
    return int(_MEMORY_SHARE * memory_bytes()) if gb is None else int(gb * 1e9)


def _within_memory(
    order: Order,
    target: Target,
    config: DFlashConfig,
    trained: list[Text],
    unseen: list[int],
    start: Start,
    streams: int,
    voice: Voice,
) -> Recipe:
    """The recipe for this drafter, with as few blocks a pass as memory asks for."""
    asked = order.recipe.pass_blocks
    before = (has_state(order.out) and blocks_before(order.out / "run.json", asked)) or asked
    recipe = replace(order.recipe, block_size=config.block_size, pass_blocks=min(asked, before))
    limit_bytes = _memory_limit(order)
    used = {token for text in trained for token in text.answer_ids}
    spec = FeatureSpec("", config.target_layer_ids, order.top_k, order.cache_dtype)
    vocab = target.vocab_size if order.top_k else 0
    read = len(spec.taps) * target.hidden_size
    room = Room(
        sum(array.size for array in start.weights.values()),
        len(used) + recipe.negatives,
        bytes_a_token(spec, target.hidden_size),
        target_pass_bytes(target, read, vocab, unseen),
    )
    steps = epoch_steps(
        trained, 0, seed=recipe.seed, anchors=recipe.anchors, blocks=recipe.step_blocks
    )
    fits = fitted(recipe, config, room, steps, limit_bytes, streams)
    if fits.pass_blocks < recipe.pass_blocks:
        voice.say(
            f"{fits.pass_blocks} blocks a pass instead of {asked}, so that "
            f"{shown_bytes(limit_bytes)} suffice."
        )
    elif before < asked:
        voice.say(f"{before} blocks a pass instead of {asked}, as in the run's part before.")
    return replace(recipe, pass_blocks=fits.pass_blocks)


def _streams() -> int:
    """Passes at a time: the GPU takes one, MLX's CPU back-end one a core."""
    if mx.default_device() != mx.cpu:
        return 1
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
