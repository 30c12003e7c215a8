"""Context K/V of a drafter against plain lists of rows."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from dflash_mlx.cache.context import REWIND_ROWS, SPARE_ROWS, ContextCache, LayerContext


def rows_at(first: int, count: int) -> tuple[mx.array, mx.array]:
    """K/V [1, 2, count, 3] that name their position; values are the negatives."""
    keys = mx.broadcast_to(mx.arange(first, first + count)[None, None, :, None], (1, 2, count, 3))
    return keys.astype(mx.float32), -keys.astype(mx.float32)


def observe(cache: ContextCache, rows: int) -> None:
    length = cache.length
    for layer in cache.layers:
        kept = layer.rows_kept(rows)
        layer.append(*rows_at(length + rows - kept, kept), rows)


def seen(layer: LayerContext, block: int) -> list[int]:
    """Positions a block sees in this layer; checks both arrays and all heads."""
    keys, values = layer.with_block(*rows_at(layer.length, block))
    assert mx.array_equal(keys, -values).item()
    assert mx.array_equal(keys[:, 0], keys[:, 1]).item()
    return [int(p) for p in keys[0, 0, :, 0].tolist()]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 70, 400])
def test_a_block_sees_its_window_in_temporal_order(window: int | None) -> None:
    cache = ContextCache([window])
    random.seed(str(window))
    length = 0
    for _ in range(120):
        rows = random.choice([1, 1, 1, 3, 8, 40])
        observe(cache, rows)
        length += rows
        first = 0 if window is None else max(0, length - window + 1)
        assert cache.length == length
        assert seen(cache[0], 4) == list(range(first, length + 4))


def test_a_chunk_longer_than_the_window_replaces_it() -> None:
    cache = ContextCache([5, None])
    observe(cache, 9)
    observe(cache, 500)
    assert cache[0].rows_kept(500) == 4 + REWIND_ROWS
    assert seen(cache[0], 2) == [505, 506, 507, 508, 509, 510]
    assert len(seen(cache[1], 2)) == 511
    with pytest.raises(ValueError, match="kept"):
        cache[0].append(*rows_at(509, 100), 100)


def test_windows_stay_bounded_and_full_layers_grow_by_steps() -> None:
    cache = ContextCache([20, None])
    observe(cache, 30)
    sizes, full_sizes = [], set()
    for cycle in range(400):
        observe(cache, 1 + cycle % 8)
        seen(cache[0], 8)
        seen(cache[1], 8)
        mx.eval(cache.arrays())
        sizes.append(cache[0].nbytes)
        full_sizes.add(cache[1].nbytes)
    assert len(set(sizes)) == 1
    row = 2 * 2 * 3 * 4  # K and V, heads, head_dim, bytes
    assert sizes[0] == row * (20 - 1 + REWIND_ROWS + SPARE_ROWS)
    assert cache[1].nbytes <= row * (cache.length * 1.25 + 512)
    assert len(full_sizes) < 9
    assert cache.nbytes == cache[0].nbytes + cache[1].nbytes


def test_rewind_within_reach() -> None:
    cache = ContextCache([6, None])
    observe(cache, 40)
    seen(cache[0], 8)  # a block's rows must not come back as context
    assert cache.rewind(31)
    assert cache.length == cache[1].length == 31
    assert seen(cache[0], 1) == [26, 27, 28, 29, 30, 31]
    observe(cache, 2)
    assert seen(cache[0], 1) == [28, 29, 30, 31, 32, 33]
    assert seen(cache[1], 1) == list(range(34))


def test_rewind_to_rows_a_window_lost_changes_nothing() -> None:
    cache = ContextCache([None, 6])
    observe(cache, 20)
    observe(cache, 300)  # leaves the rows before position 320 - 5 - REWIND_ROWS
    oldest = 320 - 5 - REWIND_ROWS
    for length in (10, oldest + 4):
        assert not cache.rewind(length)
        assert cache.length == cache[0].length == cache[1].length == 320
    assert seen(cache[1], 1) == [315, 316, 317, 318, 319, 320]
    assert cache.rewind(oldest + 5)
    assert seen(cache[1], 1) == list(range(oldest, oldest + 6))


def test_rows_before_a_gap_do_not_come_back() -> None:
    cache = ContextCache([6])
    observe(cache, 20)
    observe(cache, 100)  # positions 20 .. 50 were never computed
    assert not cache.rewind(30)
    assert not cache.rewind(20)
    assert cache.rewind(56)
    assert seen(cache[0], 1) == [51, 52, 53, 54, 55, 56]


def test_a_little_rewind_always_works_after_rows_were_dropped() -> None:
    cache = ContextCache([6])
    for cycle in range(300):
        observe(cache, 1 + cycle % 5)
        seen(cache[0], 8)
        if cycle % 50 == 49:
            length = cache.length - REWIND_ROWS
            assert cache.rewind(length)
            assert seen(cache[0], 1) == list(range(length - 5, length + 1))


def test_rewind_to_the_start_and_beyond_the_end() -> None:
    cache = ContextCache([6, None])
    observe(cache, 10)
    assert cache.rewind(10)
    assert not cache.rewind(11)
    assert cache.rewind(0)
    observe(cache, 3)
    assert seen(cache[0], 1) == seen(cache[1], 1) == [0, 1, 2, 3]


def test_blocks_are_written_in_place() -> None:
    """A copy of the whole buffer for each block would show in the memory in use."""
    cache = ContextCache([None])
    observe(cache, 3000)
    mx.eval(cache.arrays())
    keys, values = rows_at(3000, 4)
    mx.eval(keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        block = cache[0].with_block(keys, values)
        mx.eval(block)
        del block
    assert mx.get_peak_memory() - before < cache.nbytes / 4
