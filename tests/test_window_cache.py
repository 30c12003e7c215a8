"""The window cache against a plain list of rows, before and long after the window has wrapped."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import WindowCache, context
from dflash_mlx.cache.context import REWIND_ROWS, SPARE_ROWS
from dflash_mlx.cache.kv import GROWTH_ROWS

HEADS, DIM = 2, 4
ROW_BYTES = 2 * 4 * HEADS * DIM


class Rows:
    """Distinct rows by absolute position: what the cache must hand out."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.keys = self.values = np.zeros((1, HEADS, 0, DIM), np.float32)

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def fresh(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (1, HEADS, count, DIM)
        keys = self._rng.standard_normal(shape, np.float32)
        return keys, self._rng.standard_normal(shape, np.float32)

    def write(self, cache: WindowCache, count: int, commit: int) -> None:
        """Write `count` rows, compare all that is handed out, commit some."""
        keys, values = self.fresh(count)
        seen = cache.write(mx.array(keys), mx.array(values))
        reach = min(self.length, cache.window - 1)
        for got, old, new in zip(seen, (self.keys, self.values), (keys, values), strict=True):
            wanted = np.concatenate([old[:, :, self.length - reach :], new], axis=2)
            assert np.array_equal(np.array(got), wanted)
        assert cache.pending == count
        cache.commit(commit)
        self.keys = np.concatenate([self.keys, keys[:, :, :commit]], axis=2)
        self.values = np.concatenate([self.values, values[:, :, :commit]], axis=2)
        assert (cache.length, cache.pending) == (self.length, 0)

    def cut(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


@pytest.mark.parametrize("window", [1, 2, 7, 16, 128, 300])
def test_random_writes_commits_and_rewinds_equal_a_list_of_rows(window: int) -> None:
    rng = np.random.default_rng(window)
    cache, rows = WindowCache(window), Rows()
    rewinds = partial = wrapped = 0
    for _ in range(300):
        if rng.random() < 0.1:
            length = max(0, rows.length - int(rng.integers(1, REWIND_ROWS)))
            if cache.rewind(length):
                rows.cut(length)
                rewinds += 1
        count = int(rng.choice([1, 2, 8, 16, 70, 3 * window]))
        n = int(rng.integers(0, count + 1))
        rows.write(cache, count, n)
        partial += n < count
        wrapped += rows.length > window
    assert min(rewinds, partial) > 10
    assert wrapped > 100
    assert cache.start > 0


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("before", [0, 3, 15, 16, 17, 40, 500])
def test_every_count_can_be_committed(window: int, before: int) -> None:
    block = 12
    for n in range(block + 1):
        cache, rows = WindowCache(window), Rows(n)
        while rows.length < before:
            rows.write(cache, min(64, before - rows.length), min(64, before - rows.length))
        for commit in (n, 0, n):
            rows.write(cache, block, commit)
        rows.write(cache, 1, 1)


@pytest.mark.parametrize("before", [100, 2 * GROWTH_ROWS])
@pytest.mark.parametrize("depth", [0, 1, 15, 16, REWIND_ROWS])
def test_rewinding_behind_a_wrapped_window_is_exact(depth: int, before: int) -> None:
    cache, rows = WindowCache(16), Rows()
    for _ in range(before // 4):
        rows.write(cache, 7, 4)
    rows.write(cache, 7, 0)
    assert cache.rewind(rows.length - depth)
    rows.cut(rows.length - depth)
    rows.write(cache, 9, 3)


@pytest.mark.parametrize("window", [1, 16, 128])
def test_how_far_it_goes_back_does_not_depend_on_how_rows_were_written(window: int) -> None:
    """Or one sequence would be shortened where the same one, decoded in blocks, starts afresh."""
    rng = np.random.default_rng(window)
    single, blocks = WindowCache(window), WindowCache(window)
    shape, outcomes = (1, 1, 16, 1), set()

    def grow(cache: WindowCache, rows: int, block: int) -> None:
        while rows:
            n = min(rows, block, int(rng.integers(1, 9)))
            cache.write(*[mx.zeros(shape)[:, :, :block]] * 2)
            cache.commit(n)
            rows -= n

    starts = set()
    for _ in range(60):
        rows = int(rng.integers(1, 40))
        grow(single, rows, 1)
        grow(blocks, rows, 16)
        starts.add((single.start, blocks.start))
        assert single.length == blocks.length
        answers = [[c.can_rewind(n) for n in range(c.length + 2)] for c in (single, blocks)]
        assert answers[0] == answers[1]
        assert all(c.start <= max(0, answers[0].index(True) - window + 1) for c in (single, blocks))
        if rng.random() < 0.3:
            length = max(0, single.length - int(rng.integers(1, 100)))
            outcomes.add(single.rewind(length))
            assert blocks.rewind(length) in outcomes
            assert single.length == blocks.length
    assert outcomes == {True, False}
    assert any(a != b for a, b in starts)


def test_a_rewind_to_rows_that_are_gone_is_refused_and_changes_nothing() -> None:
    cache, rows = WindowCache(16), Rows()
    for _ in range(GROWTH_ROWS):
        rows.write(cache, 4, 4)
    assert not cache.rewind(20)
    rows.write(cache, 4, 2)


def test_a_second_write_replaces_the_pending_rows() -> None:
    cache, rows = WindowCache(4), Rows()
    rows.write(cache, 10, 10)
    keys, values = rows.fresh(5)
    cache.write(mx.array(keys), mx.array(values))
    rows.write(cache, 3, 3)
    rows.write(cache, 1, 1)


def test_rows_handed_out_do_not_change_when_later_ones_are_written() -> None:
    """A forward still in flight keeps its rows when the next one overwrites rejected ones."""
    cache, rows = WindowCache(4), Rows()
    rows.write(cache, 10, 10)
    keys, values = rows.fresh(6)
    later, later_values = rows.fresh(6)
    seen = cache.write(mx.array(keys), mx.array(values))
    cache.commit(2)
    mx.eval(cache.write(mx.array(later), mx.array(later_values)))
    assert np.array_equal(np.array(seen[0])[:, :, 3:], keys)
    assert np.array_equal(np.array(seen[1])[:, :, 3:], values)


@pytest.mark.parametrize("n", [-1, 4])
def test_commit_outside_the_pending_rows_is_refused(n: int) -> None:
    cache, rows = WindowCache(4), Rows()
    keys, values = rows.fresh(3)
    cache.write(mx.array(keys), mx.array(values))
    with pytest.raises(ValueError, match=rf"commit\({n}\) with 3 pending rows"):
        cache.commit(n)


def test_a_window_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0 positions"):
        WindowCache(0)


def room(window: int) -> int:
    """Bytes of a window, what a rewind needs, and the room that keeps copies rare."""
    return ROW_BYTES * (window - 1 + REWIND_ROWS + max(SPARE_ROWS, window // 8))


@pytest.mark.parametrize("window", [16, 128, 1000])
@pytest.mark.parametrize("chunk", [16, 512])
def test_bytes_do_not_grow_with_the_cycles(window: int, chunk: int) -> None:
    cache, rows, held = WindowCache(window), Rows(), {}
    # Long enough for the window to be full before the first count.
    for _ in range(-(-(window + 2 * chunk) // chunk)):
        rows.write(cache, chunk, chunk)
    for cycle in range(1, 501):
        rows.write(cache, 16, cycle % 17)
        held[cycle] = cache.nbytes
    assert max(held.values()) <= room(window)
    assert max(c for n, c in held.items() if n > 50) <= max(c for n, c in held.items() if n <= 50)
    assert cache.nbytes == sum(a.nbytes for a in cache.arrays())


@pytest.mark.parametrize("window", [16, 128, 1000])
def test_a_prompts_room_is_given_back_without_many_copies(window: int, monkeypatch) -> None:
    moves: list[int] = []
    moved = context._moved

    def counted(old, like, stay, capacity):
        moves.append(capacity)
        return moved(old, like, stay, capacity)

    monkeypatch.setattr(context, "_moved", counted)
    cache, rows = WindowCache(window), Rows()
    for chunk in (2048, 700, 300, 2048):
        rows.write(cache, chunk, chunk)
        assert cache.nbytes >= ROW_BYTES * min(chunk, 2048)
        for commit in (1, 0, 16, 3):
            rows.write(cache, 16, commit)
            assert cache.nbytes <= room(window)
        assert not cache.rewind(0)
        assert cache.rewind(rows.length - 16)
        rows.cut(rows.length - 16)
    # Each copy moves keys and values.
    assert len(moves) // 2 <= rows.length // (GROWTH_ROWS // 2)
