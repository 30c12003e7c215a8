"""What scripts/ablate compares: each variant changes one thing of a small run (fusion two)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.config import DFlashConfig, parse_config
from dflash_mlx.draft.dflash import DFlashModel
from dflash_mlx.draft.dflash2 import DFlash2Model
from dflash_mlx.models.base import Target
from dflash_mlx.train.batches import (
    Work,
    anchor_candidates,
    grouped,
    parted,
    uniform_anchors,
)
from dflash_mlx.train.blocks import BlockGroup, block_rows
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import Seen
from dflash_mlx.train.loss import HeadSubset, Labels, Reweighed
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.replay import agreed
from dflash_mlx.train.shape import Shape, second_parts
from dflash_mlx.train.start import Start, random_start, target_start
from dflash_mlx.train.step import Objective
from dflash_mlx.train.trainer import Trainer

Rows = Callable[[DFlashModel, DFlashConfig, mx.array, Sequence[BlockGroup]], mx.array]
#: blocks of one pass when measuring
_MEASURED_BLOCKS = 64


def fused_rows(
    model: DFlashModel, config: DFlashConfig, embedded: mx.array, groups: Sequence[BlockGroup]
) -> mx.array:
    """Input fusion: the features right before the anchor are added to every row of the block.

    Nothing is injected into keys and values.
    """
    before = mx.concatenate([g.features[mx.array(g.anchors - 1)] for g in groups])
    x = embedded + model.fuse(before.astype(embedded.dtype)[None])[0][:, None]
    return lone_rows(model, config, x, groups)


def lone_rows(
    model: DFlashModel, config: DFlashConfig, embedded: mx.array, groups: Sequence[BlockGroup]
) -> mx.array:
    """Without target features: the block's rows see one another and nothing else."""
    x = embedded
    blocks, rows = x.shape[:2]
    for layer in model.layers:
        w, h = layer.self_attn, layer.input_layernorm(x)
        q = w.q_norm(w.q_proj(h).reshape(blocks, rows, w.heads, -1)).transpose(0, 2, 1, 3)
        k = w.k_norm(w.k_proj(h).reshape(blocks, rows, w.kv_heads, -1)).transpose(0, 2, 1, 3)
        v = w.v_proj(h).reshape(blocks, rows, w.kv_heads, -1).transpose(0, 2, 1, 3)
        seen = mx.fast.scaled_dot_product_attention(
            config.rope(q, 0), config.rope(k, 0), v, scale=w.scale
        )
        x = x + w.o_proj(seen.transpose(0, 2, 1, 3).reshape(blocks, rows, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm(x)


def half_of_the_rows(logprobs: mx.array, labels: Labels) -> Labels:
    """Loss on a random half of the positions, twice as heavy."""
    key = mx.random.key(int(labels.hard.sum()))  # another half in every pass, the same in a rerun
    chosen = mx.random.bernoulli(0.5, labels.weights.shape, key=key)
    return replace(labels, weights=labels.weights * chosen * 2)


class Chosen:
    """Features of some of the taps that were stored."""

    def __init__(self, features: Any, stored: Sequence[int], wanted: Sequence[int]) -> None:
        self.features, self.stored = features, len(stored)
        self.places = mx.array([list(stored).index(tap) for tap in wanted])

    def read_all(self, texts: Sequence[Text]) -> list[Seen]:
        return [
            Seen(self._cut(seen.features), seen.ids, seen.logprobs)
            for seen in self.features.read_all(texts)
        ]

    def _cut(self, features: mx.array) -> mx.array:
        length = features.shape[0]
        return features.reshape(length, self.stored, -1)[:, self.places].reshape(length, -1)


@dataclass(frozen=True)
class Variant:
    """One line of the table. recipe and shape: what differs from the base."""

    name: str
    recipe: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] | None = None
    rows: Rows = block_rows
    reweighed: Reweighed | None = None
    random: bool = False
    uniform: bool = False
    verified: int | None = None  # rows that a cycle verifies, when not as many as trained


class VariantTrainer(Trainer):
    """A run that keeps nothing on disk and measures by training's own passes, for every variant."""

    def __init__(self, variant: Variant, *run: Any) -> None:
        self.variant = variant
        super().__init__(*run)

    def _objective(self, head: HeadSubset) -> Objective:
        objective = replace(super()._objective(head), rows=self.variant.rows)
        reweighed = self.variant.reweighed
        return objective if reweighed is None else replace(objective, reweighed=reweighed)

    def _epoch(self, epoch: int) -> list[list[Work]]:
        recipe = self.recipe
        if not self.variant.uniform:
            return super()._epoch(epoch)
        works = [Work(text, uniform_anchors(text, recipe.block_size)) for text in self.task.trained]
        random = np.random.default_rng([recipe.seed, epoch])
        return grouped(parted(works, recipe.step_blocks, random), recipe.step_blocks)

    def _measure(self) -> None:
        """Nothing in between; `tau` measures at the end."""

    def _measured(self) -> bool:
        return True

    def save(self) -> None:
        """A comparison is run again, not resumed."""

    def measured(self, max_tokens: int) -> tuple[float, float]:
        """(tokens a cycle, share of all anchors whose first draft is right) on held-out texts.

        Every anchor's drafts come from passes of training. A short run changes the second number
        before it changes the first.
        """
        cycles = tokens = right = anchors = 0
        for text in self.task.held_out:
            seen = self.task.held_features.read_all([text])[0]
            drafts = self._drafts(text, seen)
            right += sum(d[0] == t for d, t in zip(drafts, text.answer_ids[1:], strict=True))
            anchors += len(drafts)
            done, length = 0, min(len(text.answer_ids), max_tokens) - 1
            while done < length:
                follows = text.answer_ids[done + 1 : length + 1]
                accepted = agreed(drafts[done], follows)
                emitted = min(accepted + 1, length - done)
                cycles, tokens, done = cycles + 1, tokens + emitted, done + emitted
        return tokens / cycles, right / anchors

    def _drafts(self, text: Text, seen: Seen) -> list[list[int]]:
        """Of every anchor of the answer, its drafts over the whole vocabulary.

        Where a cycle verifies fewer rows than were trained, the rest of the block is drafted and
        left out, as in generation; where it verifies more, the block has more masks.
        """
        self._model.update(self.parameters)
        target: Target = self.task.target
        objective = self._objective(self._head_of(self.progress.epoch))
        ids = np.array(text.ids, np.int32)
        trained = self.task.config.block_size
        verified = self.variant.verified or trained
        block, shown = max(trained, verified), verified - 1
        objective = replace(objective, config=replace(self.task.config, block_size=block))
        made: list[list[int]] = []
        anchors = anchor_candidates(text)
        for start in range(0, len(anchors), _MEASURED_BLOCKS):
            part = anchors[start : start + _MEASURED_BLOCKS]
            group = BlockGroup(seen.features[: int(part.max())], part)
            x = objective.embed(mx.array(ids[part]))
            rows = self.variant.rows(self._model, self.task.config, x, [group])[:, 1:]
            made += _chosen(self._model, rows, target.head(rows), ids[part])[:, :shown].tolist()
        return made


def _chosen(model: DFlashModel, rows: mx.array, logits: mx.array, anchors: np.ndarray) -> mx.array:
    """Greedy drafts [N, b-1] of rows [N, b-1, H]; a DFlash 2 drafter walks its candidates."""
    if not isinstance(model, DFlash2Model):
        return mx.argmax(logits, axis=-1)
    selector = model.candidate_selector
    walked = [
        selector.walk(
            rows[i : i + 1], logits[i], mx.array([int(anchor)]), lambda scores, _: mx.argmax(scores)
        ).tokens
        for i, anchor in enumerate(anchors)
    ]
    return mx.stack(walked)


def variants(taps: tuple[int, ...]) -> list[Variant]:
    """The paper's comparisons from its recipe on, and others' tricks."""
    three = (taps[0], taps[len(taps) // 2], taps[-1])
    return [
        Variant("base: 2 layers, 5 taps, block 8"),
        Variant("without target features", rows=lone_rows),
        Variant("input fusion instead of K/V injection", rows=fused_rows),
        Variant("uniform blocks instead of random anchors", uniform=True),
        Variant("uniform weights instead of decay", recipe={"gamma": 1e6}),
        Variant("3 taps", taps=three),
        Variant("1 layer", shape={"layers": 1}),
        Variant("3 layers", shape={"layers": 3}),
        Variant("trained on blocks of 4, verifies 4", recipe={"block_size": 4}),
        Variant("trained on blocks of 8, verifies 4", verified=4),
        Variant("trained on blocks of 8, verifies 16", verified=16),
        Variant("trained on blocks of 16, verifies 8", recipe={"block_size": 16}, verified=8),
        Variant("trained on blocks of 16, verifies 16", recipe={"block_size": 16}),
        Variant("soft labels only", recipe={"soft": 1.0}),
        Variant("half soft, half hard labels", recipe={"soft": 0.5}),
        Variant("D-PACE weights instead of decay", recipe={"weights": "dpace"}),
        Variant("loss on a random half of the rows", reweighed=half_of_the_rows),
        Variant("loss over the whole vocabulary", recipe={"negatives": 10**9}),
        Variant("random start", random=True),
        Variant("DFlash 2: convolutions, selector of rank 32", shape={"selector_rank": 32}),
    ]


def recipe_of(variant: Variant, base: Recipe) -> Recipe:
    """The base's recipe as the variant changes it, with as many rows a step: an equal budget."""
    recipe = replace(base, **variant.recipe)
    rows = base.step_blocks * base.block_size
    return replace(recipe, step_blocks=rows // recipe.block_size)


def start_of(variant: Variant, config: DFlashConfig, target: Target, seed: int) -> Start:
    """First weights: chance, or the target's last layers."""
    return random_start(config, seed) if variant.random else target_start(config, target, seed)


def config_of(variant: Variant, base: dict[str, Any], recipe: Recipe) -> DFlashConfig:
    """The base's config with the variant's layers, taps and block size."""
    stored = {**base, "block_size": recipe.block_size}
    layers = variant.shape.get("layers", base["num_hidden_layers"])
    nested = {**base["dflash_config"], "block_size": recipe.block_size}
    if variant.taps:
        nested["target_layer_ids"] = list(variant.taps)
    stored |= {"num_hidden_layers": layers, "dflash_config": nested}
    stored["layer_types"] = ["full_attention"] * layers
    if rank := variant.shape.get("selector_rank"):
        stored["architectures"] = ["DFlash2DraftModel"]
        nested |= second_parts(Shape(selector_rank=rank), base["hidden_size"]) or {}
    return parse_config(stored)
