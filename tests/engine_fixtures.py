"""Fixtures of the engine's tests: a tiny target, its brute-force text, both kinds of engine."""

from __future__ import annotations

import pytest
from oracle import plain_greedy
from tiny import tiny_target
from tiny_engine import END, VOCAB, oracle_for, tiny_engine

PROMPT = "Count the clips."
N = 48


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def plain(target, tmp_path_factory):
    return tiny_engine(tmp_path_factory.mktemp("plain"), target=target)


@pytest.fixture(scope="module")
def prompt_ids(plain):
    return plain.tokenizer.chat_ids([{"role": "user", "content": PROMPT}])


@pytest.fixture(scope="module")
def truth(target, prompt_ids):
    tokens = plain_greedy(target, prompt_ids, N)
    assert END not in tokens, "choose another seed: the text should not end by itself"
    return tokens


@pytest.fixture
def dflash(target, prompt_ids, truth, tmp_path):
    drafter = oracle_for(target, prompt_ids, truth, 8, [3, 0, 7, 1])
    return tiny_engine(tmp_path, target=target, drafter=drafter, drafter_name="oracle")
