"""Every family is lossless: plain greedy text for every accept length, window and chunk edges.

A family joins by its name in FAMILIES; test_decode.py has llama and qwen3 (DENSE here), and holds
the loop itself to more than this.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
from oracle import OracleDrafter, checked_greedy, plain_forward
from tiny import tiny_prompt, tiny_target

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats

FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_next", "gemma4_shared"]
# Their attention and caches are those of one above, beside experts.
ALIKE = ["qwen3_5_moe", "gemma4_moe"]
DENSE = ["llama", "qwen3"]
TAPS = (0, 2)
CHUNK = 16
TOKENS = {"all": 24, "none": 12, "mixed": 24, "one": 16}
# Shorter than a window of 8, about a chunk, and longer than both together.
LENGTHS = [1, 7, CHUNK, 2 * CHUNK + 9]
PLANS = {"all": [99], "none": [0], "mixed": [0, 99, 2, 5, 1, 99, 99, 0, 3], "one": [1]}
# One draft of two is "all", and "mixed" reaches every count of up to 6.
RUNS = [(plan, block) for plan in ("all", "mixed") for block in (2, 7, 16)]
RUNS += [("none", 2), ("none", 16), ("one", 16)]
CASES = [(name, *run, length) for name in FAMILIES for run in RUNS for length in LENGTHS]
CASES += [
    (name, "mixed", block, n) for name in ALIKE for block in (7, 16) for n in (7, LENGTHS[-1])
]


class Text:
    """A prompt, its greedy continuation and the true features of both."""

    def __init__(self, target, length: int, taps: tuple[int, ...] = TAPS) -> None:
        self.taps = taps
        self.prompt = tiny_prompt(target.vocab_size, length)
        self.truth = checked_greedy(target, self.prompt, max(TOKENS.values()))
        _, self.features = plain_forward(target, self.prompt + self.truth, taps)


@cache
def family(name: str):
    return tiny_target(name)


@cache
def text_of(name: str, length: int) -> Text:
    return Text(family(name), length)


def expected_cycles(plan: list[int], block: int, n: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each cycle of a loop that keeps what the plan accepts and one more."""
    left, cycles = n - 1, []
    while left > 1:
        drafts = min(block - 1, left - 1)
        cycles.append((drafts, min(plan[len(cycles) % len(plan)], drafts)))
        left -= cycles[-1][1] + 1
    return cycles


def oracle(target, text: Text, block: int, plan: str) -> OracleDrafter:
    return OracleDrafter(
        len(text.prompt),
        text.truth[: TOKENS[plan]],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        block_size=block,
        taps=text.taps,
        plan=PLANS[plan],
        features=text.features,
    )


def decode(session: Session, prompt: list[int], n: int) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    steps = list(session.run(prompt, SamplingParams(), n, (), stats))
    return [token for step in steps for token in step], stats


@pytest.mark.parametrize(("name", "plan", "block", "length"), CASES)
def test_drafts_never_change_the_text(name: str, plan: str, block: int, length: int) -> None:
    target, text = family(name), text_of(name, length)
    drafter = oracle(target, text, block, plan)
    session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
    tokens, stats = decode(session, text.prompt, TOKENS[plan])
    assert tokens == text.truth[: TOKENS[plan]]
    cycles = expected_cycles(PLANS[plan], block, TOKENS[plan])
    assert stats.cycles == len(cycles) == drafter.proposes > 0
    assert stats.drafted == sum(drafted for drafted, _ in cycles)
    assert stats.accepted == sum(kept for _, kept in cycles) == drafter.planned_accepts
    assert session.ids == text.prompt + tokens[:-1]
    assert session.cache.length == session.draft_cache.length == len(session.ids)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_decoding_gives_the_same_text(name: str, length: int) -> None:
    target, text = family(name), text_of(name, length)
    session = Session(target, None, nullcontext, prefill_chunk=CHUNK)
    tokens, stats = decode(session, text.prompt, 16)
    assert tokens == text.truth[:16]
    assert stats.cycles == 0


def test_families_run_side_by_side_with_drafters_of_different_taps() -> None:
    """Two sequences on each target, step by step in turn: nothing of one is seen by another."""
    runs = []
    for name in FAMILIES + ALIKE + DENSE:
        target = family(name)
        for taps, block, length in (((0, 2), 7, 20), ((3, 1, 0), 4, 9)):
            text = Text(target, length, taps)
            drafter = oracle(target, text, block, "mixed")
            session = Session(target, drafter, nullcontext, prefill_chunk=CHUNK)
            stats = GenerationStats()
            steps = session.run(text.prompt, SamplingParams(), TOKENS["mixed"], (), stats)
            runs.append((text, drafter, stats, steps, []))
    for turn in range(TOKENS["mixed"]):
        for _, _, _, steps, tokens in runs[:: 1 if turn % 2 else -1]:
            tokens += next(steps, [])
    for text, drafter, stats, steps, tokens in runs:
        assert next(steps, None) is None
        assert tokens == text.truth
        assert stats.accepted == drafter.planned_accepts > 0
