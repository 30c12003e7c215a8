"""The training loop: steps in a fixed order, measurements on held-out text, exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map, tree_unflatten

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.draft.packagings import official_config
from dflash_mlx.drafting import dtype_beside
from dflash_mlx.errors import UsageError
from dflash_mlx.loader import DTYPES
from dflash_mlx.models.base import Target
from dflash_mlx.train.batches import Work, epoch_steps, passes
from dflash_mlx.train.checkpoint import Progress, load_state, save_state
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.curve import save_curve
from dflash_mlx.train.export import as_drafter, has_drafter, save_drafter
from dflash_mlx.train.features import Seen
from dflash_mlx.train.interrupt import uninterrupted
from dflash_mlx.train.loss import HeadSubset, dpace_weights, given_weights, position_weights
from dflash_mlx.train.memory import explained
from dflash_mlx.train.naming import same_target
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.replay import Replay, joined, replay_sets
from dflash_mlx.train.start import Weights, new_model
from dflash_mlx.train.step import (
    Objective,
    StepResult,
    Streams,
    build_pass,
    clipped,
    gradients,
)
from dflash_mlx.train.wording import as_option

#: seconds between states on disk: what a machine that goes down may cost
SAVE_SECONDS = 300.0


class Features(Protocol):
    """Where the target's view of texts comes from."""

    def read_all(self, texts: Sequence[Text]) -> list[Seen]: ...


@dataclass(frozen=True)
class Task:
    """What is trained on what. `described` goes into the state, and a resumed run must equal it."""

    target: Target
    end_ids: Collection[int]
    config: DFlashConfig
    stored_config: Mapping[str, Any]  # config.json
    trained: Sequence[Text]
    held_out: Sequence[Text]
    features: Features
    held_features: Features  # in the target's own type
    described: Mapping[str, Any]
    # What training makes of a drafter may be worse: then the one begun with is the best.
    measures_start: bool = False


@dataclass(frozen=True)
class Report:
    """One measurement, or a look in between (tau None)."""

    step: int
    steps: int
    loss: float
    accuracy: list[float]  # of each row behind the anchor, of the blocks trained on
    tau: float | None
    best_tau: float
    positions_a_second: float  # rows with a label, of this run
    seconds_left: float


def _differing(name: str, stored: Any, ours: Any) -> list[str]:
    """What two settings differ in, as "option: stored -> ours"; of dictionaries by key."""
    if stored == ours:
        return []
    if not (isinstance(stored, Mapping) and isinstance(ours, Mapping)):
        return [f"{as_option(name)}: {stored} -> {ours}"]
    keys = sorted({*stored, *ours})
    if stored.get("num_hidden_layers") != ours.get("num_hidden_layers"):
        keys = [key for key in keys if key != "layer_types"]  # a list of as many
    return [line for k in keys for line in _differing(f"{name} {k}", stored.get(k), ours.get(k))]


def refuse_other(
    folder: Path, run: dict[str, Any], recipe: Recipe, ours: Mapping[str, Any], target: Target
) -> None:
    """UsageError where `run`, as the state in `folder` has it, is another one than ours."""
    run = dict(run)
    if isinstance(stored := run.get("config"), dict):  # as any packaging says it
        run["config"] = official_config(stored, target.vocab_size, target.num_layers)
    differing = recipe.differences(run.pop("recipe", {}))
    if same_target(run.get("target"), ours.get("target")):
        run["target"] = ours.get("target")
    differing += [line for k, v in ours.items() for line in _differing(k, run.get(k), v)]
    if differing:
        # An option may set several settings, as --block-size does.
        told = "; ".join(dict.fromkeys(differing))
        raise UsageError(
            f"{folder} holds a run with other settings ({told}). Give those again, or another "
            "folder (with this one as --init to train its drafter further)."
        )


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Of step 0 .. steps - 1: linear warm-up, then a cosine down to 0."""
    warm = max(1, round(recipe.warmup * steps))
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """One run. `folder` gets the best drafter and the state; an earlier state there goes on."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        start: Weights,
        folder: Path,
        report: Callable[[Report], None] = lambda report: None,
        streams: int = 1,
        look_every: int = 20,
    ) -> None:
        self.task, self.recipe, self.folder = task, recipe, folder
        self._report, self._look_every = report, look_every
        self._streams = Streams(streams)
        self._weights = position_weights(recipe.block_size, recipe.decay)
        total = recipe.epochs * len(self._epoch(0))  # each has as many blocks
        self.steps = total if recipe.steps is None else min(total, recipe.steps)
        self.optimizer = optim.AdamW(
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            bias_correction=True,
        )
        self.progress = Progress()
        self.resumed = self._resume()
        if not self.resumed:
            # Sorted as a loaded state is: sums over all tensors must not depend on their order.
            named = [(name, mx.contiguous(start[name])) for name in sorted(start)]
            self.parameters = tree_unflatten(named)
            self.optimizer.init(self.parameters)
            mx.eval(self.parameters, self.optimizer.state)
        # One kernel reads and writes what a dozen operations would each: a third of the time.
        state = self.optimizer.state
        self._update = mx.compile(self.optimizer.apply_gradients, inputs=state, outputs=state)
        self._model = new_model(task.config)
        self._head: tuple[int, HeadSubset] | None = None
        self._planned: tuple[int, list[list[Work]]] | None = None
        self._clock = self._saved = time.monotonic()
        self._done_before, self._seconds_before = self.progress.step, self.progress.seconds
        self._positions = 0

    def run(self) -> Progress:
        """Train to the end, or until KeyboardInterrupt, which leaves a state to go on from."""
        try:
            with explained("Training", self._knobs):
                while self.progress.step < self.steps:
                    self._advance()
                if not self._measured():
                    self._measure()
        except KeyboardInterrupt:
            self.save()
            raise
        return self.progress

    def save(self) -> None:
        """Write the state as it is after the last whole step."""
        run = {"recipe": self.recipe.as_json(), **self.task.described}
        self.progress.seconds = self._seconds_before + time.monotonic() - self._clock
        state = self.optimizer.state
        save_state(self.folder, self.parameters, state, self.progress, run)
        self._saved = time.monotonic()

    def _resume(self) -> bool:
        found = load_state(self.folder)
        if found is None:
            return False
        self.parameters, state, self.progress, run = found
        refuse_other(self.folder, run, self.recipe, self.task.described, self.task.target)
        if self.progress.history and not has_drafter(self.folder):
            raise UsageError(
                f"{self.folder} has the state of a run, but not its best drafter: "
                "model.safetensors, config.json. Put them back, or give another folder."
            )
        self.optimizer.init(self.parameters)
        self.optimizer.state = state
        return True

    def _epoch(self, epoch: int) -> list[list[Work]]:
        recipe = self.recipe
        return epoch_steps(
            self.task.trained,
            epoch,
            seed=recipe.seed,
            anchors=recipe.anchors,
            blocks=recipe.step_blocks,
        )

    def _advance(self) -> None:
        """One step, or what a stopped run left undone behind its last one."""
        progress = self.progress
        works = self._works()
        if progress.place == len(works):
            progress.epoch, progress.place = progress.epoch + 1, 0
            works = self._works()
        if progress.step % self.recipe.measure_every == 0 and not self._measured():
            self._measure()  # a run was stopped before it, or the drafter begun with
        grads, result = self._gradients(works[progress.place], progress.epoch)
        with uninterrupted():  # weights, optimizer and progress belong to one step
            self._apply(grads)
            self._count(result)
        if progress.step % self.recipe.measure_every == 0:
            self._measure()
            return
        if progress.step % self._look_every == 0 or progress.step == self._done_before + 1:
            # The first step is told, too: how long the run will take is seen at once.
            self._report(self._summary(None))
        if time.monotonic() - self._saved > SAVE_SECONDS:
            with uninterrupted():
                self.save()

    def _works(self) -> list[list[Work]]:
        """The steps of the epoch the run stands in."""
        epoch = self.progress.epoch
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._epoch(epoch))
        return self._planned[1]

    def _measured(self) -> bool:
        """Whether this step has been measured; the start counts where it is a drafter already."""
        history = self.progress.history
        if self.progress.step == 0 and not (self.task.measures_start and self.task.held_out):
            return True
        return bool(history) and history[-1]["step"] == self.progress.step

    def _gradients(self, works: Sequence[Work], epoch: int) -> tuple[Any, StepResult]:
        head = self._head_of(epoch)
        objective = self._objective(head)
        # Each text's features once a step, however many passes its blocks come into.
        texts = list(dict.fromkeys(work.text for work in works))
        seen = dict(zip(texts, self.task.features.read_all(texts), strict=True))
        built = [
            build_pass(part, [seen[work.text] for work in part], head, self._weights)
            for part in passes(works, self.recipe.pass_blocks)
        ]
        grads, result = gradients(objective, self.parameters, built, self._streams)
        if not math.isfinite(result.loss):
            raise UsageError(
                f"The loss is {result.loss} at step {self.progress.step + 1}; start again with a "
                "smaller --lr, or --train-dtype float32."
            )
        grads = clipped(grads, result.weight, self.recipe.clip)
        # A transposed gradient would give weights a layout that a saved state does not keep, and
        # matmul rounds otherwise for it.
        return tree_map(mx.contiguous, grads), result

    def _apply(self, grads: Any) -> None:
        rate = learning_rate(self.recipe, self.progress.step, self.steps)
        self.optimizer.learning_rate = rate
        self.parameters = self._update(grads, self.parameters)
        mx.eval(self.parameters, self.optimizer.state)

    def _objective(self, head: HeadSubset) -> Objective:
        task, recipe = self.task, self.recipe
        dtype = DTYPES[recipe.dtype]
        weights = dpace_weights if recipe.weights == "dpace" else given_weights
        return Objective(self._model, task.config, task.target, head, recipe.soft, dtype, weights)

    def _head_of(self, epoch: int) -> HeadSubset:
        """Tokens of all trained texts, and others that are drawn anew every epoch."""
        if self._head is None or self._head[0] != epoch:
            used = {token for text in self.task.trained for token in text.answer_ids}
            vocab = self.task.target.vocab_size
            random = np.random.default_rng([self.recipe.seed, epoch, 1])
            count = min(self.recipe.negatives, vocab)
            others = random.choice(vocab, count, replace=False).tolist()
            self._head = (epoch, HeadSubset(self.task.target, [*used, *others]))
        return self._head[1]

    def _count(self, result: StepResult) -> None:
        progress = self.progress
        progress.step += 1
        progress.place += 1
        progress.add(result.loss, result.correct.tolist(), result.counted.tolist())
        self._positions += int(result.counted.sum())

    def _measure(self) -> None:
        """Measure on held-out text, keep the drafter if it is the best, and save the state."""
        sets = self._replayed() if self.task.held_out else {}
        with uninterrupted():  # a best τ without its drafter would never be made good
            report = self._keep(sets)
        self._report(report)
        mx.clear_cache()

    def _keep(self, sets: Mapping[str, Replay]) -> Report:
        whole = joined(sets)
        tau = whole.tokens_per_cycle
        progress = self.progress
        # Without a cycle on held-out text there is no best one: the last is kept. What held-out
        # text cannot tell from the drafter begun with has been trained, at least.
        better = tau > progress.best_tau or (tau == progress.best_tau and not progress.best_step)
        if better or not progress.history or not whole.accepts:
            progress.best_tau, progress.best_step = tau, progress.step
            save_drafter(self.folder, self.task.stored_config, self.parameters)
        report = self._summary(tau)
        entry = {
            "step": report.step,
            # Neither is known of the start, before any step.
            "loss": report.loss if progress.counted_steps else None,
            "accuracy": report.accuracy,
            "tau": tau,
            "tau_by_set": {name: part.tokens_per_cycle for name, part in sorted(sets.items())},
            "acceptance": whole.acceptance(self.recipe.block_size),
        }
        progress.history.append(entry)
        progress.clear()
        self.save()
        save_curve(self.folder, progress.history)
        return report

    def _replayed(self) -> dict[str, Replay]:
        task = self.task
        drafter = as_drafter(task.config, self.parameters, task.target, dtype_beside(task.target))
        # One text's features at a time.
        known = ((t, task.held_features.read_all([t])[0].features) for t in task.held_out)
        knob = f"--max-length (now {self.recipe.max_length}), and give another folder"
        with explained("Measuring", knob):
            return replay_sets(drafter, known, task.end_ids)

    def _summary(self, tau: float | None) -> Report:
        progress = self.progress
        seconds = time.monotonic() - self._clock
        done = progress.step - self._done_before
        pace = seconds / done if done else 0.0
        return Report(
            progress.step,
            self.steps,
            progress.mean_loss(),
            progress.accuracy(),
            tau,
            progress.best_tau,
            self._positions / seconds if seconds else 0.0,
            pace * (self.steps - progress.step),
        )

    @property
    def _knobs(self) -> str:
        """What takes less memory: of these the first goes on with the run, the second does not."""
        recipe = self.recipe
        if recipe.pass_blocks > 1:
            return f"--pass-blocks (now {recipe.pass_blocks}) and give the command again"
        return f"--max-length (now {recipe.max_length}) and give another folder"
