"""A chat's turns share one cache: only new tokens run, and the text is that of a fresh start."""

from __future__ import annotations

import itertools

import pytest
from oracle import plain_greedy
from tiny import tiny_target
from tiny_engine import END, TAPS, VOCAB, tiny_engine, write_tokenizer

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.draft.base import Proposal
from dflash_mlx.errors import UsageError


class CountingTarget:
    """Passes everything on and notes how many rows each forward had."""

    def __init__(self, target) -> None:
        self._target = target
        self.rows: list[int] = []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, segments, taps=()):
        self.rows.append(segments[0].rows)
        return self._target.forward(segments, taps)


class GuessingDrafter:
    """Guesses that the last token repeats; its context must be as long as the target's."""

    taps, block_size, head_rows = TAPS, 5, None

    def __init__(self, target) -> None:
        self.width = len(TAPS) * target.hidden_size

    def make_cache(self):
        from oracle import OracleCache

        return OracleCache()

    def observe(self, features, cache):
        assert features.shape[2] == self.width
        cache.length += features.shape[1]

    def propose(self, anchor, n, sampling, cache, head=None):
        import mlx.core as mx

        return Proposal(mx.repeat(anchor, n), None, mx.array(True))


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", vocab_size=VOCAB)


@pytest.fixture(params=["plain", "dflash"])
def engine(request, target, tmp_path):
    counting = CountingTarget(target)
    drafter = GuessingDrafter(target) if request.param == "dflash" else None
    return tiny_engine(tmp_path, target=counting, drafter=drafter)


def say(chat, text, **options):
    chunks = list(chat.send(text, **options))
    return "".join(c.text for c in chunks), [t for c in chunks for t in c.token_ids]


def test_second_turn_feeds_only_its_new_tokens(engine, target):
    chat = engine.chat(system="Be brief.")
    ids: list[int] = []
    for turn, text in enumerate(("One.", "Two, please.", "And three?")):
        engine.target.rows.clear()
        cached = len(chat._session.ids)
        _, tokens = say(chat, text, max_tokens=7)
        news = engine.tokenizer.encode_plain(
            ("<|im_start|>system\nBe brief.<|im_end|>\n" if turn == 0 else "<|im_end|>\n")
            + f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids += news
        assert tokens == plain_greedy(target, ids, 7)
        ids += tokens
        # The last token of the former answer was never run; then the new ones, nothing else.
        assert engine.target.rows[0] == len(news) + (1 if turn else 0)
        assert chat.stats.prompt_tokens == len(ids) - 7
        assert chat.stats.cached_tokens == cached == (len(ids) - 7 - len(news) - 1 if turn else 0)


def test_end_token_belongs_to_the_history(engine, target):
    """After an answer that ended by itself the next turn goes on behind its end token."""
    chat = engine.chat()
    first = plain_greedy(target, engine.prompt("Hi", None, None).ids, 6)
    engine.tokenizer.end_ids = frozenset({first[5]})
    text, tokens = say(chat, "Hi", max_tokens=40)
    assert tokens[-1] == first[5]
    assert chat.stats.finish_reason == "stop"
    assert chat._ids[-1] == first[5]
    engine.target.rows.clear()
    say(chat, "More", max_tokens=3)
    assert chat.messages[1] == {"role": "assistant", "content": text}
    assert chat.stats.cached_tokens > 0


def test_stopped_answer_stays_in_the_conversation(engine):
    chat = engine.chat()
    stream = chat.send("Hi", max_tokens=30)
    seen = "".join(c.text for c in itertools.islice(stream, 6))
    stream.close()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"] == seen
    assert chat._session.cache.pending == 0
    assert chat.stats.finish_reason == "abandoned"
    assert chat.stats.generation_tokens > 0
    assert chat.stats.total_seconds >= chat.stats.generation_seconds
    engine.target.rows.clear()
    _, tokens = say(chat, "Go on", max_tokens=5)
    assert len(tokens) == 5
    assert engine.target.rows[0] < 40  # the first turn was not run again


def test_reset_and_errors_leave_a_usable_chat(engine):
    chat = engine.chat(system="S")
    first = say(chat, "Hi", max_tokens=5)
    with pytest.raises(UsageError):
        chat.send("   ")
    with pytest.raises(UsageError):
        chat.send("Hi", max_tokens=-1)
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "S"}]
    assert chat._session.ids == []
    assert say(chat, "Hi", max_tokens=5) == first
    assert chat.stats.cached_tokens == 0


def test_crash_inside_a_step_keeps_the_conversation(engine, monkeypatch):
    chat = engine.chat()
    say(chat, "Hi", max_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target._target.__class__, "logits", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            say(chat, "Two", max_tokens=5)
    assert len(chat.messages) == 2
    _, tokens = say(chat, "Two", max_tokens=5)
    fresh = engine.generate([*chat.messages[:2], {"role": "user", "content": "Two"}], max_tokens=5)
    assert len(tokens) == 5
    assert fresh.stats.generation_tokens == 5


def test_stop_string_in_a_chat(engine):
    chat = engine.chat()
    whole, _ = say(chat, "Hi", max_tokens=20)
    chat.reset()
    text, tokens = say(chat, "Hi", max_tokens=20, stop=[whole[6:8]])
    # Nothing behind the stop string stays in the caches.
    assert chat._session.ids == [*engine.prompt("Hi", None, None).ids, *tokens[:-1]]
    assert text == whole[: whole.index(whole[6:8])]
    assert chat.messages[1]["content"] == text
    _, tokens = say(chat, "Next", max_tokens=4)
    plain = tiny_plain(engine, chat, 4)
    assert tokens == plain


def tiny_plain(engine, chat, n):
    """What a fresh conversation with the same messages answers."""
    return engine.generate(chat.messages[:-1], max_tokens=n).token_ids


def test_changed_history_costs_time_not_text(engine):
    """A history that is not what was generated (edited here, trimmed by templates): only the
    common part of the cache is kept, and the answer is that of a fresh start."""
    chat = engine.chat()
    say(chat, "Hi", max_tokens=9)
    chat.messages[-1]["content"] = "something else"
    _, tokens = say(chat, "Next", max_tokens=4)
    assert tokens == tiny_plain(engine, chat, 4)
    assert 0 < chat.stats.cached_tokens < chat.stats.prompt_tokens


def test_sampled_turns_repeat_with_a_seed(engine):
    def conversation() -> list[list[int]]:
        chat = engine.chat()
        sampling = SamplingParams(temperature=1.2, repetition_penalty=1.1, seed=3)
        return [say(chat, t, max_tokens=6, sampling=sampling)[1] for t in ("a", "b")]

    assert conversation() == conversation()


def test_the_tiny_tokenizer_is_exact(tmp_path):
    from dflash_mlx.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.decode(tokenizer.encode_plain("héllo\n")) == "héllo\n"
    assert tokenizer.end_ids == {END}


def test_a_new_message_closes_an_open_answer(engine):
    chat = engine.chat()
    first = chat.send("hello", max_tokens=30)
    seen = [next(first), next(first)]
    second = chat.send("other", max_tokens=5)
    assert list(first) == []
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"] == "".join(c.text for c in seen)
    assert sum(len(c.token_ids) for c in second) == 5
    third = chat.send("third", max_tokens=30)
    next(third)
    chat.reset()
    assert list(third) == []
    assert chat.messages == []


def test_text_held_back_is_not_taken_for_the_templates_mark(engine):
    """A stop string that begins as the template's end mark does: the next prompt is right."""
    chat = engine.chat()
    whole, _ = say(chat, "Hi", max_tokens=20)
    chat.reset()
    stop = whole[6:8]
    say(chat, "Hi", max_tokens=20, stop=[stop])
    assert chat._shown is None
    prompt = chat._prompt([*chat.messages, {"role": "user", "content": "Next"}])
    assert prompt.ids == engine.tokenizer.encode_plain(prompt.text)
