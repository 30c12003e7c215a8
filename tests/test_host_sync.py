"""A cycle waits for the device once, and the next step is under way before its text is shown.

Every way from an array to the host is counted, wherever it is called.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_prompt, tiny_target
from tiny_drafter import BLOCK, drafter_config, write_drafter

from dflash_mlx.decode import step
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Proposal
from dflash_mlx.draft.checkpoint import open_drafter

N = 30
FROM_NUMPY = (np.array, np.asarray)  # by the buffer protocol, which cannot be watched at the array
# Rows of an iterated array and its length are lazy; nothing here waits for them.
TO_HOST = (
    "tolist", "item", "__array__", "__bool__", "__int__", "__index__", "__float__", "__repr__",
    "__dlpack__", "__bytes__", "__complex__",
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", vocab_size=48, hidden_size=32, num_hidden_layers=7)


@pytest.fixture(scope="module", params=["full", "second"])
def drafter(request, target, tmp_path_factory):
    folder = write_drafter(tmp_path_factory.mktemp("draft"), drafter_config(request.param))
    return open_drafter(folder, target, dtype=mx.float32)


@pytest.fixture
def events(monkeypatch):
    """What happened, in order: "wait" (the host stops for the device) and "launch"."""
    seen: list[str] = []

    def noting(word: str, original):
        def noted(*args, **kwargs):
            if original not in FROM_NUMPY or isinstance(args[0], mx.array):
                seen.append(word)
            return original(*args, **kwargs)

        return noted

    for name in TO_HOST:
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, noting("wait", getattr(mx.array, name)))
    for place, names in ((mx, ("eval", "synchronize")), (np, ("array", "asarray"))):
        for name in names:
            monkeypatch.setattr(place, name, noting("wait", getattr(place, name)))
    monkeypatch.setattr(mx, "async_eval", noting("launch", mx.async_eval))
    return seen


def steps_of(session: Session, events: list[str], params: SamplingParams | None = None):
    """(tokens, events from the former yield to this one) of every step, and the stats."""
    stats = GenerationStats()
    prompt = tiny_prompt(48, 20)
    run = session.run(prompt, params or SamplingParams(), N, (), stats)
    found = []
    for tokens in run:
        found.append((tokens, list(events)))
        events.clear()
    return found, stats


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=1),
    ],
    ids=["greedy", "sampled"],
)
def test_a_cycle_waits_once_and_launches_the_next_before_it_yields(target, drafter, events, params):
    session = Session(target, drafter, nullcontext)
    found, stats = steps_of(session, events, params)
    (_, prefill), *cycles = found
    assert prefill[-1] == "launch"  # the first cycle, before the first token is shown
    assert stats.cycles >= 5
    for number, (tokens, happened) in enumerate(cycles):
        last = number == len(cycles) - 1
        assert happened == (["wait"] if last else ["wait", "launch"]), (number, tokens)


def test_a_plain_step_is_launched_ahead_of_the_wait_for_the_one_before(target, events):
    found, stats = steps_of(Session(target, None, nullcontext), events)
    (_, prefill), *steps = found
    assert stats.cycles == 0
    assert len(steps) == N - 1
    assert prefill[-1] == "launch"
    for number, (_, happened) in enumerate(steps):
        last = number == len(steps) - 1
        assert happened == (["wait"] if last else ["launch", "wait"])


def test_the_counter_sees_every_way_to_the_host(events):
    x = mx.arange(3)
    ways = {
        "tolist": lambda: x.tolist(),
        "item": lambda: x[0].item(),
        "numpy": lambda: np.array(x),
        "bool": lambda: bool(x[0] > 0),
        "int": lambda: int(x[0]),
        "float": lambda: float(x[0]),
        "repr": lambda: repr(x),
        "index": lambda: [1, 2, 3][x[0]],
        "eval": lambda: mx.eval(x),
        "synchronize": lambda: mx.synchronize(),
    }
    for name, way in ways.items():
        events.clear()
        way()
        assert "wait" in events, name


@pytest.mark.parametrize("fault", ["read the drafts", "read the verdict twice", "wait at launch"])
def test_a_second_wait_is_seen(target, drafter, events, monkeypatch, fault):
    if fault == "read the drafts":
        propose = drafter.propose

        def reading(*args):
            proposal = propose(*args)
            assert isinstance(proposal, Proposal)
            proposal.tokens.tolist()
            return proposal

        monkeypatch.setattr(drafter, "propose", reading)
    elif fault == "read the verdict twice":
        read = step.Flight.read
        monkeypatch.setattr(
            step.Flight, "read", lambda self: (self.tokens[0].item(), read(self))[1]
        )
    else:
        monkeypatch.setattr(mx, "async_eval", mx.eval)
    found, _ = steps_of(Session(target, drafter, nullcontext), events)
    # Without the last step and the one that launched it: with one token left there is no draft.
    waits = [Counter(happened)["wait"] for _, happened in found[1:-2]]
    assert len(waits) >= 5
    assert set(waits) == {2}


def test_the_head_reads_only_the_rows_that_are_judged(target, drafter, monkeypatch):
    """One row of a prompt, n drafts, n + 1 verified rows: nothing else meets the vocabulary."""
    rows: list[int] = []
    head = type(target).head

    def counted(self, x):
        rows.append(x.size // x.shape[-1])
        return head(self, x)

    monkeypatch.setattr(type(target), "head", counted)
    stats = GenerationStats()
    session = Session(target, drafter, nullcontext, prefill_chunk=8)
    list(session.run(tiny_prompt(48, 20), SamplingParams(), N, (), stats))
    assert rows[0] == 1
    assert sum(rows) == 1 + stats.drafted + (stats.drafted + stats.cycles) + (
        stats.generation_tokens - 1 - stats.cycle_tokens
    )
    assert max(rows) == BLOCK
