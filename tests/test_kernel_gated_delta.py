"""kernels.gated_delta: advance and replay on the CPU harness, against float64 and their twin."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import SCHEDULES, Mode
from metal_kernels import assert_near, exact, kernels_on_cpu, launches, random

from dflash_mlx.kernels import DeltaRows, advance, replay

pytestmark = pytest.mark.metal_cpu


def _rows(count: int, key_heads: int, heads: int, key_dim: int, dim: int) -> DeltaRows:
    parts = [
        random((1, count, key_heads, key_dim), mx.float32, seed, key_dim**-0.5) for seed in (1, 2)
    ]
    values = random((1, count, heads, dim), mx.float32, 3)
    decay, beta = (mx.sigmoid(random((1, count, heads), mx.float32, seed) + 1) for seed in (4, 5))
    return DeltaRows(*parts, values, decay, beta)


def _state(rows: DeltaRows) -> mx.array:
    return random((1, *rows.values.shape[2:], rows.keys.shape[3]), mx.float32, 6)


def _reference(rows: DeltaRows, start: mx.array | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """y and the last state in float64, each with the size of the sums that it comes from.

    A state's error is at most those of all its sums: a row only makes a former state smaller.
    """
    q, k, v, g, beta = (exact(part[0]) for part in rows)
    heads, (dim, key_dim) = v.shape[1], (v.shape[2], k.shape[2])
    q, k = (np.repeat(part, heads // part.shape[1], axis=1) for part in (q, k))
    state = np.zeros((heads, dim, key_dim)) if start is None else exact(start[0])
    size = np.zeros_like(state)
    out, out_size = [], []
    for t in range(len(v)):
        state, size = (part * g[t][:, None, None] for part in (state, size))
        change = beta[t][:, None] * (v[t] - np.einsum("hdk,hk->hd", state, k[t]))
        terms = np.abs(v[t]) + np.einsum("hdk,hk->hd", np.abs(state), np.abs(k[t]))
        size += np.abs(state) + (beta[t][:, None] * terms)[:, :, None] * np.abs(k[t])[:, None]
        state = state + change[:, :, None] * k[t][:, None]
        out.append(np.einsum("hdk,hk->hd", state, q[t]))
        out_size.append(np.einsum("hdk,hk->hd", np.abs(state) + size, np.abs(q[t])))
    return [(np.stack(out)[None], np.stack(out_size)[None]), (state[None], size[None])]


# Sizes of a Qwen3.5 head, one that fills no SIMD group, and odd ones.
@pytest.mark.parametrize(
    ("count", "key_heads", "heads", "key_dim", "dim"),
    [(16, 1, 2, 128, 128), (5, 2, 6, 8, 12), (3, 1, 1, 37, 5), (1, 1, 3, 64, 1)],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_run_and_replay_against_float64(
    count: int, key_heads: int, heads: int, key_dim: int, dim: int, fresh: bool
) -> None:
    rows = _rows(count, key_heads, heads, key_dim, dim)
    start = None if fresh else _state(rows)
    kept = (count + 1) // 2
    twin = advance(rows, start)
    with kernels_on_cpu() as made:
        ran = advance(rows, start)
        state = replay(rows, start, ran.changes, kept)
    assert launches(made) == {"gated_delta_advance": 1, "gated_delta_replay": 1}
    out, end = _reference(rows, start)
    for got in (ran, twin):
        assert_near(got.out, *out)
        assert_near(got.end, *end)
    again = replay(rows, start, None, kept)
    for got in (state, again):
        assert_near(got, *_reference(rows.first(kept), start)[1])


@pytest.mark.parametrize(("key_dim", "dim"), [(40, 8), (128, 16)])
def test_rows_together_one_by_one_and_replayed_have_the_same_bits(key_dim: int, dim: int) -> None:
    rows = _rows(16, 1, 2, key_dim, dim)
    state = start = _state(rows)
    with kernels_on_cpu(Mode.FAST):
        ran = advance(rows, start)
        for t in range(16):
            single = advance(DeltaRows(*(part[:, t : t + 1] for part in rows)), state)
            state = single.end
            assert mx.array_equal(single.out, ran.out[:, t : t + 1])
            assert mx.array_equal(state, replay(rows, start, ran.changes, t + 1))
            some = advance(rows.first(t + 1), start)
            assert mx.array_equal(some.out, ran.out[:, : t + 1])
            assert mx.array_equal(some.end, state)
        assert mx.array_equal(state, ran.end)


def test_every_schedule_gives_the_same_bits() -> None:
    rows = _rows(4, 1, 2, 40, 6)
    for schedule in SCHEDULES:
        with kernels_on_cpu(Mode.FAST, schedule):
            ran = advance(rows, None)
            if schedule == 0:
                first = ran
            assert all(mx.array_equal(*pair) for pair in zip(ran, first, strict=True))


def test_long_runs_go_to_mlx() -> None:
    rows = _rows(33, 1, 1, 8, 4)
    with kernels_on_cpu() as made:
        ran = advance(rows, None)
        end = replay(rows, None, ran.changes, 33)
    assert made == []
    out, last = _reference(rows, None)
    assert_near(ran.out, *out)
    for got in (ran.end, end):
        assert_near(got, *last)
