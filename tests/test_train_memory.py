"""The estimate of a pass's memory against what MLX really held."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from tiny import tiny_target
from tiny_drafter import drafter_config
from tiny_training import own_texts, write_answers, write_target

import dflash_mlx
from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import UsageError
from dflash_mlx.train import memory
from dflash_mlx.train.batches import Work
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import FeatureSpec, Seen, compute
from dflash_mlx.train.loss import HeadSubset, position_weights
from dflash_mlx.train.memory import Room, explained, fitted, pass_bytes, target_pass_bytes
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import Voice, train
from dflash_mlx.train.shape import Shape
from dflash_mlx.train.start import new_model, random_start
from dflash_mlx.train.step import Objective, Streams, build_pass, gradients


def text_of(length: int) -> Text:
    """A text of so many tokens, ten of them the prompt's."""
    ids = tuple(np.random.default_rng(0).integers(0, 48, length).tolist())
    return Text("a", ids[:10], ids[10:])


@pytest.mark.parametrize(
    ("variant", "layers", "inner", "block", "blocks", "rows", "texts", "head"),
    [
        ("full", 2, 80, 8, 64, 300, 1, 48),
        ("full", 1, 400, 8, 64, 50, 1, 48),
        ("full", 3, 80, 16, 32, 600, 1, 48),
        ("full", 2, 80, 4, 200, 100, 1, 48),
        ("full", 2, 80, 8, 4, 300, 16, 48),
        ("full", 1, 40, 4, 1, 900, 30, 48),
        ("full", 1, 40, 8, 32, 50, 1, 3000),
        ("second", 2, 80, 8, 64, 300, 1, 48),
        ("second", 1, 40, 6, 8, 100, 8, 48),
        ("second", 1, 40, 6, 32, 50, 1, 3000),
    ],
)
def test_the_estimate_is_from_above_and_not_far(
    variant, layers, inner, block, blocks, rows, texts, head
):
    target = tiny_target("llama", vocab_size=head)
    stored = drafter_config(
        variant,
        num_hidden_layers=layers,
        intermediate_size=inner,
        hidden_size=target.hidden_size,
        vocab_size=head,
    )
    if kinds := stored.get("layer_types"):
        stored["layer_types"] = kinds[:1] * layers
    stored["dflash_config"] = {**stored["dflash_config"], "block_size": block}
    config = parse_config(stored)
    text = text_of(rows + 40)
    zeros = mx.zeros((len(text.answer_ids), 4))
    seen = Seen(mx.zeros((text.length, config.feature_size)), zeros.astype(mx.int32), zeros)
    subset = HeadSubset(target, range(head))
    anchors = np.linspace(rows if blocks == 1 else 10, rows, blocks).astype(int)
    works = [Work(text, anchors)] * texts
    work = [build_pass(works, [seen] * texts, subset, position_weights(block, 4))]
    objective = Objective(new_model(config), config, target, subset, 0.0, mx.float32)
    parameters = tree_unflatten(list(random_start(config, 0).weights.items()))
    mx.eval(parameters)
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradients(objective, parameters, work, Streams(1))[0])
    taken = mx.get_peak_memory() - held
    assert taken <= pass_bytes(config, head, [(blocks, rows)] * texts) <= 2.7 * taken


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5", "gemma4_shared"])
@pytest.mark.parametrize(
    ("count", "length", "top_k"), [(1, 2100, 0), (1, 600, 8), (128, 8, 0), (10, 100, 0)]
)
def test_the_estimate_of_the_targets_passes_is_from_above_and_not_far(family, count, length, top_k):
    target = tiny_target(family)
    ids = tuple(np.random.default_rng(0).integers(0, 48, length).tolist())
    texts = [Text(str(i), ids[:5], ids[5:]) for i in range(count)]
    spec = FeatureSpec("", (0, 2), top_k, "float32")
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    compute(target, spec, texts)
    taken = mx.get_peak_memory() - held
    vocab = target.vocab_size if top_k else 0
    estimate = target_pass_bytes(target, 2 * target.hidden_size, vocab, [length] * count)
    # Short texts hold their caches of all layers at once only where likely tokens are asked for.
    assert taken <= estimate <= (5 if count == 1 else 10) * taken
    assert target_pass_bytes(target, 2 * target.hidden_size, vocab, []) == 0


CONFIG = parse_config(drafter_config())
RECIPE = Recipe(pass_blocks=64, step_blocks=128, max_length=500)
#: a step of one text's blocks, all anchored at 499
STEPS = [[Work(text_of(500), np.full(128, 499))]]


def fits(room: Room, beside: int, blocks: int, streams: int = 2, steps=STEPS) -> int:
    """Blocks a pass where there is room for `blocks` of the long text, and `beside` bytes."""
    one = pass_bytes(CONFIG, room.head_tokens, [(blocks, 499)])
    limit = mx.get_active_memory() + beside + streams * one
    return fitted(RECIPE, CONFIG, room, steps, limit, streams).pass_blocks


def test_blocks_a_pass_shrink_to_what_fits():
    weights = 4 * 7 * 10_000 + 1000 * CONFIG.hidden_size * 4 * 2
    room = Room(10_000, 1000, 0)
    assert [fits(room, weights, n) for n in (1, 7, 63, 64, 100)] == [1, 7, 63, 64, 64]
    with pytest.raises(UsageError, match="--max-length"):
        fits(room, 0, 1, streams=1)


def test_features_of_a_step_and_the_targets_own_pass_need_room_too():
    weights = 1000 * CONFIG.hidden_size * 4 * 2
    assert fits(Room(0, 1000, 30), weights + 30 * 500, 7) == 7
    with pytest.raises(UsageError, match="over one block"):
        fits(Room(0, 1000, 10**9), weights, 7)
    # Features are computed before the passes, not beside them.
    assert fits(Room(0, 1000, 0, target_pass=1000), weights, 7) == 7
    with pytest.raises(UsageError, match="target's passes over the texts take 1000"):
        fits(Room(0, 1000, 0, target_pass=10**12), weights, 7)


def test_many_short_works_have_a_context_each():
    """As many blocks of texts of their own take more than those of one text."""
    weights = 1000 * CONFIG.hidden_size * 4 * 2
    apart = [[Work(text_of(500), np.array([499]))] * 128]
    room = Room(0, 1000, 0)
    assert fits(room, weights, 40) == 40
    assert 1 <= fits(room, weights, 40, steps=apart) < 30


def test_what_ran_out_of_memory_names_the_option():
    with pytest.raises(UsageError, match="Lower --slots"), explained("Answering", "--slots"):
        raise RuntimeError("[malloc] Unable to allocate 100 bytes.")
    with pytest.raises(RuntimeError, match="shapes"), explained("Answering", "--slots"):
        raise RuntimeError("shapes do not fit")


def test_a_run_stays_within_the_memory_it_was_given(tmp_path, no_picture):
    """As many blocks a pass as asked for take more; what --memory leaves of them does not."""
    target = str(write_target(tmp_path / "target", "llama"))
    texts = own_texts(dflash_mlx.load(target, draft=None), 16, 60)
    answers = [write_answers(tmp_path / "answers.jsonl", texts)]
    recipe = Recipe(
        block_size=8, steps=2, step_blocks=400, pass_blocks=400, held_out=4, negatives=8
    )
    order = Order(target, tmp_path / "free", recipe, Shape(layers=2, taps=2), answers=answers)
    told: list[str] = []

    def peak(order: Order) -> int:
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        train(order, Voice(told.append))
        return mx.get_peak_memory()

    free = peak(order)
    assert not any("blocks a pass instead" in line for line in told)
    limit = free / 2
    bound = peak(replace(order, out=tmp_path / "bound", memory_gb=limit / 1e9))
    assert any("blocks a pass instead of 400" in line for line in told)
    assert bound <= limit


def test_the_memory_given_is_mlx_s_limit_for_the_time_of_a_run(monkeypatch):
    set_to = [mx.set_memory_limit(1 << 40)]
    mx.set_memory_limit(set_to[0])
    monkeypatch.setattr(memory.mx, "set_memory_limit", lambda size: set_to.append(size) or 77)
    with pytest.raises(KeyboardInterrupt), memory.held_to(1234):
        raise KeyboardInterrupt
    assert set_to[1:] == [1234, 77]
