"""The gated delta rule over a block's rows, and again over those of them that were accepted.

S <- g S,  d = beta (v - S k),  S <- S + d k^T,  y = S q      (arXiv 2412.06464)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.kernels import backend
from dflash_mlx.kernels.source import Launch, kernel

ADVANCE, REPLAY = "gated_delta_advance", "gated_delta_replay"
SIMDGROUPS = 4  # of a threadgroup; chosen, not measured
# Longer runs, as in prefill, go to MLX's own kernel, which was made for them. Chosen, not measured.
MAX_ROWS = 32


class DeltaRows(NamedTuple):
    """What T rows bring to the recurrence, all float32.

    In 16 bits a decay near 1 would round to 1 and forget nothing.
    """

    queries: mx.array  # [1, T, Hk, Dk], scaled
    keys: mx.array  # [1, T, Hk, Dk]
    values: mx.array  # [1, T, Hv, Dv]
    decay: mx.array  # [1, T, Hv], g in 0 .. 1
    beta: mx.array  # [1, T, Hv], in 0 .. 1

    def first(self, n: int) -> DeltaRows:
        return DeltaRows(*(rows[:, :n] for rows in self))


class Advance(NamedTuple):
    """The recurrence over T rows; `changes` is what the kernel recorded for a replay."""

    out: mx.array  # y [1, T, Hv, Dv]
    end: mx.array  # S behind the rows [1, Hv, Dv, Dk]
    changes: mx.array | None  # d [1, T, Hv, Dv]


def advance(rows: DeltaRows, start: mx.array | None, *, exact: bool = False) -> Advance:
    """Run the rows from the state `start` [1, Hv, Dv, Dk], None for zeros.

    exact (see backend.run): T rows at once and one by one have the same bits.
    """
    if rows.keys.shape[1] > MAX_ROWS or not (exact or backend.is_active(ADVANCE)):
        return Advance(*_operations(rows, start), None)
    out, end, *recorded = backend.run(
        ADVANCE,
        _variant(rows, start),
        lambda: _advance(rows, start),
        lambda: _operations(rows, start),
        launches=[launch_of(*rows.values.shape[2:])],
        exact=exact,
    )
    return Advance(out, end, recorded[0] if recorded else None)


def replay(
    rows: DeltaRows,
    start: mx.array | None,
    changes: mx.array | None,
    n: int,
    *,
    exact: bool = False,
) -> mx.array:
    """The state behind the first `n` rows of a run from `start`, as if only they had run.

    `changes`: what that run recorded. exact: the state has the bits of that run's.
    """
    first = rows.first(n)
    if changes is None or not (exact or backend.is_active(REPLAY)):
        return _operations(first, start)[1]
    return backend.run(
        REPLAY,
        _variant(rows, start),
        lambda: [_replay(rows, changes, start, n)],
        lambda: _operations(first, start)[1:],
        launches=[launch_of(*rows.values.shape[2:])],
        exact=exact,
    )[0]


def launch_of(heads: int, dim: int) -> Launch:
    """Both kernels' launch: a simdgroup for each of the `dim` rows of all heads' states."""
    return Launch((1, -(-heads * dim // SIMDGROUPS), 1), (32, SIMDGROUPS, 1), 0)


def _operations(rows: DeltaRows, start: mx.array | None) -> list[mx.array]:
    return list(mx.fast.gated_delta_update(*rows, initial_state=start))


def _variant(rows: DeltaRows, start: mx.array | None) -> tuple[Any, ...]:
    return (*rows.keys.shape[2:], *rows.values.shape[2:], start is None)


def _template(rows: DeltaRows, start: mx.array | None) -> list[tuple[str, Any]]:
    """Of both kernels."""
    (key_heads, key_dim), (heads, dim) = rows.keys.shape[2:], rows.values.shape[2:]
    sizes = [("HK", key_heads), ("HV", heads), ("DK", key_dim), ("DV", dim)]
    return [*sizes, ("START", start is not None)]


def _grid(rows: DeltaRows) -> dict[str, tuple[int, int, int]]:
    """Of both kernels; states are rows of all heads, and no simdgroup is idle."""
    heads, dim = rows.values.shape[2:]
    return {"grid": (32, heads * dim, 1), "threadgroup": launch_of(heads, dim).threads}


def _advance(rows: DeltaRows, start: mx.array | None) -> list[mx.array]:
    arrays = [mx.contiguous(part) for part in rows]
    names = ("queries", "keys", "values", "decay", "beta", "start")
    shape = (1, rows.values.shape[2], rows.values.shape[3], rows.keys.shape[3])
    return kernel(ADVANCE, names, ("out", "end", "changes"))(
        inputs=[*arrays, rows.decay if start is None else start],
        template=_template(rows, start),
        **_grid(rows),
        output_shapes=[rows.values.shape, shape, rows.values.shape],
        output_dtypes=[mx.float32] * 3,
    )


def _replay(rows: DeltaRows, changes: mx.array, start: mx.array | None, n: int) -> mx.array:
    shape = (1, rows.values.shape[2], rows.values.shape[3], rows.keys.shape[3])
    (end,) = kernel(REPLAY, ("keys", "decay", "changes", "start", "rows"), ("end",))(
        inputs=[
            *(mx.contiguous(rows.keys), mx.contiguous(rows.decay), changes),
            *(rows.decay if start is None else start, mx.array(n)),
        ],
        template=_template(rows, start),
        **_grid(rows),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
    )
    return end
