"""The DFlash 2 drafter against goldens of the official torch class, in the loop, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_drafter as tiny
from mlx.utils import tree_flatten
from oracle import plain_greedy
from tiny import tiny_prompt, tiny_target
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import DraftSampling
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash2 import DFlash2Drafter, Walk
from dflash_mlx.kernels import Coefficients, block_convolution

Both = tuple[Coefficients, ...]  # of the input and of the output side
TOLERANCE = 1e-4
HEAT = 0.7  # temperature of the goldens' sampled drafts
GOLDENS = mx.load(str(Path(__file__).parent / "goldens" / "drafters" / "dflash2.safetensors"))


@pytest.fixture
def drafter_of(tmp_path: Path) -> Callable[..., DFlash2Drafter]:
    def opened(variant: str, bits: int | None = None, **overrides: Any) -> DFlash2Drafter:
        config = tiny.drafter_config(variant, **overrides)
        folder = write_drafter(tmp_path, config, tiny.variant_seed(variant))
        drafter = open_drafter(folder, BorrowedTarget(), dtype=mx.float32, bits=bits, group_size=32)
        assert isinstance(drafter, DFlash2Drafter)
        return drafter

    return opened


def second_best(scores: mx.array, _: int) -> mx.array:
    return mx.argsort(-scores)[1]


def best(scores: mx.array, _: int) -> mx.array:
    return mx.argmax(scores)


def replay(drafter: DFlash2Drafter) -> tuple[mx.array, list[Walk], list[Walk]]:
    """Of every proposal of the goldens' sequence: logits, the greedy walk, the second-best walk."""
    features = mx.array(tiny.context_features(tiny.drafter_config(), sum(tiny.CONTEXT_STEPS)))[None]
    cache, start, logits = drafter.make_cache(), 0, []
    walks: tuple[list[Walk], list[Walk]] = ([], [])
    for step, anchor in zip(tiny.CONTEXT_STEPS, tiny.anchors(), strict=True):
        drafter.observe(features[:, start : start + step], cache)
        start += step
        first = mx.array([anchor])
        rows = drafter._rows(first, tiny.BLOCK - 1, cache)
        logits.append(drafter._logits(rows))
        for walked, choose in zip(walks, (best, second_best), strict=True):
            selector = drafter.model.candidate_selector
            walked.append(selector.walk(rows, logits[-1], first, choose))
    return mx.stack(logits), *walks


def logit_gap(variant: str, drafter: DFlash2Drafter) -> float:
    return mx.abs(replay(drafter)[0] - GOLDENS[f"{variant}.logits"]).max().item()


def path_errors(variant: str, drafter: DFlash2Drafter) -> int:
    """How many drafts differ from the official ones, greedy and second-best walk together."""
    wrong = 0
    for name, walked in zip(("path", "other_path"), replay(drafter)[1:], strict=True):
        tokens = mx.stack([walk.tokens for walk in walked])
        wrong += (tokens != GOLDENS[f"{variant}.{name}"]).sum().item()
    return wrong


def on_vocabulary(candidates: mx.array, probs: mx.array) -> mx.array:
    zeros = mx.zeros((*probs.shape[:-1], tiny.VOCAB))
    return mx.put_along_axis(zeros, candidates, probs, axis=-1)


def q_gap(variant: str, drafter: DFlash2Drafter, heat: float = HEAT) -> float:
    walked = replay(drafter)[2]
    probs = mx.softmax(mx.stack([w.scores for w in walked]) / heat, axis=-1)
    ours = on_vocabulary(mx.stack([w.candidates for w in walked]), probs)
    wanted = on_vocabulary(GOLDENS[f"{variant}.candidates"], GOLDENS[f"{variant}.q"])
    return mx.abs(ours - wanted).max().item()


@pytest.mark.parametrize("variant", tiny.DFLASH2_VARIANTS)
def test_drafts_equal_the_official_class(drafter_of: Any, variant: str) -> None:
    drafter = drafter_of(variant)
    assert logit_gap(variant, drafter) <= TOLERANCE
    assert path_errors(variant, drafter) == 0
    assert q_gap(variant, drafter) <= TOLERANCE
    assert q_gap(variant, drafter, heat=1.0) > 20 * TOLERANCE


def flipped_taps(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel = conv.base_kernel[:, ::-1]
            weight = conv.kernel_projection.weight
            split = weight.reshape(2, conv.taps, conv.groups, -1)
            conv.kernel_projection.weight = split[:, ::-1].reshape(weight.shape)


def swapped_sides(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        weight = layer.mlp_conv.kernel_projection.weight
        layer.mlp_conv.kernel_projection.weight = mx.concatenate(mx.split(weight, 2)[::-1])


def swapped_base_sides(drafter: DFlash2Drafter) -> None:
    for layer in drafter.model.layers:
        layer.attention_conv.base_kernel = layer.attention_conv.base_kernel[::-1]


def interleaved_groups(drafter: DFlash2Drafter) -> None:
    """A channel's group is channel % groups instead of channel // group size."""
    for layer in drafter.model.layers:
        conv = layer.attention_conv
        weight = conv.kernel_projection.weight

        def coefficients(x: mx.array, _: None, conv=conv, weight=weight) -> Both:
            dynamic = (x[0] @ weight.T).reshape(x.shape[1], 2, conv.taps, conv.groups)
            each = mx.tile(dynamic, (1, 1, 1, x.shape[2] // conv.groups))
            return tuple(Coefficients(conv.base_kernel[i], each[:, i]) for i in (0, 1))

        conv.coefficients = coefficients


def from_the_convolved_input(drafter: DFlash2Drafter) -> None:
    """The output side's coefficients are computed from the input side's result."""
    for layer in drafter.model.layers:
        conv = layer.mlp_conv
        true = conv.coefficients

        def coefficients(x: mx.array, _: None, true=true) -> Both:
            before = true(x)[0]
            return before, true(block_convolution(x, before))[1]

        conv.coefficients = coefficients


def coefficients_of_the_input_row(drafter: DFlash2Drafter) -> None:
    """Row t - k brings the coefficients of tap k, not the row t that is computed."""
    for layer in drafter.model.layers:
        conv = layer.attention_conv
        true = conv.coefficients

        def coefficients(x: mx.array, _: None, true=true) -> Both:
            return tuple(
                Coefficients(
                    c.base,
                    mx.concatenate(
                        [c.dynamic[:, :1], mx.roll(c.dynamic[:, 1:], 1, axis=0)], axis=1
                    ),
                )
                for c in true(x)
            )

        conv.coefficients = coefficients


@pytest.mark.parametrize(
    "fault",
    [
        flipped_taps,
        swapped_sides,
        swapped_base_sides,
        interleaved_groups,
        from_the_convolved_input,
        coefficients_of_the_input_row,
    ],
)
@pytest.mark.parametrize("variant", ["second", "second_three_taps"])
def test_planted_fault_of_the_convolutions_shows(drafter_of: Any, variant: str, fault: Any) -> None:
    drafter = drafter_of(variant)
    fault(drafter)
    assert logit_gap(variant, drafter) > 20 * TOLERANCE


def test_planted_fault_of_the_selector_shows(drafter_of: Any) -> None:
    drafter = drafter_of("second")
    selector = drafter.model.candidate_selector
    predecessor, successor = selector.predecessor_codebook, selector.successor_codebook
    selector.predecessor_codebook, selector.successor_codebook = successor, predecessor
    assert path_errors("second", drafter) > 10
    assert q_gap("second", drafter) > 20 * TOLERANCE
    selector.predecessor_codebook, selector.successor_codebook = predecessor, successor
    assert path_errors("second", drafter) == 0
    true_walk = selector.walk

    def from_nothing(rows: Any, logits: Any, anchor: Any, choose: Any) -> Walk:
        return true_walk(rows, logits, mx.array([0]), choose)

    def always_the_anchor(rows: Any, logits: Any, anchor: Any, choose: Any) -> Walk:
        parts = [
            true_walk(rows[:, i : i + 1], logits[i : i + 1], anchor, choose)
            for i in range(logits.shape[0])
        ]
        return Walk(
            *(mx.concatenate(column) for column in list(zip(*parts, strict=True))[:3]), None
        )

    for wrong in (from_nothing, always_the_anchor):
        selector.walk = wrong
        assert path_errors("second", drafter) > 4, wrong
        assert q_gap("second", drafter) > 20 * TOLERANCE, wrong


def test_released_shape_of_a_block(drafter_of: Any) -> None:
    """Sliding layers that see the whole block, and drafts of fewer rows equal the first ones."""
    drafter = drafter_of("second")
    assert drafter.config.windows == (6,) * 3
    assert drafter.config.causal == (False,) * 3
    cache = drafter.make_cache()
    drafter.observe(mx.array(tiny.context_features(tiny.drafter_config(), 20))[None], cache)
    whole = drafter.propose(mx.array([9]), 4, None, cache)
    assert whole.tokens.dtype == mx.int32
    assert (whole.probs, whole.candidates) == (None, None)
    for n in (1, 2, 3):
        fewer = drafter.propose(mx.array([9]), n, None, cache)
        assert fewer.tokens.tolist() == whole.tokens.tolist()[:n]
        assert drafter._target.head_rows[-1] == n


def test_codebooks_and_convolutions_are_never_quantized(drafter_of: Any) -> None:
    drafter = drafter_of("second", bits=8, intermediate_size=64)
    names = {name for name, _ in tree_flatten(drafter.model.parameters())}
    assert {"fc.scales", "layers.2.self_attn.v_proj.scales"} <= names
    assert not [n for n in names if "scales" in n and ("conv" in n or "selector" in n)]
    assert "candidate_selector.predecessor_codebook" in names
    assert drafter.model.candidate_selector.hidden_projection.weight.dtype == mx.float32


@pytest.mark.parametrize("place", ["features", "selector"])
def test_nan_is_told(drafter_of: Any, place: str) -> None:
    drafter = drafter_of("second")
    features = mx.array(tiny.context_features(tiny.drafter_config(), 6))[None]
    if place == "features":
        features[0, 2, 5] = mx.nan
    else:
        drafter.model.candidate_selector.hidden_projection.weight[1, 1] = mx.nan
    cache = drafter.make_cache()
    drafter.observe(features, cache)
    sampling = DraftSampling(1.0, mx.random.key(0), lambda logits: logits)
    for settings in (None, sampling):
        assert drafter.propose(mx.array([9]), 3, settings, cache).healthy.item() is False


@pytest.mark.parametrize("variant", tiny.DFLASH2_VARIANTS)
def test_lossless_in_the_loop(tmp_path: Path, variant: str) -> None:
    target = tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=7)
    folder = write_drafter(tmp_path, tiny.drafter_config(variant), tiny.variant_seed(variant))
    drafter = open_drafter(folder, target, dtype=mx.float32)
    prompt, stats = tiny_prompt(48, 19), GenerationStats()
    session = Session(target, drafter, nullcontext, prefill_chunk=8)
    steps = list(session.run(prompt, SamplingParams(), 24, (), stats))
    assert [t for step in steps for t in step] == plain_greedy(target, prompt, 24)
    assert stats.cycles > 5
    assert stats.drafted > 20
    assert session.cache.length == session.draft_cache.length == len(prompt) + 23
