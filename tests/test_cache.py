"""Caches against a plain list of rows: provisional writes, commit of any count, rewind, growth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import CacheStack, KVCache
from dflash_mlx.cache.kv import GROWTH_ROWS

HEADS, DIM = 2, 4


def rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (1, HEADS, count, DIM)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def same(seen: tuple[mx.array, mx.array], keys: np.ndarray, values: np.ndarray) -> bool:
    return np.array_equal(np.array(seen[0]), keys) and np.array_equal(np.array(seen[1]), values)


def test_random_writes_commits_and_rewinds_equal_a_list_of_rows() -> None:
    rng = np.random.default_rng(0)
    cache = KVCache()
    keys, values = rows(rng, 0)
    most, rewinds, partial = 0, 0, 0
    for _ in range(400):
        if rng.random() < 0.1:
            length = int(rng.integers(0, keys.shape[2] + 1))
            assert cache.rewind(length)
            keys, values = keys[:, :, :length], values[:, :, :length]
            rewinds += 1
        count = int(rng.choice([1, 2, 8, 16, 70]))
        new_keys, new_values = rows(rng, count)
        seen = cache.write(mx.array(new_keys), mx.array(new_values))
        keys, values = np.concatenate([keys, new_keys], 2), np.concatenate([values, new_values], 2)
        assert same(seen, keys, values)
        assert cache.pending == count
        n = int(rng.integers(0, count + 1))
        cache.commit(n)
        partial += n < count
        keys = keys[:, :, : keys.shape[2] - count + n]
        values = values[:, :, : keys.shape[2]]
        assert (cache.length, cache.pending) == (keys.shape[2], 0)
        most = max(most, cache.length)
    assert most > 3 * GROWTH_ROWS
    assert min(rewinds, partial) > 20


def test_a_second_write_replaces_the_pending_rows() -> None:
    rng = np.random.default_rng(1)
    cache, (keys, values), (other_keys, other_values) = KVCache(), rows(rng, 5), rows(rng, 3)
    cache.write(mx.array(keys), mx.array(values))
    seen = cache.write(mx.array(other_keys), mx.array(other_values))
    assert same(seen, other_keys, other_values)
    assert cache.pending == 3


def test_rows_handed_out_do_not_change_when_later_ones_are_written() -> None:
    """A forward still in flight keeps its rows when the next one overwrites rejected ones."""
    rng = np.random.default_rng(2)
    cache, (keys, values), (later, later_values) = KVCache(), rows(rng, 6), rows(rng, 6)
    seen = cache.write(mx.array(keys), mx.array(values))
    cache.commit(2)
    mx.eval(cache.write(mx.array(later), mx.array(later_values)))
    assert same(seen, keys, values)


@pytest.mark.parametrize("n", [-1, 4])
def test_commit_outside_the_pending_rows_is_refused(n: int) -> None:
    cache, (keys, values) = KVCache(), rows(np.random.default_rng(3), 3)
    cache.write(mx.array(keys), mx.array(values))
    with pytest.raises(ValueError, match=rf"commit\({n}\) with 3 pending rows"):
        cache.commit(n)


def test_capacity_is_bounded_by_the_context_not_by_the_cycles() -> None:
    cache, (keys, values) = KVCache(), rows(np.random.default_rng(4), 16)
    for _ in range(300):
        cache.write(mx.array(keys), mx.array(values))
        cache.commit(1)
    assert cache.length == 300
    assert cache.nbytes <= 2 * 4 * HEADS * DIM * (300 + 16 + 2 * GROWTH_ROWS)
    assert cache.nbytes == sum(a.nbytes for a in cache.arrays())


def stack_of(count: int, rng: np.random.Generator) -> CacheStack:
    stack = CacheStack([KVCache() for _ in range(3)])
    for layer in stack:
        keys, values = rows(rng, count)
        layer.write(mx.array(keys), mx.array(values))  # type: ignore[attr-defined]
    return stack


def test_a_stack_commits_and_rewinds_all_its_layers() -> None:
    stack = stack_of(10, np.random.default_rng(5))
    assert (stack.pending, stack.length, len(stack)) == (10, 0, 3)
    stack.commit(7)
    assert (stack.pending, stack.length) == (0, 7)
    assert [layer.length for layer in stack] == [7, 7, 7]
    assert stack.rewind(4)
    assert [stack.length, *(layer.length for layer in stack)] == [4, 4, 4, 4]
    assert not stack.rewind(5)
    assert stack.length == 4
    assert stack.nbytes == sum(layer.nbytes for layer in stack) > 0
    assert len(stack.arrays()) == 6


def test_a_stack_tells_when_a_layer_cannot_go_back() -> None:
    class Stiff(KVCache):
        def rewind(self, length: int) -> bool:
            return False

    stack = stack_of(10, np.random.default_rng(6))
    stack.layers[1] = Stiff()
    stack.layers[1].pending = 10
    stack.commit(10)
    assert not stack.rewind(4)
