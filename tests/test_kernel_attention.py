"""kernels.block_attention: the kernels, run on the CPU harness, against float64 and their twin."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import SCHEDULES, Mode
from metal_kernels import (
    ROUNDING,
    assert_near,
    exact,
    kernels_on_cpu,
    launches,
    random,
    single,
)

from dflash_mlx.cache import KVCache, WindowCache
from dflash_mlx.kernels import Rows, Sight, Surroundings, attention, block_attention, block_mask

pytestmark = pytest.mark.metal_cpu

FULL, CAUSAL = Sight(False), Sight(True)
# Every pair of a type, a head size and a shape; one row goes to the kernel in exact mode only.
EXACT_CASES = [
    (dtype, dim, rows, context)
    for i, dtype in enumerate(ROUNDING)
    for j, dim in enumerate((64, 96, 128, 256))
    for k, (rows, context) in enumerate([(1, 0), (1, 300), (3, 43)])
    if (i + j + k) % 3 == 0
]


def _inputs(
    heads: int, kv_heads: int, dim: int, rows: int, context: int, dtype: mx.Dtype
) -> tuple[mx.array, Rows | None, Rows]:
    """Queries, the context as a view of a larger buffer, and the block as q/k/v projections are."""
    queries = random((1, rows, heads, dim), dtype, 1, 2.0).transpose(0, 2, 1, 3)
    buffers = [random((1, kv_heads, context + 37, dim), dtype, seed) for seed in (2, 3)]
    before = Rows(*(b[:, :, 5 : 5 + context] for b in buffers)) if context else None
    block = [random((1, rows, kv_heads, dim), dtype, seed) for seed in (4, 5)]
    return queries, before, Rows(*(b.transpose(0, 2, 1, 3) for b in block))


def _reference(
    queries: mx.array,
    context: Rows | None,
    block: Rows,
    scale: float,
    sight: Sight,
    sinks: mx.array | None,
) -> tuple[np.ndarray, np.ndarray]:
    """[R, Hq·D] in float64, and the same sums with absolute values."""
    q = exact(queries[0])
    k, v = (
        np.concatenate([exact(part[i][0]) for part in (context, block) if part is not None], axis=1)
        for i in (0, 1)
    )
    group, rows, total = len(q) // len(k), q.shape[1], k.shape[1]
    k, v = (np.repeat(part, group, axis=0) for part in (k, v))
    behind = (total - rows + np.arange(rows))[:, None] - np.arange(total)[None]
    seen = np.ones_like(behind, bool)
    if sight.causal:
        seen &= behind >= 0
    if sight.window is not None:
        seen &= np.abs(behind) < sight.window
    scores = np.where(seen, np.einsum("hrd,hnd->hrn", q, k) * scale, -np.inf)
    sink = np.full((len(q), 1, 1), -np.inf) if sinks is None else exact(sinks)[:, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    shares = np.exp(scores - top)
    shares /= shares.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    out, size = shares @ v, shares @ np.abs(v)
    # An error of the scores, a sum themselves, acts on every share.
    size *= 1 + (np.abs(q) @ np.abs(k).transpose(0, 2, 1)).max(axis=-1, keepdims=True) * scale
    return tuple(part.transpose(1, 0, 2).reshape(rows, -1) for part in (out, size))


def _twin(
    queries: mx.array,
    context: Rows | None,
    block: Rows,
    *,
    position: int,
    sinks: mx.array | None = None,
    **given: Any,
) -> mx.array:
    """MLX's operations on the same numbers in float32."""
    held, own = (rows and Rows(*map(single, rows)) for rows in (context, block))
    around, sinks = Surroundings(held, own), None if sinks is None else single(sinks)
    return block_attention(single(queries), around, position=position, sinks=sinks, **given)


def _check(
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    context: int,
    dtype: mx.Dtype,
    sight: Sight = FULL,
    *,
    sinks: bool = False,
    position: int | None = None,
    exact_rows: bool = False,
) -> None:
    queries, before, block = _inputs(heads, kv_heads, dim, rows, context, dtype)
    given: dict[str, Any] = {"scale": dim**-0.5, "sight": sight}
    # Above the highest score of a row, and below.
    given["sinks"] = mx.array([9.0, -3.0] * heads)[:heads].astype(dtype) if sinks else None
    at = context if position is None else position
    twin = _twin(queries, before, block, position=at, **given)
    with kernels_on_cpu() as made:
        around = Surroundings(before, block)
        found = block_attention(queries, around, position=at, exact=exact_rows, **given)
    assert launches(made)["block_attention"] == 1
    want, size = _reference(queries, before, block, **given)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_each_type_and_head_size(dtype: mx.Dtype, dim: int) -> None:
    _check(4, 2, dim, 5, 43, dtype, sinks=dim == 64)


@pytest.mark.parametrize(("dtype", "dim", "rows", "context"), EXACT_CASES)
def test_rows_in_exact_form(dtype: mx.Dtype, dim: int, rows: int, context: int) -> None:
    sight = Sight(True, 70) if dim == 128 else CAUSAL
    _check(4, 2, dim, rows, context, dtype, sight, sinks=dim == 64, exact_rows=True)


@pytest.mark.parametrize(
    ("sight", "context"),
    [
        (CAUSAL, 0),
        (CAUSAL, 61),
        (Sight(True, 20), 47),
        (Sight(False, 20), 47),
        (Sight(True, 4), 3),
        (Sight(False, 3), 30),
    ],
)
def test_each_sight(sight: Sight, context: int) -> None:
    _check(2, 1, 64, 7, context, mx.float32, sight, sinks=context == 47)


def test_queries_with_any_strides() -> None:
    _, before, block = _inputs(4, 2, 64, 5, 20, mx.float32)
    queries = random((1, 64, 5, 4), mx.float32, 7).transpose(0, 3, 2, 1)
    around = Surroundings(before, block)
    twin = block_attention(queries, around, scale=0.125, sight=CAUSAL, position=20)
    with kernels_on_cpu() as made:
        found = block_attention(queries, around, scale=0.125, sight=CAUSAL, position=20)
    assert launches(made)["block_attention"] == 1
    want, size = _reference(queries, before, block, 0.125, CAUSAL, None)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


# Two and three splits, a split that begins inside the window, positions behind a dropped context.
@pytest.mark.parametrize(
    ("rows", "context", "sight", "position"),
    [
        (3, 250, CAUSAL, 999),
        (16, 600, FULL, None),
        (4, 300, Sight(True, 200), 1000),
        (5, 290, Sight(False, 270), 771),
        (2, 511, CAUSAL, None),
    ],
)
def test_splits_of_a_longer_context(
    rows: int, context: int, sight: Sight, position: int | None
) -> None:
    _check(3, 1, 64, rows, context, mx.float32, sight, sinks=rows == 4, position=position)


# With the real shapes below, each type and each head size in splits.
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (mx.float16, 64),
        (mx.float16, 96),
        (mx.float16, 128),
        (mx.float16, 256),
        (mx.bfloat16, 96),
        (mx.float32, 96),
        (mx.float32, 256),
    ],
)
def test_splits_of_each_type_and_head_size(
    dtype: mx.Dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)
    _check(2, 1, dim, 3, 69, dtype, CAUSAL, sinks=dim == 96)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(mx.float16, 64), (mx.float16, 96), (mx.bfloat16, 128), (mx.bfloat16, 256)],
)
def test_blocks_without_a_context(dtype: mx.Dtype, dim: int) -> None:
    _check(4, 2, dim, 7, 0, dtype, CAUSAL, sinks=dim == 64)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_block_without_a_context_across_the_end_of_a_split(dtype: mx.Dtype) -> None:
    """As of rows whose context a window dropped; splits begin at absolute positions."""
    _check(2, 1, 64, 12, 0, dtype, CAUSAL, position=attention.SPLIT_KEYS - 5)


# (query heads, K/V heads, head size, rows) of Qwen3-8B and its drafter, Qwen3.5-9B, gpt-oss-20b and
# SmolLM2 with one K/V head each, and all rows of a block.
@pytest.mark.parametrize(
    ("heads", "dim", "rows", "sight", "sinks"),
    [
        (4, 128, 16, FULL, False),
        (4, 256, 16, CAUSAL, False),
        (8, 64, 16, Sight(True, 128), True),
        (3, 64, 8, CAUSAL, False),
    ],
)
def test_real_shapes(heads: int, dim: int, rows: int, sight: Sight, sinks: bool) -> None:
    _check(heads, 1, dim, rows, 270, mx.bfloat16, sight, sinks=sinks)


@pytest.mark.parametrize("window", [None, 24])
def test_views_of_real_caches(window: int | None) -> None:
    """What a cache's write returns, cut into context and block, also after the window wrapped."""
    cache = KVCache() if window is None else WindowCache(window)
    sight, rows = Sight(True, window), 6
    for step, written in enumerate((19, 30, 1, rows)):
        if step:
            cache.commit(cache.pending)
        new = [random((1, 2, written, 64), mx.float32, 10 * step + i) for i in (0, 1)]
        joined = Rows(*cache.write(*new))
    around = Surroundings(joined=joined)
    queries = random((1, 4, rows, 64), mx.float32, 99)
    given: dict[str, Any] = {"scale": 0.125, "sight": sight}
    twin = block_attention(queries, around, position=cache.length, **given)
    with kernels_on_cpu() as made:
        found = block_attention(queries, around, position=cache.length, **given)
    assert launches(made)["block_attention"] == 1
    want, size = _reference(queries, *around.apart(rows), sinks=None, **given)
    assert_near(found[0], want, size)
    assert_near(twin[0], want, size)


# Five heads of a group and sixteen rows take two threadgroups.
@pytest.mark.parametrize(
    ("heads", "dim", "window", "type_"),
    [
        (2, 64, None, mx.float32),
        (2, 64, 70, mx.float32),
        (5, 128, None, mx.bfloat16),
        (3, 96, 40, mx.float16),
        (2, 256, None, mx.bfloat16),
    ],
)
def test_a_row_has_the_same_bits_at_any_place_of_a_block(
    heads: int, dim: int, window: int | None, type_: mx.Dtype
) -> None:
    """Rows decoded one at a time, in blocks of 1 to 16, and behind a context that lost rows."""
    end = 300
    queries, before, block = _inputs(heads, 1, dim, end, 0, type_)
    del before
    sinks = random((heads,), type_, 6)

    def rows(first: int, last: int, held: int) -> mx.array:
        context = Rows(*(part[:, :, held:first] for part in block))
        own = Rows(*(part[:, :, first:last] for part in block))
        around = Surroundings(context, own)
        return block_attention(
            queries[:, :, first:last],
            around,
            scale=0.125,
            sight=Sight(True, window),
            position=first,
            sinks=sinks,
            exact=True,
        )[0]

    with kernels_on_cpu(Mode.FAST):
        blocks = [(240, 16), (284, 16), *((256 - n // 2, n) for n in range(1, 16))]
        alone = {
            at: rows(at, at + 1, 0)
            for first, count in blocks
            for at in {first, first + count // 2, first + count - 1}
        }
        for first, count in blocks:
            found = rows(first, first + count, first - window + 1 if window else 0)
            met = [at for at in alone if first <= at < first + count]
            assert {first, first + count - 1} <= set(met)
            for at in met:
                assert mx.array_equal(found[at - first], alone[at][0])


def test_a_row_has_the_same_bits_behind_many_splits() -> None:
    queries, before, block = _inputs(2, 1, 64, 2600, 0, mx.float32)
    del before

    def rows(first: int, last: int) -> mx.array:
        context, own = (
            Rows(*(part[:, :, some] for part in block))
            for some in (slice(first), slice(first, last))
        )
        given: dict[str, Any] = {"scale": 0.125, "sight": CAUSAL, "exact": True}
        around = Surroundings(context, own)
        return block_attention(queries[:, :, first:last], around, position=first, **given)[0]

    with kernels_on_cpu(Mode.FAST):
        found = rows(2552, 2568)  # ten splits end at 2560
        for at in (2552, 2559, 2560, 2567):
            assert mx.array_equal(found[at - 2552], rows(at, at + 1)[0])


def test_every_schedule_gives_the_same_bits() -> None:
    queries, before, block = _inputs(4, 2, 64, 5, 280, mx.bfloat16)
    results = []
    for schedule in SCHEDULES:
        with kernels_on_cpu(Mode.FAST, schedule):
            results.append(
                block_attention(
                    queries, Surroundings(before, block), scale=0.125, sight=CAUSAL, position=280
                )
            )
    assert all(mx.array_equal(found, results[0]) for found in results)


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (attention.MAX_ROWS + 1, 64), (4, 512)])
def test_shapes_for_mlx_own_kernels_go_to_the_twin(rows: int, dim: int) -> None:
    queries, before, block = _inputs(1, 1, dim, rows, 9, mx.float32)
    with kernels_on_cpu() as made:
        found = block_attention(
            queries, Surroundings(before, block), scale=0.1, sight=CAUSAL, position=9
        )
    assert made == []
    want, size = _reference(queries, before, block, 0.1, CAUSAL, None)
    assert_near(found[0], want, size)


def test_apart_and_together_are_the_same_rows() -> None:
    queries, before, block = _inputs(2, 1, 64, 4, 11, mx.float32)
    apart = Surroundings(before, block)
    joined = Surroundings(joined=apart.together())
    given: dict[str, Any] = {"scale": 0.125, "sight": CAUSAL, "position": 11}
    results = [block_attention(queries, around, **given) for around in (apart, joined)]
    with kernels_on_cpu(Mode.FAST):
        kernels = [block_attention(queries, around, **given) for around in (apart, joined)]
    assert mx.array_equal(*results)
    assert mx.array_equal(*kernels)
    assert joined.apart(11 + 4)[0] is None


def test_block_mask_by_brute_force() -> None:
    for window in (None, 1, 3, 6, 20):
        for context in (0, 2, 5, 11):
            visible = context if window is None else min(context, window - 1)
            for causal in (False, True):
                mask = block_mask(4, visible, Sight(causal, window))
                for row in range(4):
                    for column in range(visible + 4):
                        p, j = context + row, context - visible + column
                        near = window is None or abs(p - j) < window
                        want = near and (j <= p or not causal)
                        if mask is None:
                            assert want
                        elif isinstance(mask, str):
                            assert want == (j <= p)
                        else:
                            assert mask[row, column].item() is want


@pytest.mark.parametrize("total", [1, 255, 16384, 16385, 40960, 100_003, 262_144])
def test_splits_are_few_and_of_whole_tiles(total: int) -> None:
    split = attention.split_keys(total)
    assert -(-total // split) <= attention.MAX_SPLITS
    for dim in (64, 96, 128, 256):
        for dtype in ROUNDING:
            assert split % attention.tile_keys(dim, dtype) == 0


@pytest.mark.parametrize(("splits", "dtype"), [(2, mx.float32), (64, mx.bfloat16)])
def test_long_contexts(splits: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that have grown, as beyond 16,384 keys, and many of them."""
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(attention, "MAX_SPLITS", splits)
    _check(2, 1, 64, 3, 1291, dtype, CAUSAL)
