"""The decode loop is lossless: brute-force greedy text for every accept length, with counts."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from oracle import OracleDrafter, checked_greedy, plain_features, plain_greedy
from tiny import tiny_prompt, tiny_target

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import NEVER_AGREED_CYCLES, Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Proposal

TAPS = (0, 2)
CHUNK = 16
pytestmark = pytest.mark.usefixtures("row_invariant_blas")

PLANS = {
    "all": [99],
    "none": [0],
    "mixed": [0, 99, 2, 5, 1, 99, 99, 0, 3],
    "one": [1],
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request):
    return tiny_target(request.param, num_hidden_layers=3)


@pytest.fixture(scope="module")
def texts(target):
    """Brute-force continuations of up to 40 tokens by prompt length, each computed once."""

    @cache
    def whole(length: int) -> tuple[list[int], list[int]]:
        prompt = tiny_prompt(target.vocab_size, length)
        return prompt, checked_greedy(target, prompt, 40)

    def text(length: int, n: int) -> tuple[list[int], list[int]]:
        prompt, continuation = whole(length)
        return prompt, continuation[:n]

    return text


@pytest.fixture(scope="module")
def true_features(target, texts):
    """Those of a prompt and its continuation, by prompt length."""
    return cache(lambda length: plain_features(target, [*chain(*texts(length, 40))], TAPS))


def oracle(target, prompt, continuation, block, plan, **kwargs):
    return OracleDrafter(
        len(prompt),
        continuation,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        block_size=block,
        taps=TAPS,
        plan=plan,
        **kwargs,
    )


def decode(session, prompt, n, ends=(), params=None):
    stats = GenerationStats()
    steps = list(session.run(prompt, params or SamplingParams(), n, ends, stats))
    return [t for step in steps for t in step], stats, steps


def expected_cycles(plan, block, n):
    """(emitted by cycle) of a decoder that keeps one token more than the plan accepts."""
    left, cycles = n - 1, []
    while left > 1:
        drafts = min(block - 1, left - 1)
        cycles.append((drafts, min(plan[len(cycles) % len(plan)], drafts)))
        left -= cycles[-1][1] + 1
    return cycles


def tokens_of(plan, block):
    """As many as show every count of accepted drafts that the plan leads to, twice if it can."""
    if plan == "mixed":
        return {2: 20, 3: 26}.get(block, 40)
    return {"all": 40 if block == 16 else 24, "none": 14, "one": 18}[plan]


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("block", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("plan", PLANS)
def test_lossless_matrix(target, texts, true_features, plan, block, length):
    n = tokens_of(plan, block)
    prompt, truth = texts(length, n)
    features = true_features(length)
    drafter = oracle(target, prompt, truth, block, PLANS[plan], features=features)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    tokens, stats, _ = decode(session, prompt, n)
    assert tokens == truth
    cycles = expected_cycles(PLANS[plan], block, n)
    assert stats.cycles == len(cycles) == drafter.proposes > 0
    assert stats.drafted == sum(d for d, _ in cycles)
    assert stats.accepted == sum(a for _, a in cycles) == drafter.planned_accepts
    histogram = [sum(a == k for _, a in cycles) for k in range(block)]
    assert stats.accept_histogram == histogram
    assert stats.cycle_tokens == stats.accepted + stats.cycles
    assert stats.generation_tokens == n
    assert stats.finish_reason == "length"
    # Every token but the last one is committed, in target and drafter alike.
    assert session.ids == prompt + truth[:-1]
    assert session.cache.length == session.draft_cache.length == len(session.ids)


def test_plain_equals_brute_force(target, texts):
    prompt, truth = texts(2 * CHUNK + 3, 40)
    session = Session(target, None, nullcontext, prefill_chunk=CHUNK)
    tokens, stats, steps = decode(session, prompt, 40)
    assert tokens == truth
    assert all(len(step) == 1 for step in steps)
    assert (stats.cycles, stats.drafted, stats.accepted) == (0, 0, 0)
    assert stats.tokens_per_cycle is None
    assert session.ids == prompt + truth[:-1]


@pytest.mark.parametrize("n", range(1, 12))
def test_max_tokens_is_exact(target, texts, n):
    prompt, truth = texts(5, 40)
    for drafter in (None, oracle(target, prompt, truth, 8, [99])):
        tokens, stats, _ = decode(Session(target, drafter, nullcontext), prompt, n)
        assert tokens == truth[:n]
        assert stats.generation_tokens == n


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("at", range(9))
def test_end_token_ends_everything(target, texts, plan, at):
    """Nothing is emitted, counted or cached behind the first end token, wherever it stands."""
    prompt, truth = texts(7, 40)
    end = truth[at]
    first = truth.index(end)
    for drafter in (None, oracle(target, prompt, truth, 8, PLANS[plan])):
        session = Session(target, drafter, nullcontext)
        tokens, stats, _ = decode(session, prompt, 40, ends={end, 10**6})
        assert tokens == truth[: first + 1]
        assert stats.finish_reason == "stop"
        assert stats.generation_tokens == first + 1
        assert stats.cycle_tokens == (first if drafter else 0)
        assert stats.accepted <= first
        assert session.ids == prompt + truth[:first]
        assert session.cache.length == len(session.ids)
        if drafter:
            assert session.draft_cache.length == len(session.ids)


def test_second_turn_feeds_only_new_tokens(target, texts):
    prompt, truth = texts(20, 40)
    drafter = oracle(target, prompt, truth, 8, [2], check_growth=False)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    decode(session, prompt, 12)
    fed = []
    run = target.forward
    longer = prompt + truth[:12]
    session.target = type("Counting", (), {"__getattr__": lambda s, k: getattr(target, k)})()
    session.target.forward = lambda segments, taps=(): (
        fed.append(segments[0].rows),
        run(segments, taps),
    )[1]
    tokens, stats, _ = decode(session, longer, 10)
    assert tokens == truth[12:22]
    assert stats.cached_tokens == len(longer) - 1
    assert stats.prompt_tokens == len(longer)
    assert fed[0] == 1  # only the last token of the first answer was new


def test_changed_history_is_rewound(target, texts):
    prompt, truth = texts(20, 40)
    session = Session(
        target, oracle(target, prompt, truth, 8, [2], check_growth=False), nullcontext
    )
    decode(session, prompt, 12)
    other = prompt[:15] + tiny_prompt(target.vocab_size, 9, seed=5)
    wanted = plain_greedy(target, other, 8)
    session.drafter = oracle(target, other, wanted, 8, [1])
    tokens, stats, _ = decode(session, other, 8)
    assert tokens == wanted
    assert stats.cached_tokens == 15


def test_history_that_no_cache_can_rewind_to_starts_afresh(target, texts):
    """A drafter's window has lost the rows: both caches begin anew, and the text is right."""
    prompt, truth = texts(30, 40)
    drafter = oracle(target, prompt, truth, 8, [2], check_growth=False)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    decode(session, prompt, 20)
    session.draft_cache.rewind = lambda length: False
    other = [*prompt[:10], 1, 2, 3]
    wanted = plain_greedy(target, other, 12)
    session.drafter = oracle(target, other, wanted, 8, [1], check_growth=False)
    tokens, stats, _ = decode(session, other, 12)
    assert tokens == wanted
    assert stats.cached_tokens == 0
    assert session.cache.length == session.draft_cache.length == len(session.ids)


def test_closing_the_run_keeps_the_sequence_usable(target, texts):
    prompt, truth = texts(20, 40)
    for drafter in (None, oracle(target, prompt, truth, 8, [2], check_growth=False)):
        session = Session(target, drafter, nullcontext)
        stats = GenerationStats()
        run = session.run(prompt, SamplingParams(), 40, (), stats)
        got = [t for _, step in zip(range(3), run, strict=False) for t in step]
        run.close()
        assert stats.finish_reason == "abandoned"
        assert got == truth[: len(got)]
        assert session.ids == prompt + got[:-1]
        assert session.cache.pending == 0
        tokens, _, _ = decode(session, prompt + got, 6)
        assert tokens == truth[len(got) : len(got) + 6]


class NaNDrafter(OracleDrafter):
    """Proposes garbage ids with NaN scores from the given cycle on."""

    sick_from = 2

    def propose(self, anchor, n, sampling, cache, head=None):
        proposal = super().propose(anchor, n, sampling, cache)
        if self.proposes <= self.sick_from:
            return proposal
        probs = None if sampling is None else mx.full((n, self.vocab_size), mx.nan)
        return Proposal(mx.full((n,), -(2**31), mx.int32), probs, mx.array(False))


def test_nan_drafter_costs_a_warning_not_the_text(target, texts):
    prompt, truth = texts(20, 40)
    drafter = NaNDrafter(
        20, truth, vocab_size=96, hidden_size=48, block_size=8, taps=TAPS, plan=[3]
    )
    tokens, stats, _ = decode(Session(target, drafter, nullcontext), prompt, 40)
    assert tokens == truth
    assert stats.cycles == 3
    assert stats.accepted == 6
    assert [w for w in stats.warnings if "NaN" in w]


def test_conversation_goes_on_plainly_behind_a_nan(target, texts):
    prompt, truth = texts(20, 40)
    drafter = NaNDrafter(
        20, truth, vocab_size=96, hidden_size=48, block_size=8, taps=TAPS, plan=[3]
    )
    session = Session(target, drafter, nullcontext)
    decode(session, prompt, 20)
    tokens, stats, _ = decode(session, prompt + truth[:20], 10)
    assert tokens == truth[20:30]
    assert (stats.engine, stats.cycles) == ("plain", 0)
    assert "NaN" in stats.engine_reason
    session.reset()  # as a failed rewind does
    assert session.draft_cache is None


def test_drafter_that_never_agrees_is_named(target, texts):
    prompt, _ = texts(20, 40)
    n = NEVER_AGREED_CYCLES + 4
    truth, _, _ = decode(Session(target, None, nullcontext), prompt, n)
    session = Session(target, oracle(target, prompt, truth, 3, [0]), nullcontext)
    stats = GenerationStats()
    warned = []
    for _ in session.run(prompt, SamplingParams(), n, (), stats):
        warned.append((stats.cycles, any("not agreed" in w for w in stats.warnings)))
    assert warned == [(c, c >= NEVER_AGREED_CYCLES) for c, _ in warned]
    assert stats.cycles > NEVER_AGREED_CYCLES


def test_penalty_history_is_position_by_position(target):
    """Greedy with a strong penalty equals a loop that penalises what each position has seen."""
    penalty, n = 1.8, 30
    prompt = tiny_prompt(target.vocab_size, 9, seed=3)

    def penalised_greedy() -> list[int]:
        from oracle import plain_logits

        ids = list(prompt)
        for _ in range(n):
            row = plain_logits(target, ids)[-1].astype(np.float64)
            seen = np.isin(np.arange(len(row)), ids)
            row = np.where(seen, np.where(row > 0, row / penalty, row * penalty), row)
            ids.append(int(row.argmax()))
        return ids[len(prompt) :]

    truth = penalised_greedy()
    assert truth != plain_greedy(target, prompt, n)
    params = SamplingParams(repetition_penalty=penalty)
    for plan in (None, [99], [0, 4, 1]):
        drafter = oracle(target, prompt, truth, 8, plan) if plan else None
        tokens, stats, _ = decode(Session(target, drafter, nullcontext), prompt, n, params=params)
        assert tokens == truth
        if plan:
            assert stats.accepted == drafter.planned_accepts > 0


def test_seeds(target):
    prompt = tiny_prompt(target.vocab_size, 9)

    def text(**settings) -> list[int]:
        session = Session(target, None, nullcontext)
        return decode(session, prompt, 16, params=SamplingParams(temperature=1.5, **settings))[0]

    assert text(seed=1) == text(seed=1)
    assert len({tuple(text(seed=s)) for s in (1, 2, 3)}) == 3
    assert text() != text()


def test_memory_is_bounded_by_the_context(target):
    """Cycles leave caches as large as one prefill of the same length does."""
    n, prompt = 50, tiny_prompt(target.vocab_size, 230)
    truth, _, _ = decode(Session(target, None, nullcontext), prompt, n)
    drafter = oracle(target, prompt, truth, 3, [0, 1])
    session = Session(target, drafter, nullcontext)
    _, stats, _ = decode(session, prompt, n)
    assert stats.accepted == drafter.planned_accepts  # as many in the last cycles as in the first
    fresh = Session(target, None, nullcontext)
    decode(fresh, prompt + truth, 1)
    assert session.nbytes <= fresh.nbytes
    layer = session.cache[0].keys
    assert 256 < layer.shape[2] <= 512  # it has grown once
    assert session.nbytes == 2 * target.num_layers * layer.nbytes


def test_long_prompt_is_prefilled_in_chunks(target):
    """No forward of prefill is longer than a chunk, and the drafter observes every chunk."""
    prompt = tiny_prompt(target.vocab_size, 5 * CHUNK + 1)
    truth = plain_greedy(target, prompt, 4)
    drafter = oracle(target, prompt, truth, 4, [1])
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    rows, observed = [], []
    run, observe = target.forward, drafter.observe
    session.target = type("Counting", (), {"__getattr__": lambda s, k: getattr(target, k)})()
    session.target.forward = lambda segments, taps=(): (
        rows.append(segments[0].rows),
        run(segments, taps),
    )[1]
    drafter.observe = lambda features, cache: (
        observed.append(features.shape[1]),
        observe(features, cache),
    )[1]
    decode(session, prompt, 4)
    assert rows[:6] == [CHUNK] * 5 + [1]
    assert observed[:6] == rows[:6]
