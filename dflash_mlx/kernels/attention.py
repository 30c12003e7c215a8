"""Attention of a block's rows to the rows before it and to the block, without joining the two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import Launch, constant, kernel

OPERATION = "block_attention"
# More rows, as in prefill, fill MLX's own kernels. Like the numbers below chosen, not measured.
MAX_ROWS = 32
MAX_HEAD = 256  # query and sums of eight rows stay in registers
SPLIT_KEYS = 256  # keys a threadgroup walks; a multiple of every tile
MAX_SPLITS = 64  # beyond, splits grow: their partial results are memory traffic
TILE_BYTES = 16384  # of threadgroup memory
_ARRAYS = ("queries", "keys", "values", "block_keys", "block_values", "sinks")
_NAMES = (*_ARRAYS, "scale", "origin", "split_keys")


class Sight(NamedTuple):
    """Which keys a query at p sees: j <= p if causal; of a window W those with |p - j| < W."""

    causal: bool
    window: int | None = None


class Rows(NamedTuple):
    """Keys and values [1, Hkv, N, D]; a row's D elements are neighbours in memory."""

    keys: mx.array
    values: mx.array


class Surroundings(NamedTuple):
    """What a block's R queries attend to: `joined`, or `context` (None: nothing) and `block`.

    The block's own R rows are the last of `joined`; the context are the rows right before them.
    """

    context: Rows | None = None
    block: Rows | None = None
    joined: Rows | None = None

    @property
    def kv_heads(self) -> int:
        rows = self.joined or self.block
        assert rows is not None
        return rows.keys.shape[1]

    def apart(self, rows: int) -> tuple[Rows | None, Rows]:
        """Context and block, views of `joined` if that is what there is."""
        if self.joined is None:
            assert self.block is not None
            return self.context, self.block
        before = self.joined.keys.shape[2] - rows
        own = Rows(*(part[:, :, before:] for part in self.joined))
        return Rows(*(part[:, :, :before] for part in self.joined)) if before else None, own

    def together(self) -> Rows:
        """`joined`, made if need be."""
        if self.joined is not None:
            return self.joined
        assert self.block is not None
        if self.context is None:
            return self.block
        pairs = zip(self.context, self.block, strict=True)
        return Rows(*(mx.concatenate(pair, axis=2) for pair in pairs))


def block_attention(
    queries: mx.array,
    around: Surroundings,
    *,
    scale: float,
    sight: Sight,
    position: int,
    sinks: mx.array | None = None,
    exact: bool = False,
) -> mx.array:
    """Queries [1, Hq, R, D] of a block at `position` over what is around: [1, R, Hq·D].

    sinks [Hq]: logits that take part in the softmax and have no value. `exact` (see backend.run):
    a row gets the same bits alone, in any block, and behind a context of any length.
    """
    rows, dim = queries.shape[2], queries.shape[3]

    def twin() -> list[mx.array]:
        return [_operations(queries, around.together(), scale, sight, sinks)]

    some = rows <= MAX_ROWS if exact else 1 < rows <= MAX_ROWS
    if not (some and fits(dim)) or not (exact or backend.is_active(OPERATION)):
        return twin()[0]
    context, block = around.apart(rows)
    shape = (dim, queries.shape[1], around.kv_heads, context is None)
    before = 0 if context is None else context.keys.shape[2]
    plan = plan_of(queries.shape, around.kv_heads, position - before, before, exact)
    variant = (*shape, sight, queries.dtype, sinks is None, plan.splits > 1, plan.simds)
    return backend.run(
        OPERATION,
        variant,
        lambda: [_launch(queries, context, block, scale, sight, plan, sinks)],
        twin,
        launches=plan.launches(tile_bytes(dim, queries.dtype)),
        exact=exact,
    )[0]


def fits(dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return dim % 8 == 0 and dim <= MAX_HEAD


def block_mask(rows: int, visible: int, sight: Sight) -> mx.array | str | None:
    """The attention mask of a block of `rows` behind `visible` rows; None: everything is seen."""
    if sight.window is None or visible + rows <= sight.window:
        return "causal" if sight.causal and rows > 1 else None
    return _window_mask(rows, visible, sight)


# Few, since the mask of a prefill chunk has some hundred kB; blocks of a full window share one.
@lru_cache(maxsize=16)
def _window_mask(rows: int, visible: int, sight: Sight) -> mx.array:
    """[rows, visible + rows] bool. From numpy: it is evaluated, and every thread may use it."""
    assert sight.window is not None
    behind = visible + np.arange(rows)[:, None] - np.arange(visible + rows)[None]
    nearest = 0 if sight.causal else 1 - sight.window
    return mx.array((behind < sight.window) & (behind >= nearest))


def _operations(
    queries: mx.array, whole: Rows, scale: float, sight: Sight, sinks: mx.array | None
) -> mx.array:
    rows = queries.shape[2]
    mask = block_mask(rows, whole.keys.shape[2] - rows, sight)
    out = mx.fast.scaled_dot_product_attention(
        queries, whole.keys, whole.values, scale=scale, mask=mask, sinks=sinks
    )
    return out.transpose(0, 2, 1, 3).reshape(1, rows, -1)


class Plan(NamedTuple):
    """How a block's attention is cut into threadgroups."""

    origin: int  # position of the first context row
    split: int  # keys a split
    splits: int
    simds: int  # simdgroups a threadgroup
    blocks: int  # threadgroups for the query rows of one K/V head
    kv_heads: int
    rows: int  # of queries, all heads together

    def launches(self, memory: int) -> list[Launch]:
        """Of the attention, with `memory` bytes a threadgroup, and of the combination of splits."""
        groups = (self.splits, self.kv_heads, self.blocks)
        first = Launch(groups, (self.simds * 32, 1, 1), memory)
        return [first, Launch((1, self.rows, 1), (32, 1, 1), 0)][: min(self.splits, 2)]


def plan_of(shape: Sequence[int], kv_heads: int, origin: int, before: int, exact: bool) -> Plan:
    """For queries of `shape` behind `before` rows; `exact` cuts alike whatever the length."""
    _, heads, rows, _ = shape
    total, group_rows = before + rows, heads // kv_heads * rows
    split = SPLIT_KEYS if exact else split_keys(total)
    splits = -(-(origin + total) // split) - origin // split
    simds = min(8, max(4, -(-group_rows // 8)))
    blocks = -(-group_rows // (8 * simds))
    return Plan(origin, split, splits, simds, blocks, kv_heads, heads * rows)


def _launch(
    queries: mx.array,
    context: Rows | None,
    block: Rows,
    scale: float,
    sight: Sight,
    plan: Plan,
    sinks: mx.array | None,
) -> mx.array:
    _, heads, rows, dim = queries.shape
    kv_heads, dtype = block.keys.shape[1], queries.dtype
    group = heads // kv_heads
    shared: list[tuple[str, Any]] = [("D", dim), ("GROUP", group), ("KV_HEADS", kv_heads)]
    shared.append(("SINKS", sinks is not None))
    partial = plan.splits > 1
    launch, *combine = plan.launches(tile_bytes(dim, dtype))
    sinks = queries if sinks is None else sinks
    (out,) = kernel(OPERATION, _NAMES, ("out",))(
        inputs=[
            *(queries, *(context or block), *block, sinks),
            *(constant(scale), mx.array(plan.origin), constant(plan.split)),
        ],
        template=[
            *(("T", dtype), ("O", mx.float32 if partial else dtype), *shared),
            *(("TILE", tile_keys(dim, dtype)), ("CAUSAL", sight.causal)),
            *(("WINDOW", sight.window or 0), ("CONTEXT", context is not None)),
            ("PARTIAL", partial),
        ],
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=[
            (plan.splits, kv_heads, group * rows, dim + 2) if partial else (rows, heads, dim)
        ],
        output_dtypes=[mx.float32 if partial else dtype],
    )
    for launch in combine:
        (out,) = kernel("attention_combine", ("partial", "sinks"), ("out",))(
            inputs=[out, sinks],
            template=[("T", dtype), *shared],
            grid=launch.grid,
            threadgroup=launch.threads,
            output_shapes=[(rows, heads, dim)],
            output_dtypes=[dtype],
        )
    return out.reshape(1, rows, heads * dim)


def split_keys(total: int) -> int:
    """Keys a split, so that there are at most about MAX_SPLITS."""
    return SPLIT_KEYS * max(1, -(-total // (SPLIT_KEYS * MAX_SPLITS)))


def tile_keys(dim: int, dtype: mx.Dtype) -> int:
    """Keys a tile: a power of two that fits threadgroup memory, so that it divides the splits."""
    return 32 if 32 * dim * dtype.size <= TILE_BYTES else 16


def tile_bytes(dim: int, dtype: mx.Dtype) -> int:
    return tile_keys(dim, dtype) * dim * dtype.size
