"""Gemma 4's sequences: caches by kind of layer, commits of any count, segments side by side."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle import plain_forward, plain_greedy, plain_logits
from tiny import tiny_prompt, tiny_target

from dflash_mlx.cache import BorrowedCache, KVCache, WindowCache
from dflash_mlx.segment import Segment


def segment(ids: list[int], cache: Any) -> Segment:
    return Segment(mx.array(ids, dtype=mx.int32), cache)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def run(target: Any, ids: list[int], cache: Any, keep: int | None = None) -> np.ndarray:
    """Logits [T, V] of the next rows, of which `keep` (None: all) are committed."""
    hidden, _ = target.forward([segment(ids, cache)])
    logits = np.array(target.logits(hidden)[0])
    cache.commit(len(ids) if keep is None else keep)
    return logits


def test_caches_by_kind_of_layer() -> None:
    """Sliding layers hold no more than their window needs; borrowing layers hold nothing."""
    target = tiny_target("gemma4_shared")
    cache = target.make_cache()
    kinds = [WindowCache, KVCache, WindowCache, KVCache, BorrowedCache, BorrowedCache]
    assert [type(layer) for layer in cache] == kinds
    assert [cache[4].lender, cache[5].lender] == [cache[2], cache[3]]
    run(target, tiny_prompt(96, 30), cache)
    assert cache[4].arrays() == cache[5].arrays() == []
    assert [layer.length for layer in cache] == [30] * 6
    assert cache.nbytes == sum(layer.nbytes for layer in list(cache)[:4])


# The other variants' layers are among these.
@pytest.mark.parametrize("variant", ["gemma4_shared", "gemma4_unified", "gemma4_moe"])
class TestSequences:
    def test_commit_of_any_count_equals_a_fresh_run(self, variant: str) -> None:
        """Before, while and after the window fills, for every count of a block of 9."""
        target = tiny_target(variant)
        block, tail = tiny_prompt(96, 9, 4), tiny_prompt(96, 3, 5)
        for length in (3, 20):
            prompt = tiny_prompt(96, length, 3)
            for n in range(len(block) + 1):
                cache = target.make_cache()
                run(target, prompt, cache)
                run(target, block, cache, keep=n)
                assert {layer.length for layer in cache} == {cache.length} == {length + n}
                fresh = plain_logits(target, prompt + block[:n] + tail)
                assert off(run(target, tail, cache), fresh[-len(tail) :]) <= 2e-5

    def test_many_rejections_leave_no_trace(self, variant: str) -> None:
        target, ids = tiny_target(variant), tiny_prompt(96, 40, 8)
        cache, wrong = target.make_cache(), tiny_prompt(96, 7, 9)
        seen, at = [], 0
        for kept in (4, 1, 2, 1, 7, 3, 1, 5, 1, 6, 2, 7):
            drafts = ids[at : at + kept] + wrong[kept:]
            seen.append(run(target, drafts, cache, keep=kept)[:kept])
            at += kept
        assert at == len(ids)
        assert off(np.concatenate(seen), plain_logits(target, ids)) <= 2e-5

    def test_two_segments_equal_two_runs(self, variant: str) -> None:
        target = tiny_target(variant)
        a, b = tiny_prompt(96, 19, 1), tiny_prompt(96, 30, 2)
        cache_a, cache_b = target.make_cache(), target.make_cache()
        taps, seen_a, seen_b = [1, 3], [], []
        for (a0, a1), (b0, b1) in [((0, 4), (0, 20)), ((4, 5), (20, 27)), ((5, 19), (27, 30))]:
            segments = [segment(a[a0:a1], cache_a), segment(b[b0:b1], cache_b)]
            hidden, features = target.forward(segments, taps)
            rows = np.concatenate([np.array(target.logits(hidden)[0]), np.array(features[0])], -1)
            seen_a.append(rows[: a1 - a0])
            seen_b.append(rows[a1 - a0 :])
            cache_a.commit(a1 - a0)
            cache_b.commit(b1 - b0)
        for ids, seen in ((a, seen_a), (b, seen_b)):
            alone = np.concatenate(plain_forward(target, ids, taps), axis=-1)
            assert off(np.concatenate(seen), alone) <= 2e-5

    def test_rewind_equals_a_fresh_run(self, variant: str) -> None:
        target, prompt, tail = tiny_target(variant), tiny_prompt(96, 30, 6), tiny_prompt(96, 4, 7)
        cache = target.make_cache()
        run(target, prompt, cache)
        for length in (27, 11):
            assert cache.rewind(length)
            fresh = plain_logits(target, prompt[:length] + tail)
            assert off(run(target, tail, cache, keep=0), fresh[length:]) <= 2e-5

    def test_greedy_text_is_not_degenerate(self, variant: str) -> None:
        assert len(set(plain_greedy(tiny_target(variant), tiny_prompt(96, 5), 40))) >= 12

    def test_runs_in_another_thread_than_the_one_that_made_it(self, variant: str) -> None:
        target, ids, seen = tiny_target(variant), tiny_prompt(96, 12), []
        expected = plain_greedy(target, ids, 3)
        for _ in range(2):
            thread = threading.Thread(target=lambda: seen.append(plain_greedy(target, ids, 3)))
            thread.start()
            thread.join()
        assert seen == [expected, expected]
