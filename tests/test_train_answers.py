"""Answers made side by side: equal to answers made alone, resumed after a kill, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from oracle import plain_greedy
from tiny import VARIANTS, tiny_prompt, tiny_target
from tiny_engine import END, TEMPLATE, VOCAB, write_tokenizer

from dflash_mlx.cache import KVCache, RecurrentCache
from dflash_mlx.decode.sampling import draw_at
from dflash_mlx.errors import UsageError
from dflash_mlx.segment import Segment
from dflash_mlx.tokenizer import load_tokenizer
from dflash_mlx.train import decoding
from dflash_mlx.train.answer_file import AnswerFile, AnswerSettings
from dflash_mlx.train.answers import Answered, answer_prompts
from dflash_mlx.train.corpus import read_answers
from dflash_mlx.train.decoding import Decoder, Job, cache_bytes
from dflash_mlx.train.prompts import Prompt

Answers = dict[str, list[int]]
SETTINGS = AnswerSettings("tiny", 0.0, 6, 0)


def jobs(vocab_size: int, limits: Sequence[int]) -> list[Job]:
    """Prompts of 3, 7, 11 … tokens."""
    return [
        Job(f"j{i}", tuple(tiny_prompt(vocab_size, 3 + 4 * i, i)), limit)
        for i, limit in enumerate(limits)
    ]


def run(target: Any, work: Iterable[Job], places: int, **options: Any) -> Answers:
    decoder = Decoder(target, places, **{"temp": 0, "seed": 0, "end_ids": [], **options})
    queue, out = list(work), {}
    while queue or decoder.running:
        new = [queue.pop(0) for _ in range(min(decoder.free, len(queue)))]
        for job, answer in decoder.start(new) if new else decoder.step():
            out[job.name] = answer
    return out


@pytest.mark.parametrize("family", VARIANTS)
def test_greedy_answers_equal_those_made_alone(family: str) -> None:
    target = tiny_target(family)
    work = jobs(target.vocab_size, (4, 8, 2, 6))
    alone = {job.name: plain_greedy(target, job.prompt_ids, job.limit) for job in work}
    assert run(target, work, 3) == alone


def test_answers_beyond_the_growth_of_the_pool_and_prompts_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Growth of a pool keeps the rows of all places; a long prompt runs alone, in pieces."""
    monkeypatch.setattr(decoding, "PREFILL_ROWS", 16)
    monkeypatch.setattr("dflash_mlx.cache.pool.GROWTH_ROWS", 8)
    target = tiny_target("llama")
    work = [*jobs(target.vocab_size, (9, 9, 9)), Job("long", tuple(tiny_prompt(96, 40, 9)), 5)]
    alone = {job.name: plain_greedy(target, job.prompt_ids, job.limit) for job in work}
    assert run(target, work, 2) == alone


def test_a_step_is_one_attention_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places' rows go through attention together: that is where the time went."""
    target, calls = tiny_target("llama"), []
    decoder = Decoder(target, 4, temp=0, seed=0, end_ids=[])
    decoder.start(jobs(target.vocab_size, (9, 9, 9, 9)))
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(a[0].shape) or attention(*a, **k),
    )
    decoder.step()
    assert calls == [(4, 2, 2, 12)] * target.num_layers


def test_sampled_answers_do_not_depend_on_neighbours() -> None:
    target = tiny_target("llama")
    work = jobs(target.vocab_size, (6, 3, 6, 5))
    options = {"temp": 1.5, "seed": 3}
    together = run(target, work, 4, **options)
    assert run(target, work[::-1], 2, **options) == together
    for job in work:
        assert run(target, [job], 1, **options) == {job.name: together[job.name]}
    other = run(target, work, 4, temp=1.5, seed=4)
    greedy = run(target, work, 4)
    assert len({str(a["j0"]) for a in (together, other, greedy)}) == 3
    twin = run(target, [work[0], replace(work[0], name="twin")], 2, **options)
    assert twin["twin"] != twin["j0"] == together["j0"]


def test_sampling_follows_the_distribution() -> None:
    """Shares from 0 to 1 meet every token as often as its probability says."""
    probs = mx.array([[0.5, 0.0, 0.3, 0.2]])
    shares = (mx.arange(1000)[:, None] + 0.5) / 1000
    drawn = draw_at(mx.broadcast_to(probs, (1000, 4)), shares).tolist()
    assert [drawn.count(token) for token in range(4)] == [500, 0, 300, 200]
    assert draw_at(probs, mx.array([[1 - 2**-24]])).item() == 3


def test_places_of_finished_sequences_are_taken_at_once() -> None:
    target = tiny_target("llama")
    decoder = Decoder(target, 2, temp=0, seed=0, end_ids=[])
    work = jobs(target.vocab_size, (2, 5, 3))
    assert decoder.start(work[:2]) == []
    assert [job.name for job, _ in decoder.step()] == ["j0"]
    assert decoder.free == 1
    decoder.start(work[2:])
    assert [run.job.name for run in decoder.running] == ["j1", "j2"]


def test_cache_bytes_are_those_of_a_decoder() -> None:
    """In the middle of a step: rows of the attention layers, and states that do not grow."""
    for family in ("llama", "gpt_oss", "qwen3_5"):
        target = tiny_target(family)
        kinds = {type(cache) for cache in target.make_cache()}
        decoder = Decoder(target, 2, temp=0, seed=0, end_ids=[])
        decoder.start([Job("a", tuple(tiny_prompt(96, 20)), 9)])
        stack = decoder.running[0].stack
        target.forward([Segment(mx.array([0]), stack)])
        grown = stack.nbytes
        assert cache_bytes(target, 29) == grown, family
        more = cache_bytes(target, 257) - grown
        assert (more == grown) == (RecurrentCache not in kinds), family
    assert KVCache in kinds


class Files:
    """A tiny target with a tokenizer of bytes, and answers to its prompts in a folder."""

    def __init__(self, folder: Path, template: str | None = TEMPLATE) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer(write_tokenizer(folder / "tokenizer", template))
        self.target = tiny_target("llama", vocab_size=VOCAB)
        self.path = folder / "answers.jsonl"

    def answer(self, prompts: Sequence[Prompt], **options: Any) -> Answered:
        settings = options.pop("settings", SETTINGS)
        path = options.pop("path", self.path)
        options.setdefault("places", 8)
        return answer_prompts(self.target, self.tokenizer, prompts, path, settings, **options)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def prompt(text: str, *further: str, limit: int | None = None) -> Prompt:
    return Prompt(text, ({"role": "user", "content": text},), further, limit)


PROMPTS = [prompt("one", "and?", limit=3), prompt("two"), prompt("three", limit=2), prompt("four")]


def test_answers_are_kept_as_texts_of_the_corpus(files: Files) -> None:
    seen: list[tuple[int, int]] = []
    got = files.answer(PROMPTS, progress=lambda done, total, speed: seen.append((done, total)))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, 5), (5, 5))
    assert [text.name for text in got.texts] == ["one", "one/turn-2", "two", "three", "four"]
    stored = {text.name: text for text in read_answers([files.path], VOCAB)}
    assert [stored[text.name] for text in got.texts] == got.texts
    assert got.places == 4  # no more than prompts
    assert (got.made, got.tokens) == (5, sum(len(text.answer_ids) for text in got.texts))
    for text, limit in zip(got.texts, (3, 3, 6, 2, 6), strict=True):
        assert list(text.answer_ids) == plain_greedy(files.target, text.prompt_ids, limit)


def test_prompts_with_given_answers_are_not_answered_again(files: Files) -> None:
    """Found by their tokens: the given ones have names of their own, and other answers here."""
    first, _, two, *_ = files.answer(PROMPTS).texts
    given = [replace(first, name="x"), replace(two, name="two", answer_ids=(9, 8))]
    got = files.answer(PROMPTS, path=files.folder / "b.jsonl", given=given)
    assert [text.name for text in got.texts] == ["one", "one/turn-2", "two", "three", "four"]
    assert got.texts[2].answer_ids == (9, 8)
    assert got.made == 3
    stored = [text.name for text in read_answers([files.folder / "b.jsonl"], VOCAB)]
    assert sorted(stored) == ["four", "one/turn-2", "three"]
    # A given first turn goes before the file's own, so that given later turns are found.
    other = replace(first, answer_ids=(7, 7))
    news = files.answer(PROMPTS[:1], path=files.folder / "c.jsonl", given=[other]).texts
    again = files.answer(PROMPTS, given=[replace(t, name=f"y{i}") for i, t in enumerate(news)])
    assert again.texts[:2] == news
    assert again.made == 0


def test_further_turns_stand_behind_the_answers_tokens(files: Files) -> None:
    first, second = files.answer(PROMPTS[:1]).texts
    between = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    news = tuple(files.tokenizer.encode_plain(between))
    assert second.prompt_ids == first.prompt_ids + first.answer_ids + news


def test_an_end_token_ends_an_answer_and_belongs_to_it(files: Files) -> None:
    """The third greedy token is made the end: nothing follows, and the history has it once."""
    ids = files.answer([prompt("two")]).texts[0].answer_ids
    assert ids[2] not in ids[:2]
    rows = files.target.lm_head.weight
    rows[mx.array([END, ids[2]])] = rows[mx.array([ids[2], END])]
    first, second = files.answer([prompt("two", "more")], path=files.folder / "b.jsonl").texts
    assert first.answer_ids == (*ids[:2], END)
    between = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids == (*first.ids, *files.tokenizer.encode_plain(between))


def lines(file: Path) -> list[str]:
    return sorted(file.read_text().splitlines())


def test_a_kill_at_any_byte_is_made_good(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the file a kill left, the resumed run's lines are the whole run's."""
    whole = files.answer(PROMPTS)
    raw, complete = files.path.read_bytes(), lines(files.path)
    known = {text.prompt_ids: list(text.answer_ids) for text in whole.texts}

    class Recalls:
        """A decoder that knows the answers."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.running: list[Job] = []
            self.free, self.tokens = 2, 0

        def start(self, new: list[Job]) -> list[tuple[Job, list[int]]]:
            return [(job, known[job.prompt_ids]) for job in new]

    monkeypatch.setattr("dflash_mlx.train.answers.Decoder", Recalls)
    ends = [i for i, byte in enumerate(raw) if byte == ord("\n")]
    for size in range(ends[-3], len(raw) + 1):
        files.path.write_bytes(raw[:size])
        with AnswerFile(files.path, SETTINGS, VOCAB) as file:
            assert len(file.texts) == raw[:size].count(b"\n"), size
    for size in {i + j for i in ends for j in (-1, 0, 1, 2)}:
        files.path.write_bytes(raw[:size])
        again = files.answer(PROMPTS)
        assert lines(files.path) == complete, size
        assert again.texts == whole.texts
        assert again.made == 5 - raw[:size].count(b"\n")


def test_a_stopped_run_goes_on(files: Files) -> None:
    """A run that really stopped in the middle, with sampled answers."""
    settings = replace(SETTINGS, temp=1.0, seed=5)
    whole = files.answer(PROMPTS, settings=settings, path=files.folder / "whole.jsonl")

    def stop(done: int, total: int, speed: float) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.answer(PROMPTS, settings=settings, progress=stop)
    assert 1 <= len(lines(files.path)) < 5
    again = files.answer(PROMPTS, settings=settings)
    assert again.texts == whole.texts
    assert lines(files.path) == lines(files.folder / "whole.jsonl")
    nothing = files.answer(PROMPTS, settings=settings)
    assert (nothing.texts, nothing.made) == (whole.texts, 0)


def test_long_prompts_are_skipped_and_counted(files: Files) -> None:
    long = prompt("x" * 40, "a", "b")
    assert len(files.tokenizer.chat_ids(long.messages)) == 59
    got = files.answer([long, *PROMPTS[1:]], max_length=59)
    assert got.skipped == 3
    assert [text.name for text in got.texts] == ["two", "three", "four"]
    assert files.answer([long], max_length=60, path=files.folder / "a.jsonl").skipped == 2
    files.target.context_length = 59
    assert files.answer([long, *PROMPTS[1:]]).skipped == 3
    # An answer ends with the context.
    ids = files.tokenizer.chat_ids(prompt("five").messages)
    files.target.context_length = len(ids) + 2
    (text,) = files.answer([prompt("five")], path=files.folder / "b.jsonl").texts
    assert len(text.answer_ids) == 2


def test_less_memory_means_fewer_places(files: Files) -> None:
    each = cache_bytes(files.target, 50)
    assert files.answer(PROMPTS[1:], cache_limit=2 * each + 1).places == 2
    with pytest.raises(UsageError, match=r"--memory.*--max-answer"):
        files.answer([prompt("more")], cache_limit=each - 1)


def test_a_target_without_a_template_continues_text(tmp_path: Path) -> None:
    files = Files(tmp_path, template=None)
    (text,) = files.answer([prompt("two")]).texts
    assert list(text.prompt_ids) == list(b"two") or files.tokenizer.decode(text.prompt_ids) == "two"
    with pytest.raises(UsageError, match="no chat template"):
        files.answer(PROMPTS[:1])


def changed(**values: Any) -> Callable[[Files], Any]:
    return lambda files: files.answer(PROMPTS[1:], settings=replace(SETTINGS, **values))


def test_drawn_answers_are_of_their_seed(files: Files) -> None:
    drawn = replace(SETTINGS, temp=0.5)
    files.answer(PROMPTS[1:], settings=drawn)
    assert files.answer(PROMPTS[1:], settings=drawn).made == 0
    with pytest.raises(UsageError, match="seed: 0 there, 1 now"):
        files.answer(PROMPTS[1:], settings=replace(drawn, seed=1))


def test_answers_of_another_max_are_refused(files: Files) -> None:
    """Both ways: an answer that was cut earlier than now, and one that is longer."""
    first = files.answer([prompt("two", limit=4)]).texts[0].answer_ids
    assert len(first) == 4
    for limit in (3, 5):
        with pytest.raises(UsageError, match=f"'two' that was made with another max.*{limit} are"):
            files.answer([prompt("two", limit=limit)])
    # One that ended by itself is the same whatever more there is room for.
    files.tokenizer.end_ids = frozenset({first[-1]})
    assert files.answer([prompt("two", limit=5)]).texts[0].answer_ids == first


def test_beginning_many_answers_takes_no_more_than_their_caches() -> None:
    """Prompts that are written one behind another do not copy the pool of all of them."""
    target = tiny_target("llama")
    work = jobs(target.vocab_size, [9] * 24)
    mx.eval(target.parameters())
    mx.clear_cache()
    held = mx.get_active_memory()
    decoder = Decoder(target, len(work), temp=0, seed=0, end_ids=[])
    mx.reset_peak_memory()
    decoder.start(work)
    caches = sum(cache.nbytes for run in decoder.running for cache in run.stack)
    assert mx.get_active_memory() - held >= caches
    assert mx.get_peak_memory() - held < 2 * caches


def test_files_of_other_settings_or_prompts_are_refused(files: Files) -> None:
    files.answer(PROMPTS[1:])
    for values, said in [
        ({"target": "huge"}, "target: tiny there, huge now"),
        ({"temp": 0.5}, r"temp: 0\.0 there, 0\.5 now"),
        ({"max_answer": 9}, "max_answer: 6 there, 9 now"),
    ]:
        with pytest.raises(UsageError, match=said):
            changed(**values)(files)
    assert changed(seed=1)(files).made == 0  # greedy: nothing is drawn
    other = replace(prompt("twelve"), name="two")
    with pytest.raises(UsageError, match="'two' to another prompt"):
        files.answer([other])
    files.path.write_text("nonsense\n" + files.path.read_text())
    with pytest.raises(UsageError, match="line 1"):
        files.answer(PROMPTS[1:])
    beside = files.path.with_suffix(".settings.json")
    beside.write_text(json.dumps({"target": "tiny"}))
    with pytest.raises(UsageError, match=r"answers\.settings\.json cannot be read"):
        files.answer(PROMPTS[1:])
    beside.unlink()
    with pytest.raises(UsageError, match="is not beside it"):
        files.answer(PROMPTS[1:])
    with pytest.raises(UsageError, match="max_answer is 0"):
        replace(SETTINGS, max_answer=0)
