"""Drafting with some rows of the head: the same logits, the same text, the same distribution."""

from __future__ import annotations

import json
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_drafter as tiny
from oracle import OracleDrafter, plain_features, plain_greedy
from paced import paced
from tiny import tiny_prompt, tiny_target
from tiny_drafter import drafter_config, write_drafter

from dflash_mlx.decode import words as reduced_words
from dflash_mlx.decode.accept import accept_sampled
from dflash_mlx.decode.costs import Costs, HeadCost, Measured
from dflash_mlx.decode.sampling import SamplingParams, probabilities
from dflash_mlx.decode.words import Words
from dflash_mlx.draft.base import DraftSampling, Proposal, ReducedHead
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.head import ORDER_FILE, FrequentRows, token_order
from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.rows import take_rows

VOCAB = tiny.VOCAB
SETTINGS = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3)
#: a reduced head makes cycles cheap, the whole one does not
COSTS = Costs((Measured(64, 1.0, {1: 1.6, 7: 1.7}, 0.6),), HeadCost(100, 8, {1: 0.5, 7: 0.55}))


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=7)


@pytest.fixture
def drafter_of(target, tmp_path):
    def opened(variant: str, bits: int | None = None, order=None, own_head: bool = False):
        config = drafter_config(variant, intermediate_size=64)
        folder = write_drafter(tmp_path / variant, config, tiny.variant_seed(variant))
        if own_head:
            weights = tiny.drafter_weights(config, tiny.variant_seed(variant))
            weights["lm_head.weight"] = np.random.default_rng(3).standard_normal((VOCAB, 32))
            arrays = {name: mx.array(w.astype(np.float32)) for name, w in weights.items()}
            mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        if order is not None:
            (folder / ORDER_FILE).write_text(json.dumps({"order": order}))
        return open_drafter(folder, target, dtype=mx.float32, bits=bits, group_size=32)

    return opened


def cache_of(drafter):
    cache = drafter.make_cache()
    drafter.observe(mx.array(tiny.context_features(drafter_config(), 9))[None], cache)
    return cache


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_rows_of_linear_layers_and_tables_are_the_whole_ones(bits) -> None:
    ids, x = mx.array([5, 0, 33]), mx.random.normal((2, 32), key=mx.random.key(1))
    linear, table = nn.Linear(32, 40, bias=True), nn.Embedding(40, 32)
    if bits is not None:
        linear, table = (m.to_quantized(32, bits) for m in (linear, table))
    assert mx.allclose(take_rows(linear, ids)(x), linear(x)[:, ids], atol=1e-6)
    part = take_rows(table, ids)
    assert mx.allclose(part.as_linear(x), table.as_linear(x)[:, ids], atol=1e-6)
    assert part.weight.shape[0] == 3
    assert table.weight.shape[0] == 40


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_a_targets_head_of_some_tokens(family, tied) -> None:
    target = tiny_target(family, tie_word_embeddings=tied)
    rows = mx.random.normal((3, target.hidden_size), key=mx.random.key(0))
    ids = mx.array([7, 2, 30])
    assert mx.allclose(target.head_of(ids)(rows), target.head(rows)[:, ids], atol=1e-6)


def test_the_order_of_tokens_is_the_drafters_file_or_their_own(tmp_path) -> None:
    assert token_order(tmp_path, 5).tolist() == [0, 1, 2, 3, 4]
    file = tmp_path / ORDER_FILE
    file.write_text('{"order": [3, 1]}')
    assert token_order(tmp_path, 5).tolist() == [3, 1, 0, 2, 4]
    for text in (
        "{",
        "[]",
        '{"order": 3}',
        '{"order": [1, 1]}',
        '{"order": [1, 5]}',
        '{"order": [-1]}',
        "[" * 100_000,
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{ORDER_FILE} .*; remove it, or fetch"):
            token_order(tmp_path, 5)


def test_heads_know_frequent_tokens_and_the_texts(drafter_of) -> None:
    order = list(range(VOCAB - 1, -1, -1))
    rows = drafter_of("full", order=order).head_rows
    head = rows.reduced(4, [0, 9])
    assert (head.ids.tolist(), head.rows, head.others) == ([47, 46, 45, 44, 0, 9], 4, 2)
    assert rows.reduced(4).parts[0] is head.parts[0]  # gathered once


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("own_head", [True, False])
def test_greedy_drafts_are_the_best_of_the_known_tokens(drafter_of, own_head, bits) -> None:
    drafter = drafter_of("full", bits, own_head=own_head)
    assert ("lm_head" in drafter.model) == own_head
    cache, anchor = cache_of(drafter), mx.array([9])
    logits = np.array(drafter.draft_logits(anchor, 4, cache))
    wanted = set(logits.argmax(axis=-1))
    head = drafter.head_rows.reduced(8, [t for t in (40, 17, 31, 25) if t not in wanted])
    known = np.array(head.ids)
    best = known[logits[:, known].argmax(axis=-1)]
    assert drafter.propose(anchor, 4, None, cache, head).tokens.tolist() == best.tolist()
    assert (best != logits.argmax(axis=-1)).any()  # the whole head would draft something else
    everything = drafter.head_rows.reduced(VOCAB)
    whole = drafter.propose(anchor, 4, None, cache)
    assert (
        drafter.propose(anchor, 4, None, cache, everything).tokens.tolist() == whole.tokens.tolist()
    )


def test_sampled_drafts_have_the_filters_distribution_over_the_known_tokens(drafter_of) -> None:
    drafter = drafter_of("full")
    cache, anchor = cache_of(drafter), mx.array([9])
    head = drafter.head_rows.reduced(12, [40, 17, 31])

    def filtered(logits, ids):
        assert ids is head.ids
        return probabilities(logits, SETTINGS)

    sampling = DraftSampling(0.8, mx.random.key(3), filtered)
    proposal = drafter.propose(anchor, 4, sampling, cache, head)
    logits = mx.take(drafter.draft_logits(anchor, 4, cache), head.ids, axis=-1)
    assert mx.allclose(proposal.probs, probabilities(logits, SETTINGS), atol=1e-5)
    assert proposal.candidates.tolist() == [head.ids.tolist()] * 4
    assert set(proposal.tokens.tolist()) <= set(head.ids.tolist())


@pytest.mark.parametrize("sampled", [False, True])
def test_dflash_2_selects_among_the_known_tokens(drafter_of, sampled) -> None:
    """As with the whole head whose other logits are minus infinity."""
    drafter = drafter_of("second")
    cache, anchor = cache_of(drafter), mx.array([9])
    head = drafter.head_rows.reduced(20, [40, 41])
    sampling = DraftSampling(0.8, mx.random.key(3), lambda x, _: x) if sampled else None
    proposal = drafter.propose(anchor, 4, sampling, cache, head)
    rows = drafter._rows(anchor, 4, cache)
    spread = mx.full((4, VOCAB), -1e30)
    spread[:, head.ids] = mx.take(drafter._logits(rows), head.ids, axis=-1)
    selector = drafter.model.candidate_selector
    expected = selector.propose(rows, spread, anchor, sampling)
    if not sampled:
        assert proposal.tokens.tolist() == expected.tokens.tolist()
        return
    assert set(np.array(proposal.candidates).ravel()) <= set(head.ids.tolist())

    def by_token(found: Proposal) -> list[tuple[int, float]]:
        first = zip(found.candidates[0].tolist(), found.probs[0].tolist(), strict=True)
        return sorted(first)

    ours, theirs = by_token(proposal), by_token(expected)
    assert [t for t, _ in ours] == [t for t, _ in theirs]
    assert np.allclose([p for _, p in ours], [p for _, p in theirs], atol=1e-5)


def test_a_nan_in_the_known_rows_is_seen(drafter_of) -> None:
    drafter = drafter_of("full")
    drafter.model.norm.weight[3] = mx.nan
    head = drafter.head_rows.reduced(12)
    proposal = drafter.propose(mx.array([9]), 3, None, cache_of(drafter), head)
    assert not proposal.healthy.item()


def test_emitted_tokens_have_the_targets_distribution() -> None:
    """q lives on four of eight tokens; what it lacks comes out of the residual."""
    source = np.random.default_rng(4)
    p = source.dirichlet(np.ones(8), 2).astype(np.float32)
    q, ids = source.dirichlet(np.ones(4)).astype(np.float32), mx.array([6, 1, 3, 4], mx.int32)
    probs, table, draws = mx.array(p), mx.array(q)[None], 20000

    def first(key: mx.array) -> mx.array:
        drawn, judged = mx.random.split(key)
        tokens = mx.take(ids, mx.random.categorical(mx.log(table), key=drawn))
        proposal = Proposal(tokens, table, mx.array(True), ids[None])
        return accept_sampled(proposal, probs, judged).tokens[0]

    tokens = np.array(mx.vmap(first)(mx.random.split(mx.random.key(0), draws)))
    counts = np.bincount(tokens, minlength=8)
    statistic = ((counts - p[0] * draws) ** 2 / (p[0] * draws)).sum()
    assert statistic < 24.32  # 0.1 % point of 7 degrees of freedom


def test_words_count_what_each_size_of_head_would_have_known(monkeypatch) -> None:
    monkeypatch.setattr(reduced_words, "SIZES", (2, 4, 8))
    words = Words(np.array([5, 4, 3, 2, 1, 0, 6, 7]))
    assert words.sizes == (2, 4)  # at most half
    words.read([6, 5, 6])
    assert [words.knows(token, 2) for token in (5, 4, 6, 3)] == [True, True, True, False]
    assert words.knows(3, 4)
    assert words.knows(7, None)
    before = words.covered(2), words.covered(4)
    words.met([3])  # unknown to two rows, known to four
    assert words.covered(2) < before[0]
    assert words.covered(4) > before[1]
    assert words.knows(3, 2)  # it is part of the text now
    assert words.others(2) == [6, 3]
    assert words.others(4) == [6]


class KnowingOracle(OracleDrafter):
    """The true continuation, as far as its head knows it."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.head_rows = FrequentRows(lambda ids: lambda rows: rows, np.arange(self.vocab_size))
        self.heads: list[ReducedHead | None] = []

    def propose(self, anchor, n, sampling, cache, head=None):
        self.heads.append(head)
        proposal = super().propose(anchor, n, sampling, cache)
        if head is None:
            return proposal
        known = set(head.ids.tolist())
        tokens = [t if t in known else 0 for t in proposal.tokens.tolist()]
        return Proposal(mx.array(tokens, mx.int32), None, proposal.healthy)


@cache
def brute_force():
    """(target, prompt, its continuation, features of both)."""
    target = tiny_target("llama")
    prompt = tiny_prompt(target.vocab_size, 9)
    truth = plain_greedy(target, prompt, 50)
    return target, prompt, truth, plain_features(target, prompt + truth, (0, 2))


def run(costs: Costs):
    target, prompt, truth, features = brute_force()
    drafter = KnowingOracle(
        len(prompt), truth, vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        block_size=8, taps=(0, 2), plan=[7], check_growth=False,
        features=features,
    )  # fmt: skip
    _, tokens, stats, trace = paced(target, drafter, prompt, costs, len(truth))
    return prompt, truth, tokens, stats, drafter, trace


def test_text_is_brute_forces_and_the_choice_is_told(row_invariant_blas, monkeypatch) -> None:
    monkeypatch.setattr(reduced_words, "SIZES", (8, 16))
    prompt, truth, tokens, stats, drafter, trace = run(COSTS)
    assert tokens == truth
    assert 0 < stats.reduced_cycles == sum(line["rows"] is not None for line in trace)
    assert stats.reduced_cycles == sum(head is not None for head in drafter.heads)
    for line in trace:
        assert (line["covered"] is None) == (line["rows"] is None)
    # Every head knows the prompt and what was emitted before it was made.
    for head, line in zip(drafter.heads, [t for t in trace if t["drafts"]], strict=True):
        if head is not None:
            text = (prompt + truth)[: line["context"]]
            assert set(text) <= set(head.ids.tolist())
            assert len(set(head.ids.tolist())) == head.ids.shape[0]
    # Its refusals are tokens it did not know, which says nothing of the drafter.
    assert trace[-1]["chances"][0] > 0.9


def test_where_it_saves_nothing_the_head_stays_whole(row_invariant_blas, monkeypatch) -> None:
    monkeypatch.setattr(reduced_words, "SIZES", (8, 16))
    for costs in (Costs(COSTS.measured), Costs(COSTS.measured, HeadCost(100, 8, {1: 0.0, 7: 0.0}))):
        _, truth, tokens, stats, drafter, _ = run(costs)
        assert tokens == truth
        assert stats.cycles > 0
        assert stats.reduced_cycles == 0
        assert set(drafter.heads) == {None}
