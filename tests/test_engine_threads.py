"""Engines in threads: any thread, turns on one stream, nothing shared, nothing left behind."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time

import mlx.core as mx
import pytest
from engine_fixtures import PROMPT, N
from oracle import plain_greedy
from tiny import tiny_target
from tiny_engine import VOCAB, oracle_for, tiny_engine

from dflash_mlx.errors import UsageError


def test_any_thread_twice(dflash, truth):
    """Loaded here, used there, there again, and at last here."""
    got = []

    def work() -> None:
        dflash.drafter.proposes = 0
        got.append(dflash.generate(PROMPT, max_tokens=N).token_ids)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert got == [truth] * 3


def test_one_stream_may_change_threads(dflash, truth):
    """As a server's thread pool does: every chunk is fetched by another thread."""
    dflash.drafter.proposes = 0
    stream, ids, box = dflash.stream(PROMPT, max_tokens=N), [], [None]

    def fetch() -> None:
        box[0] = next(stream, None)

    while True:
        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
        if box[0] is None:
            break
        ids += box[0].token_ids
    assert ids == truth


def test_two_streams_at_once(plain, truth):
    """Two threads on one engine, and two streams of one thread, keep their own caches."""
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = plain.generate(PROMPT, max_tokens=N).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [truth] * 3
    a, b = plain.stream(PROMPT, max_tokens=N), plain.stream(PROMPT, max_tokens=N)
    pairs = list(zip(a, b, strict=True))
    assert [t for x, _ in pairs for t in x.token_ids] == truth
    assert [t for _, y in pairs for t in y.token_ids] == truth


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("how", ["close", "del"])
def test_abandoned_stream_frees_everything(tmp_path, how, drafting):
    big = tiny_target("llama", vocab_size=VOCAB, max_position_embeddings=40_000)
    prompt = list(range(60)) * 25
    drafter = oracle_for(big, prompt, [0] * 200, 8, [2]) if drafting else None
    if drafter is not None:
        drafter._check = lambda anchor, cache: None  # its drafts may be wrong here
    engine = tiny_engine(tmp_path, target=big, drafter=drafter)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    stream = engine.stream(prompt, max_tokens=100)
    next(stream)
    next(stream)
    assert mx.get_active_memory() > before + 1500 * 4 * 2 * 2 * 12 * 4 * 0.9
    if how == "close":
        stream.close()
    else:
        del stream
    assert mx.get_active_memory() <= before + 4096
    assert mx.get_cache_memory() == 0


def test_two_engines_share_nothing(plain, tmp_path, target, truth, prompt_ids):
    other = tiny_engine(tmp_path, target=tiny_target("qwen3", vocab_size=VOCAB, seed=3))
    expected = plain_greedy(other.target, prompt_ids, 12)
    a, b = plain.stream(PROMPT, max_tokens=12), other.stream(PROMPT, max_tokens=12)
    pairs = list(zip(a, b, strict=True))
    assert [t for x, _ in pairs for t in x.token_ids] == truth[:12]
    assert [t for _, y in pairs for t in y.token_ids] == expected


def test_two_drafters_with_different_taps_share_one_target(target, prompt_ids, truth, tmp_path):
    one = oracle_for(target, prompt_ids, truth, 8, [3])
    two = oracle_for(target, prompt_ids, truth, 4, [1])
    two.taps, two.width = (3,), target.hidden_size
    engines = [tiny_engine(tmp_path, target=target, drafter=d) for d in (one, two)]
    a, b = (e.stream(PROMPT, max_tokens=N) for e in engines)
    ids: list[list[int]] = [[], []]
    for x, y in zip(a, b, strict=False):
        ids[0] += x.token_ids
        ids[1] += y.token_ids
    for stream, found in ((a, ids[0]), (b, ids[1])):
        for chunk in stream:
            found += chunk.token_ids
    # zip drops one chunk of the longer stream when the shorter one ends
    assert ids[0] == truth
    assert ids[1] == truth[: len(ids[1])]


class OneAtATime:
    """A target that notes how many threads are inside and on which stream they work."""

    def __init__(self, target) -> None:
        self._target = target
        self.inside = self.most = 0
        self.streams: set[str] = set()

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, segments, taps=()):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.streams.add(str(mx.default_stream(mx.default_device())))
        time.sleep(0.002)  # long enough for another thread to come in if nothing keeps it out
        result = self._target.forward(segments, taps)
        self.inside -= 1
        return result


def test_threads_take_turns_on_the_engines_own_stream(target, tmp_path, truth):
    watched = OneAtATime(target)
    engine = tiny_engine(tmp_path, target=watched)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(engine.generate(PROMPT, max_tokens=12).token_ids)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [truth[:12]] * 4
    assert watched.most == 1
    assert watched.streams == {str(engine._stream)}
    assert str(engine._stream) != str(mx.default_stream(mx.default_device()))


def test_engines_in_threads_of_their_own(target, tmp_path, truth):
    engines = [tiny_engine(tmp_path, target=target) for _ in range(3)]
    results: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}

    def work(i: int) -> None:
        for _ in range(3):
            results[i].append(engines[i].generate(PROMPT, max_tokens=12).token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts == [truth[:12]] * 3 for texts in results.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_is_refused(dflash, truth) -> None:
    """A copy has none of MLX's threads: it may not wait for them, and not spoil the original."""
    dflash.drafter.proposes = 0
    begun = dflash.stream(PROMPT, max_tokens=N)
    ids = list(next(begun).token_ids)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (lambda: dflash.generate(PROMPT, max_tokens=N), lambda: list(begun)):
            try:
                use()
            except UsageError as error:
                said.append(str(error))
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    ended, _, _ = select.select([reading], [], [], 60)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = os.read(reading, 4096).decode().splitlines()
    os.close(reading)
    begins = f"This engine belongs to another process ({os.getpid()})"
    assert [line.startswith(begins) for line in said] == [True, True]
    assert ids + [i for chunk in begun for i in chunk.token_ids] == truth
