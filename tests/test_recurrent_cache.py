"""The recurrent cache against numpy and against rows run one at a time, for every commit."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import CacheStack, DeltaRows, KVCache, RecurrentCache
from dflash_mlx.kernels import replay

HK, HV, DK, DV, TAPS = 2, 6, 8, 12, 4
CHANNELS = 2 * HK * DK + HV * DV


class Rows:
    """Random inputs of `count` rows, with decays that matter and keys of unit length."""

    def __init__(self, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal((1, count, *shape)).astype(np.float32)

        def unit(x: np.ndarray) -> np.ndarray:
            return x / np.linalg.norm(x, axis=-1, keepdims=True)

        self.count = count
        self.inputs = normal(CHANNELS)
        self.parts = [
            unit(normal(HK, DK)),
            unit(normal(HK, DK)),
            normal(HV, DV),
            1 / (1 + np.exp(-2 - normal(HV))),
            1 / (1 + np.exp(-normal(HV))),
        ]

    def run(self, cache: RecurrentCache, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """One forward over rows start .. stop - 1: the conv window and y."""
        window = cache.window(mx.array(self.inputs[:, start:stop]))
        rows = DeltaRows(*(mx.array(part[:, start:stop]) for part in self.parts))
        return np.array(window), np.array(cache.advance(rows))

    def expected(self, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """y of the first rows and the state behind them, in float64, from the definition."""
        q, k, v, decay, beta = (part[0, :stop].astype(np.float64) for part in self.parts)
        state, out = np.zeros((HV, DV, DK)), np.zeros((stop, HV, DV))
        for t in range(stop):
            for head in range(HV):
                of_key = head // (HV // HK)
                held = decay[t, head] * state[head]
                error = v[t, head] - held @ k[t, of_key]
                state[head] = held + beta[t, head] * np.outer(error, k[t, of_key])
                out[t, head] = state[head] @ q[t, of_key]
        return out, state


def one_at_a_time(rows: Rows, stop: int) -> RecurrentCache:
    cache = RecurrentCache(TAPS)
    for t in range(stop):
        rows.run(cache, t, t + 1)
        cache.commit(1)
    return cache


def same_state(a: RecurrentCache, b: RecurrentCache) -> bool:
    if a.state is None or b.state is None:
        return a.state is b.state and a.tail is b.tail
    assert a.tail is not None
    assert b.tail is not None
    return bool(mx.array_equal(a.state, b.state)) and bool(mx.array_equal(a.tail, b.tail))


def test_rows_follow_the_definition() -> None:
    rows = Rows(20)
    cache = RecurrentCache(TAPS)
    out = [rows.run(cache, a, b)[1] for a, b in [(0, 7)]]
    cache.commit(7)
    out.append(rows.run(cache, 7, 20)[1])
    cache.commit(13)
    expected, state = rows.expected(20)
    assert np.abs(np.concatenate(out, axis=1)[0] - expected).max() <= 1e-5
    assert np.abs(np.array(cache.state)[0] - state).max() <= 1e-5
    assert cache.state is not None
    assert cache.state.dtype == mx.float32
    assert np.array_equal(np.array(cache.tail), rows.inputs[:, 17:20])


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("block", [1, 2, 5, 16])
def test_commit_of_any_count_equals_rows_one_at_a_time_bit_for_bit(before: int, block: int) -> None:
    rows = Rows(before + block + 3)
    for n in range(block + 1):
        cache = RecurrentCache(TAPS)
        if before:
            rows.run(cache, 0, before)
            cache.commit(before)
        rows.run(cache, before, before + block)
        assert (cache.length, cache.pending) == (before, block)
        cache.commit(n)
        assert (cache.length, cache.pending) == (before + n, 0)
        single = one_at_a_time(rows, before + n)
        assert same_state(cache, single)
        # What comes next sees the same, too.
        seen = rows.run(cache, before + n, before + n + 3)
        wanted = rows.run(single, before + n, before + n + 3)
        assert all(np.array_equal(a, b) for a, b in zip(seen, wanted, strict=True))


def test_random_forwards_and_commits_equal_rows_one_at_a_time() -> None:
    rng = np.random.default_rng(3)
    rows, cache, partial = Rows(240, seed=4), RecurrentCache(TAPS), 0
    while cache.length + 16 <= rows.count:
        count = int(rng.choice([1, 2, 3, 8, 16]))
        n = int(rng.integers(0, count + 1))
        rows.run(cache, cache.length, cache.length + count)
        if rng.random() < 0.2:  # a forward that a second one replaces
            rows.run(cache, cache.length, cache.length + count)
        cache.commit(n)
        partial += n < count
    assert partial > 20
    assert same_state(cache, one_at_a_time(rows, cache.length))


def test_the_window_holds_the_inputs_before_and_zeros_at_the_beginning() -> None:
    rows, cache = Rows(8), RecurrentCache(TAPS)
    window, _ = rows.run(cache, 0, 2)
    padded = np.concatenate([np.zeros((1, TAPS - 1, CHANNELS), np.float32), rows.inputs], axis=1)
    assert np.array_equal(window, padded[:, : TAPS - 1 + 2])
    cache.commit(1)  # Fewer rows than the window is long.
    window, _ = rows.run(cache, 1, 8)
    assert np.array_equal(window, padded[:, 1:])


@pytest.mark.parametrize("n", [-1, 4])
def test_commit_outside_the_pending_rows_is_refused(n: int) -> None:
    rows, cache = Rows(3), RecurrentCache(TAPS)
    rows.run(cache, 0, 3)
    with pytest.raises(ValueError, match=rf"commit\({n}\) with 3 pending rows"):
        cache.commit(n)


def test_it_goes_back_nowhere_and_says_so() -> None:
    rows, cache = Rows(9), RecurrentCache(TAPS)
    rows.run(cache, 0, 5)
    cache.commit(5)
    rows.run(cache, 5, 9)
    for length in (0, 4, 6):
        assert not cache.rewind(length)
        assert (cache.length, cache.pending) == (5, 4)
    assert cache.rewind(5)
    assert (cache.length, cache.pending) == (5, 0)
    assert same_state(cache, one_at_a_time(rows, 5))
    stack = CacheStack([KVCache(), cache])
    stack.length = 5
    assert stack.rewind(5)
    assert not stack.rewind(4)


@pytest.mark.parametrize("n", [0, 3, 6])
def test_commit_evaluates_nothing(n: int) -> None:
    """While MLX traces a function, evaluating any array in it is an error."""
    rows, lengths = Rows(6), []

    def traced(inputs: mx.array, *parts: mx.array) -> list[mx.array]:
        cache = RecurrentCache(TAPS)
        cache.window(inputs)
        out = cache.advance(DeltaRows(*parts))
        cache.commit(n)
        lengths.append(cache.length)
        return [out, *cache.arrays()]

    assert mx.compile(traced)(mx.array(rows.inputs), *map(mx.array, rows.parts))
    assert lengths == [n]
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda x: [x, mx.array(x.item())])(mx.array(1.0))


@pytest.mark.parametrize("n", [0, 5, 16])
def test_memory_is_constant_over_cycles(n: int) -> None:
    rows, cache = Rows(16), RecurrentCache(TAPS)
    measured = []
    for cycle in range(1, 501):
        window = cache.window(mx.array(rows.inputs))
        out = cache.advance(DeltaRows(*(mx.array(part) for part in rows.parts)))
        mx.eval(out, window)
        del out, window
        cache.commit(n)
        if cycle in (50, 500):
            mx.eval(cache.arrays())
            gc.collect()
            mx.clear_cache()
            measured.append((cache.nbytes, mx.get_active_memory()))
    assert measured[0] == measured[1]
    held = 4 * (HV * DV * DK + (TAPS - 1) * CHANNELS) if n else 0
    assert cache.nbytes == held
    assert cache.length == 500 * n


@pytest.mark.parametrize("n", range(6))
def test_until_the_commit_one_more_state_is_held_for_commits_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    rows, cache, again = Rows(9), RecurrentCache(TAPS), []
    rows.run(cache, 0, 4)
    cache.commit(4)
    rows.run(cache, 4, 9)
    state, tail = 4 * HV * DV * DK, 4 * (TAPS - 1) * CHANNELS
    block = 4 * 5 * (CHANNELS + 2 * HK * DK + HV * DV + 2 * HV)
    assert cache.nbytes == 2 * (state + tail) + block

    def counted(*given: object, **named: bool) -> mx.array:
        again.append(given[3])
        return replay(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("dflash_mlx.cache.recurrent.replay", counted)
    cache.commit(n)
    assert again == ([n] if 0 < n < 5 else [])
    assert cache.nbytes == state + tail


def test_committed_rows_of_a_long_prefill_are_freed() -> None:
    """The tail is a copy; a view of the window would keep all of its rows in memory."""
    rows, cache = Rows(300), RecurrentCache(TAPS)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    rows.run(cache, 0, 300)
    cache.commit(300)
    mx.eval(cache.arrays())
    gc.collect()
    assert mx.get_active_memory() - before <= cache.nbytes + 4096
