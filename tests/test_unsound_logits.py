"""A target whose logits are no numbers stops with a sentence instead of saying token 0 for ever."""

from __future__ import annotations

from contextlib import nullcontext

import mlx.core as mx
import pytest
from oracle import OracleDrafter, plain_greedy
from tiny import tiny_prompt, tiny_target

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.errors import CheckpointError

TOKENS = 12
PARAMS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=3)}


class Spoilt:
    """A target whose logits become `value` from the `first`-th call on."""

    def __init__(self, target, value: float, first: int) -> None:
        self._target, self._value, self._left = target, value, first

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def logits(self, rows: mx.array) -> mx.array:
        self._left -= 1
        logits = self._target.logits(rows)
        return logits if self._left >= 0 else logits + self._value


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", num_hidden_layers=2)


def run(session: Session, prompt: list[int], params: SamplingParams) -> list[int]:
    steps = session.run(prompt, params, TOKENS, (), GenerationStats())
    return [token for step in steps for token in step]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_logits_that_are_no_numbers_stop_the_run(
    target, params: str, value: float, first: int, drafted: bool
) -> None:
    prompt = tiny_prompt(96, 9)
    drafter = None
    if drafted:
        truth = plain_greedy(target, prompt, TOKENS)
        drafter = OracleDrafter(
            9, truth, vocab_size=96, hidden_size=48, block_size=3, taps=(0,), plan=[2, 0]
        )
    session = Session(Spoilt(target, value, first), drafter, nullcontext)
    with pytest.raises(CheckpointError, match="logits are NaN or infinite"):
        run(session, prompt, PARAMS[params])
    assert session.ids == []
    assert len(run(Session(target, None, nullcontext), prompt, PARAMS[params])) == TOKENS


def test_a_broken_weight_stops_the_run() -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    target.model.norm.weight = target.model.norm.weight * float("nan")
    with pytest.raises(CheckpointError, match=r"another --dtype\.$"):
        run(Session(target, None, nullcontext), [1, 2, 3], SamplingParams())
