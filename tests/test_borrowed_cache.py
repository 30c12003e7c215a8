"""The cache of a layer that borrows: the lender's rows of this forward, and its own count."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import BorrowedCache, CacheStack, KVCache, WindowCache

WINDOW = 6


def rows(rng: np.random.Generator, count: int) -> list[mx.array]:
    return [mx.array(rng.standard_normal((1, 2, count, 4), np.float32)) for _ in range(2)]


@pytest.mark.parametrize("lender", [KVCache, lambda: WindowCache(WINDOW)], ids=["full", "window"])
def test_reads_what_the_lenders_write_returned_whatever_was_committed(lender) -> None:
    rng, owner = np.random.default_rng(0), lender()
    stack = CacheStack([owner, BorrowedCache(owner)])
    for _ in range(60):
        count = int(rng.choice([1, 3, 8, 20]))
        written = owner.write(*rows(rng, count))
        for seen, array in zip(stack[1].read(), written, strict=True):
            assert np.array_equal(np.array(seen), np.array(array))
        assert stack[1].pending == count
        stack.commit(int(rng.integers(0, count + 1)))
        assert (stack[1].length, stack[1].pending) == (owner.length, 0)
    assert owner.length > 10 * WINDOW
    assert stack.nbytes == owner.nbytes > 0


def test_rewinds_and_refuses_as_other_caches_do() -> None:
    owner = KVCache()
    stack = CacheStack([owner, BorrowedCache(owner)])
    owner.write(*rows(np.random.default_rng(1), 5))
    stack[1].read()
    with pytest.raises(ValueError, match=r"commit\(6\) with 5 pending rows"):
        stack[1].commit(6)
    stack.commit(5)
    assert stack.rewind(2)
    assert stack[1].length == owner.length == 2
    with pytest.raises(ValueError, match=r"commit\(1\) with 0 pending rows"):
        stack[1].commit(1)
