"""The engine: streamed equals whole, stops and limits exact, any thread, nothing left behind."""

from __future__ import annotations

from types import MappingProxyType

import mlx.core as mx
import numpy as np
import pytest
from engine_fixtures import PROMPT, N
from oracle import plain_greedy
from tiny import tiny_target
from tiny_engine import END, TEMPLATE, THINKING_TEMPLATE, VOCAB, oracle_for, tiny_engine

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.errors import UsageError


def test_generate_equals_brute_force(plain, dflash, truth):
    for engine, cycles in ((plain, False), (dflash, True)):
        result = engine.generate(PROMPT, max_tokens=N)
        assert result.token_ids == truth
        assert result.text == engine.tokenizer.decode(truth)
        assert result.stats.finish_reason == "length"
        assert result.stats.engine == ("dflash" if cycles else "plain")
        assert (result.stats.cycles > 5) is cycles
        assert (result.stats.accepted > 5) is cycles


def test_streamed_equals_whole(dflash, truth):
    chunks = list(dflash.stream(PROMPT, max_tokens=N))
    assert "".join(c.text for c in chunks) == dflash.tokenizer.decode(truth)
    assert [t for c in chunks for t in c.token_ids] == truth
    assert [c.stats is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    # A cycle's tokens come together, so that the screen moves once a cycle.
    assert max(len(c.token_ids) for c in chunks) > 1


def test_stats_document(dflash):
    document = dflash.generate(PROMPT, max_tokens=N).to_json()
    # fmt: off
    fields = {
        "text", "token_ids", "prompt_tokens", "prefill_seconds", "prefill_tps",
        "generation_tokens", "generation_seconds", "generation_tps", "total_seconds", "engine",
        "engine_reason", "cycles", "drafted", "accepted", "tokens_per_cycle", "accept_histogram",
        "finish_reason", "peak_memory_gb", "model", "drafter", "versions",
    }
    # fmt: on
    assert fields <= set(document)
    assert not [name for name in document if name.startswith("_")]
    assert document["generation_tokens"] == len(document["token_ids"]) == N
    assert document["total_seconds"] >= document["prefill_seconds"] + document["generation_seconds"]
    rate = (N - 1) / document["generation_seconds"]
    assert document["generation_tps"] == pytest.approx(rate)
    assert document["prefill_tps"] == pytest.approx(
        document["prompt_tokens"] / document["prefill_seconds"]
    )
    histogram = document["accept_histogram"]
    assert sum(histogram) == document["cycles"]
    assert sum(a * n for a, n in enumerate(histogram)) == document["accepted"]
    emitted = document["tokens_per_cycle"] * document["cycles"]
    assert emitted == pytest.approx(document["accepted"] + document["cycles"])


def test_end_token_is_counted_but_not_shown(plain, dflash, truth):
    """The text ends before the end token; plain and DFlash agree about every count."""
    end = truth[10]
    first = truth.index(end)
    for engine in (plain, dflash):
        tokenizer = engine.tokenizer
        tokenizer.end_ids = frozenset({end})
        try:
            result = engine.generate(PROMPT, max_tokens=N)
        finally:
            tokenizer.end_ids = frozenset({END})
        assert result.token_ids == truth[: first + 1]
        assert result.text == tokenizer.decode(truth[:first])
        assert result.stats.finish_reason == "stop"


@pytest.mark.parametrize("at", [1, 5, 11, 20, 33])
def test_stop_string_ends_plain_and_dflash_alike(plain, dflash, truth, at):
    whole = plain.tokenizer.decode(truth)
    stop = whole[at : at + 2]
    shown = whole[: whole.index(stop)]
    results = []
    for engine in (plain, dflash):
        chunks = list(engine.stream(PROMPT, max_tokens=N, stop=[stop, "never seen"]))
        assert "".join(c.text for c in chunks) == shown
        ids = [t for c in chunks for t in c.token_ids]
        assert ids == truth[: len(ids)]
        stats = chunks[-1].stats
        assert stats.finish_reason == "stop_string"
        assert stats.generation_tokens == len(ids)
        assert sum(stats.accept_histogram) == stats.cycles
        assert stats.cycle_tokens == (len(ids) - 1 if stats.cycles else 0)
        results.append(ids)
    assert results[0] == results[1]


def test_limit_is_the_context(target, tmp_path, prompt_ids):
    small = tiny_target("llama", vocab_size=VOCAB, max_position_embeddings=len(prompt_ids) + 5)
    engine = tiny_engine(tmp_path, target=small)
    result = engine.generate(PROMPT, max_tokens=100)
    assert result.stats.generation_tokens == 5
    assert result.stats.finish_reason == "length"
    with pytest.raises(UsageError, match=r"^The prompt has \d+ tokens .* Shorten the prompt\.$"):
        engine.stream(PROMPT * 3)


def test_three_seeds_three_texts_and_one_seed_one_text(dflash):
    def text(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.5, seed=seed)
        return dflash.generate(PROMPT, max_tokens=12, sampling=sampling).token_ids

    dflash.drafter.draft_probs = None
    assert len({tuple(text(s)) for s in (1, 2, 3)}) == 3
    first = text(4)
    dflash.drafter.proposes = 0  # the oracle's plan goes on from call to call
    again = text(4)
    dflash.drafter.proposes = 0
    assert text(4) == again
    assert len(first) == 12


def test_slower_drafting_is_said(dflash, monkeypatch):
    from dflash_mlx.decode.session import Session

    monkeypatch.setattr(Session, "time_plain_step", lambda self: 1e-9)
    dflash._pacing._plain_seconds.clear()
    stats = dflash.generate(PROMPT, max_tokens=N).stats
    assert [w for w in stats.warnings if w.startswith("DFlash was slower here: ")]
    dflash._pacing._plain_seconds.clear()
    monkeypatch.setattr(Session, "time_plain_step", lambda self: 1e9)
    dflash.drafter.proposes = 0
    assert not dflash.generate(PROMPT, max_tokens=N).stats.warnings


def test_reasoning_is_kept_apart(tmp_path, target):
    """A template that opens a think block: what comes first is reasoning, streamed or not."""
    engine = tiny_engine(tmp_path, target=target, template=THINKING_TEMPLATE)
    result = engine.generate(PROMPT, max_tokens=24)
    assert result.text == ""
    assert result.reasoning == engine.tokenizer.decode(result.token_ids).strip()
    assert "".join(c.reasoning for c in engine.stream(PROMPT, max_tokens=24)) == result.reasoning
    off = engine.generate(PROMPT, max_tokens=24, thinking=False)
    assert off.reasoning == ""
    assert off.text == engine.tokenizer.decode(off.token_ids)


def test_raw_tokens_and_missing_template(tmp_path, target, prompt_ids, truth, plain):
    assert plain.generate(prompt_ids, max_tokens=N).token_ids == truth
    bare = tiny_engine(tmp_path, target=target, template=None)
    ids = bare.tokenizer.encode("abc")
    assert bare.generate("abc", max_tokens=4).token_ids == plain_greedy(target, ids, 4)
    with pytest.raises(UsageError, match=r"^tiny has no chat template"):
        bare.generate("abc", system="Be brief.")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("  ", {}, "The prompt is empty. Give some text to answer."),
        ([], {}, "The conversation is empty. Give at least one message."),
        ([1, -1], {}, "Token 1 of the prompt is -1. Token ids of tiny are whole numbers from 0 to "
         f"{VOCAB - 1}."),
        ("x", {"max_tokens": 0}, "max_tokens is 0. Give a whole number above 0."),
        ([1, True], {}, "Token 1 of the prompt is True. Token ids of tiny are whole numbers from 0 "
         f"to {VOCAB - 1}."),
        (np.array([1, 400]), {}, "Token 1 of the prompt is 400. Token ids of tiny are whole "
         f"numbers from 0 to {VOCAB - 1}."),
        ([{"role": "user", "content": "a"}, "oops"], {}, "Message 1 of the conversation is 'oops'. "
         'A message is a mapping with "role" and "content".'),
        ([("user", "Hi")], {}, "Message 0 of the conversation is ('user', 'Hi'). "
         'A message is a mapping with "role" and "content".'),
        ({"role": "user", "content": "a"}, {}, "The prompt is a dict. "
         "Give a string, a list of messages or a list of token ids."),
        ([1, 2], {"system": "x"}, "A prompt of token ids has no system message and no thinking "
         "mode. Leave these options out."),
        ("a\ud800b", {}, "The text is not valid Unicode (character 1). Give it as UTF-8."),
        ("x", {"system": "\udcff"}, "The text is not valid Unicode (character 0). "
         "Give it as UTF-8."),
        (b"x", {}, "The prompt is a bytes. "
         "Give a string, a list of messages or a list of token ids."),
        (3, {}, "The prompt is a int. Give a string, a list of messages or a list of token ids."),
        ("x", {"max_tokens": True}, "max_tokens is True. Give a whole number above 0."),
        ("x", {"stop": "END"}, "stop is a str. Give a list of strings."),
        ("x", {"stop": [3]}, "3 is no stop string. Give strings of at least one character."),
        ("x", {"stop": [""]}, "'' is no stop string. Give strings of at least one character."),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], {"system": "c"},
         "A system message is given twice. Drop one of the two."),
    ],
)  # fmt: skip
def test_refusals(plain, given, options, message):
    with pytest.raises(UsageError) as error:
        plain.stream(given, **options)
    assert str(error.value) == message


def test_prompts_of_other_kinds_are_taken(plain, prompt_ids, truth):
    message = MappingProxyType({"role": "user", "content": PROMPT})
    for given in ((message,), np.array(prompt_ids), mx.array(prompt_ids), tuple(prompt_ids)):
        assert plain.generate(given, max_tokens=6).token_ids == truth[:6]


def test_settings_without_effect_are_named(plain):
    sampling = SamplingParams(top_p=0.5, seed=3)
    warnings = plain.generate(PROMPT, max_tokens=2, sampling=sampling).stats.warnings
    assert warnings == [
        "Without effect at temperature 0, where decoding is greedy: top_p, seed. "
        "Set a temperature too."
    ]
    warm = SamplingParams(top_p=0.5, seed=3, temperature=1.0)
    assert not plain.generate(PROMPT, max_tokens=2, sampling=warm).stats.warnings


def test_block_size_is_checked(target, prompt_ids, truth, tmp_path):
    drafter = oracle_for(target, prompt_ids, truth, 8, [7])
    for block in (0, 9):
        with pytest.raises(UsageError, match=rf"^Block size {block} does not fit this drafter"):
            tiny_engine(tmp_path, target=target, drafter=drafter, block_size=block)
    three = tiny_engine(tmp_path, target=target, drafter=drafter, block_size=3)
    result = three.generate(PROMPT, max_tokens=N)
    assert result.token_ids == truth
    # 47 tokens behind the first: 15 cycles of 3, and one of 2 where max_tokens leaves no more.
    assert result.stats.accept_histogram == [0, 1, 15]
    one = tiny_engine(tmp_path, target=target, drafter=drafter, block_size=1)
    result = one.generate(PROMPT, max_tokens=N)
    assert result.token_ids == truth
    assert result.stats.engine == "plain"


def test_template_ids_have_one_frame(plain):
    messages = [{"role": "user", "content": "hi"}]
    prompt = plain.prompt(messages, None, None)
    assert prompt.ids == plain.tokenizer.encode_plain(prompt.text)
    assert TEMPLATE.startswith("{% for")
