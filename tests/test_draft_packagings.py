"""Other packagings of a drafter give the drafts of the official one; what is not known is named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_drafter as tiny
from oracle import plain_greedy
from packagings import (
    KNOWN,
    MIXED,
    meta_config,
    meta_weights,
    official_weights,
    own_tables,
    reduced_tables,
    save,
    speculators_config,
)
from tiny import tiny_prompt, tiny_target
from tiny_drafter import BorrowedTarget

from dflash_mlx.decode.sampling import SamplingParams, probabilities
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import DraftSampling
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.config import parse_config
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.errors import CheckpointError, MismatchError

TOLERANCE = 1e-5
META_GOLDENS = mx.load(str(Path(__file__).parent / "goldens" / "drafters" / "meta.safetensors"))


def opened(folder: Path, target: Any = None, **kwargs: Any) -> DFlashDrafter:
    return open_drafter(folder, target or BorrowedTarget(), dtype=mx.float32, **kwargs)


def drafts(drafter: DFlashDrafter) -> mx.array:
    """Logits of three proposals, behind contexts shorter and longer than the window."""
    features = mx.array(tiny.context_features(tiny.drafter_config(), 20))[None]
    cache, start, out = drafter.make_cache(), 0, []
    for step, anchor in ((4, 9), (13, 30), (3, 2)):
        drafter.observe(features[:, start : start + step], cache)
        start += step
        out.append(drafter.draft_logits(mx.array([anchor]), tiny.BLOCK - 1, cache))
    return mx.stack(out)


def official(folder: Path, target: Any = None, **overrides: Any) -> mx.array:
    """Drafts of the same weights in the official packaging."""
    config = tiny.drafter_config(**overrides)
    return drafts(opened(save(folder, config, official_weights()), target))


def gap(first: mx.array, second: mx.array) -> float:
    return mx.abs(first - second).max().item()


class OwnTables(BorrowedTarget):
    """A target with the tables that `own_tables` gives to a drafter."""

    def __init__(self) -> None:
        super().__init__()
        tables = own_tables()
        self._embedding = mx.array(tables["embed_tokens.weight"])
        self._head = mx.array(tables["lm_head.weight"])


@pytest.mark.parametrize("brought", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_own_tables_are_used_instead_of_the_targets(tmp_path: Path, brought: Any) -> None:
    tables = {f"{name}.weight": own_tables()[f"{name}.weight"] for name in brought}
    config = tiny.drafter_config(draft_vocab_size=tiny.VOCAB)
    drafter = opened(save(tmp_path / "own", config, official_weights() | tables))
    like = OwnTables()
    borrowed = BorrowedTarget()
    if "embed_tokens" not in brought:
        like._embedding = borrowed._embedding
    if "lm_head" not in brought:
        like._head = borrowed._head
    assert gap(drafts(drafter), official(tmp_path / "a", like)) <= TOLERANCE
    assert gap(drafts(drafter), official(tmp_path / "b", borrowed)) > 1000 * TOLERANCE


def test_own_tables_are_quantized_with_the_rest(tmp_path: Path) -> None:
    config = tiny.drafter_config(intermediate_size=64)
    weights = tiny.drafter_weights(config, 8) | own_tables()
    drafter = opened(save(tmp_path, config, weights), bits=8, group_size=32)
    assert "scales" in drafter.model.lm_head
    assert "scales" in drafter.model.embed_tokens
    plain = opened(save(tmp_path, config, weights))
    assert 1e-4 < mx.abs(drafts(drafter) - drafts(plain)).mean().item() < 0.1


@pytest.fixture
def reduced(tmp_path: Path) -> DFlashDrafter:
    config = tiny.drafter_config(draft_vocab_size=len(KNOWN))
    return opened(save(tmp_path / "reduced", config, official_weights() | reduced_tables()))


def full_head() -> Any:
    target = BorrowedTarget()
    target._head = mx.array(own_tables()["lm_head.weight"])
    return target


def test_reduced_vocabulary_drafts_target_ids(tmp_path: Path, reduced: DFlashDrafter) -> None:
    assert reduced.head_rows is None  # its head knows no more tokens
    ours, whole = drafts(reduced), official(tmp_path / "a", full_head())
    known = mx.array(KNOWN)
    assert ours.shape == whole.shape
    assert gap(ours[..., known], whole[..., known]) <= TOLERANCE
    others = mx.array([i for i in range(tiny.VOCAB) if i not in KNOWN])
    assert (ours[..., others] == -mx.inf).all().item()
    cache = reduced.make_cache()
    reduced.observe(mx.array(tiny.context_features(tiny.drafter_config(), 9))[None], cache)
    proposal = reduced.propose(mx.array([9]), 4, None, cache)
    assert proposal.healthy.item() is True
    assert set(proposal.tokens.tolist()) <= set(KNOWN)
    logits = np.array(reduced.draft_logits(mx.array([9]), 4, cache))
    assert proposal.tokens.tolist() == logits.argmax(-1).tolist()


def test_reduced_vocabulary_draws_only_what_it_knows(reduced: DFlashDrafter) -> None:
    cache = reduced.make_cache()
    reduced.observe(mx.array(tiny.context_features(tiny.drafter_config(), 9))[None], cache)
    params = SamplingParams(temperature=1.5, top_p=0.95, min_p=0.01)
    for seed in range(20):
        sampling = DraftSampling(1.5, mx.random.key(seed), lambda x, _: probabilities(x, params))
        proposal = reduced.propose(mx.array([9]), 4, sampling, cache)
        assert set(proposal.tokens.tolist()) <= set(KNOWN)
        assert proposal.probs is not None
        assert proposal.probs.shape == (4, tiny.VOCAB)
        assert mx.abs(proposal.probs.sum(-1) - 1).max().item() < 1e-5


@pytest.mark.parametrize("kind", ["reduced", "speculators"])
def test_lossless_in_the_loop(tmp_path: Path, kind: str) -> None:
    target = tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=7)
    size = len(KNOWN)
    config = {
        "reduced": tiny.drafter_config(draft_vocab_size=size),
        "speculators": speculators_config(draft_vocab_size=size),
    }[kind]
    tables = reduced_tables() | {"embed_tokens.weight": own_tables()["embed_tokens.weight"]}
    drafter = opened(save(tmp_path, config, official_weights() | tables), target)
    prompt = tiny_prompt(48, 19)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)):
        stats = GenerationStats()
        steps = list(Session(target, drafter, nullcontext).run(prompt, params, 16, (), stats))
        text = [token for step in steps for token in step]
        assert len(text) == 16
        assert stats.drafted > 10
        if params.greedy:
            assert text == plain_greedy(target, prompt, 16)


BROKEN_VOCABULARY: dict[str, tuple[Any, str]] = {
    "no map": (lambda w: w.pop("d2t"), "14 out of 48 tokens, but no d2t"),
    "no head": (lambda w: w.pop("lm_head.weight"), "but no lm_head.weight"),
    "too short": (lambda w: w.update(d2t=w["d2t"][:-1]), "no list of 14 whole numbers"),
    "fractions": (lambda w: w.update(d2t=w["d2t"].astype(mx.float32)), "no list of 14 whole"),
    "too far": (lambda w: w.update(d2t=w["d2t"] + 1), "points outside the 48 tokens"),
    "below zero": (lambda w: w.update(d2t=w["d2t"] - 4), "points outside"),
    "twice": (lambda w: w.update(d2t=-mx.arange(14)), "two draft tokens the same meaning"),
    "t2d differs": (lambda w: w.update(d2t=mx.zeros_like(w["d2t"])), "contradicts its t2d"),
    "head of the whole": (
        lambda w: w.update({"lm_head.weight": own_tables()["lm_head.weight"]}),
        r"lm_head.weight .*\(48, 32\), its config.json asks for \(14, 32\)",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_VOCABULARY)
def test_broken_vocabulary_is_named(tmp_path: Path, kind: str) -> None:
    change, message = BROKEN_VOCABULARY[kind]
    weights: dict[str, Any] = official_weights() | reduced_tables()
    change(weights)
    folder = save(tmp_path, tiny.drafter_config(draft_vocab_size=14), weights)
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "same_as"),
    [
        ({}, {}),
        ({"sliding_window_non_causal": True}, {"is_causal": False}),
        ({"architectures": ["DFlashDraftModel"]}, {}),
    ],
)
def test_speculators_packaging(tmp_path: Path, changes: Any, same_as: Any) -> None:
    """Taps counted from the embedding on, layers inside, tables and leftovers of training."""
    training = {"verifier_norm.weight": np.ones(32, np.float32)}
    weights = official_weights() | own_tables() | training
    drafter = opened(save(tmp_path / "s", speculators_config(**changes), weights))
    assert drafter.taps == (1, 3, 6)
    wanted = official(tmp_path / "o", OwnTables(), **_sliding(MIXED), **same_as)
    assert gap(drafts(drafter), wanted) <= TOLERANCE
    other = {} if same_as else {"is_causal": False}
    wrong = official(tmp_path / "w", OwnTables(), **_sliding(MIXED), **other)
    assert gap(drafts(drafter), wrong) > 1000 * TOLERANCE


def test_speculators_top_level_wins_over_the_layers_config(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = speculators_config(layer_types=kinds, sliding_window=5)
    drafter = opened(save(tmp_path / "s", config, official_weights()))
    wanted = official(tmp_path / "o", **_sliding(kinds, 5))
    assert gap(drafts(drafter), wanted) <= TOLERANCE


def test_speculators_reduced_vocabulary(tmp_path: Path) -> None:
    config = speculators_config(draft_vocab_size=len(KNOWN))
    drafter = opened(save(tmp_path / "s", config, official_weights() | reduced_tables()))
    wanted = official(tmp_path / "o", full_head(), **_sliding(MIXED))
    known = mx.array(KNOWN)
    assert gap(drafts(drafter)[..., known], wanted[..., known]) <= TOLERANCE


def _sliding(kinds: list[str], window: int = 6) -> dict[str, Any]:
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def test_metas_packaging(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", meta_config(), meta_weights())
    every = _sliding(["sliding_attention"] * 3)
    wanted = official(tmp_path / "o", **every, is_causal=False)
    assert gap(drafts(opened(folder)), wanted) <= TOLERANCE
    assert gap(drafts(opened(folder)), official(tmp_path / "c", **every)) > 1000 * TOLERANCE
    # Without layer_types every layer slides, too.
    short = save(tmp_path / "m", meta_config(layer_types="absent"), meta_weights())
    assert gap(drafts(opened(short)), wanted) <= TOLERANCE


def test_metas_packaging_equals_its_class_in_transformers(tmp_path: Path) -> None:
    """Goldens of one proposal a context length; see tests/goldens/drafters/README.md."""
    drafter = opened(save(tmp_path, meta_config(), meta_weights()))
    features = mx.array(tiny.context_features(tiny.drafter_config(), 20))[None]
    for length in (3, 20):
        cache = drafter.make_cache()
        drafter.observe(features[:, :length], cache)
        logits = drafter.draft_logits(mx.array([9]), tiny.BLOCK - 1, cache)
        golden = META_GOLDENS[f"context_{length}"]
        assert mx.std(golden).item() >= 1.0
        assert gap(logits, golden) <= 1e-4


@pytest.mark.parametrize(
    ("nested", "same_as"),
    [
        ({"use_swa": True, "swa_window_size": 6}, {"is_causal": False}),
        ({"use_swa": True, "swa_window_size": 6, "causal": True}, {}),
        ({"use_swa": False, "swa_window_size": 6}, None),
    ],
)
def test_window_on_every_layer(tmp_path: Path, nested: Any, same_as: Any) -> None:
    """use_swa, as ModelOpt exports it: all layers slide, and see the whole block."""
    plain = tiny.drafter_config()
    full = ["full_attention"] * 3
    config = plain | {"dflash_config": plain["dflash_config"] | nested, "layer_types": full}
    drafter = opened(save(tmp_path / "n", config, official_weights()))
    every = _sliding(["sliding_attention"] * 3)
    layers = {} if same_as is None else every | same_as
    wrong = {"is_causal": None} | every if same_as is None else {}
    assert gap(drafts(drafter), official(tmp_path / "o", **layers)) <= TOLERANCE
    assert gap(drafts(drafter), official(tmp_path / "w", **wrong)) > 1000 * TOLERANCE


def test_window_size_of_the_layers_that_slide(tmp_path: Path) -> None:
    plain = tiny.drafter_config()
    nested = plain["dflash_config"] | {"use_swa": True, "swa_window_size": 5}
    config = plain | {"layer_types": MIXED, "dflash_config": nested}
    drafter = opened(save(tmp_path / "n", config, official_weights()))
    assert gap(drafts(drafter), official(tmp_path / "o", **_sliding(MIXED, 5))) <= TOLERANCE


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "anchor row": (speculators_config(sample_from_anchor=True), "sample_from_anchor = True"),
    "embedding tapped": (
        speculators_config(aux_hidden_state_layer_ids=[0, 4]),
        "aux_hidden_state_layer_ids is 0",
    ),
    "no taps": (
        speculators_config(aux_hidden_state_layer_ids=None),
        "has no aux_hidden_state_layer_ids",
    ),
    "order unknown": (
        speculators_config(sliding_window_non_causal="absent"),
        "no sliding_window_non_causal",
    ),
    "other width": (speculators_config(target_hidden_size=64), "target_hidden_size = 64"),
    "projector": (speculators_config(projector_type="domino"), "projector_type = 'domino'"),
    "shifted labels": (speculators_config(shift_label=True), "shift_label = True"),
    "layers": (speculators_config(transformer_layer_config=[1]), "transformer_layer_config is"),
    "unknown key": (speculators_config(markov_rank=256), "markov_rank = 256"),
    "experts": (speculators_config(num_experts=8), "num_experts = 8"),
    "draft vocabulary of Meta's": (meta_config(draft_vocab_size=9), "draft_vocab_size = 9"),
    "draft vocabulary of DFlash 2": (
        tiny.drafter_config("second", draft_vocab_size=9),
        "draft_vocab_size = 9",
    ),
    "sinks": (tiny.drafter_config(add_swa_attention_sink_bias=True), "attention_sink_bias = True"),
    "Laguna": (
        tiny.drafter_config(architectures=["LagunaDFlashModel"]),
        "architecture LagunaDFlashModel is not supported",
    ),
    "groups": (
        tiny.drafter_config("second", dflash_config=None, target_layer_ids=[1], block_size=4,
            mask_token_id=1, conv_kernel_size=2, conv_group_size=7, selector_rank=4,
            selector_top_k=2),
        "conv_group_size is 7, not a divisor of hidden_size 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_CONFIGS)
def test_refused_by_name(kind: str) -> None:
    config, message = REFUSED_CONFIGS[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(config)
    assert "; " in caught.value.args[0], "what to do is missing"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("mask_embedding", "mask embedding of its own"),
        ("encoder.fc.weight", "Meta's assistant packaging"),
        ("d2t", "reduced draft vocabulary"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
        ("layers.0.self_attn.g_proj.weight", "Laguna's attention gates"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna's fused projections"),
        ("aux_hidden_norms.0.weight", "Laguna's norms of taps"),
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
    ],
)
def test_tensors_of_other_drafters_are_named(tmp_path: Path, tensor: str, message: str) -> None:
    folder = save(tmp_path, tiny.drafter_config(), official_weights() | {tensor: mx.zeros((3,))})
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


def test_dflash2_without_its_selector_is_named(tmp_path: Path) -> None:
    weights = official_weights()
    folder = save(tmp_path, tiny.drafter_config("second"), weights)
    with pytest.raises(CheckpointError, match=r"lacks candidate_selector\.hidden_projection"):
        opened(folder)


def test_metas_drafter_must_fit_the_width(tmp_path: Path) -> None:
    folder = save(tmp_path, meta_config(), meta_weights())
    with pytest.raises(MismatchError, match="width 32"):
        opened(folder, BorrowedTarget(hidden=40))
    # It states no vocabulary of its own, so any target's will do.
    assert opened(folder, BorrowedTarget(vocab=50)).config.vocab_size == 50
