"""The drafter's fc over tapped hidden states that stay apart."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.features import Features
from dflash_mlx.kernels import backend
from dflash_mlx.kernels.matmul import MAX_ROWS, SIMDGROUPS, TILES, Weights, row_tiles, weights_of
from dflash_mlx.kernels.source import Launch, constant, kernel

OPERATION = "fuse_taps"
MAX_TAPS = 8  # arrays of one launch; the known drafters have 5 to 8 taps
_TAPS = tuple(f"tap{i}" for i in range(MAX_TAPS))
_NAMES = (*_TAPS, "weights", "scales", "biases", "first_row", "row_count")


class Fused(NamedTuple):
    """fc's output [1, S, H]; `squares` [parts, S] of a row add up to its sum of squares."""

    rows: mx.array
    squares: mx.array | None = None

    def last(self, count: int) -> Fused:
        """The last `count` rows."""
        first = self.rows.shape[1] - count
        if first == 0:
            return self
        return Fused(
            self.rows[:, first:], None if self.squares is None else self.squares[:, first:]
        )


def fuse_taps(features: Features, fc: nn.Module, dtype: mx.Dtype) -> Fused:
    """fc over the features, for which other operations than the kernel's take type `dtype`.

    The kernel's output is float32 and comes with its squares.
    """

    def twin() -> list[mx.array]:
        return [fc(features.joined.astype(dtype))]

    rows, whole = features.shape[1], features.whole
    even = len({part.shape[1:] for part in whole}) == 1 and whole[0].shape[2] % 8 == 0
    fits = rows <= MAX_ROWS and len(whole) <= MAX_TAPS and even
    found = weights_of(fc) if fits and backend.is_active(OPERATION) else None
    if found is None or found.bias is not None:
        return Fused(*twin())
    variant = (*found.variant, features.dtype, rows > 8, len(whole))
    launch = launch_of(rows, found.outputs)
    return Fused(
        *backend.run(
            OPERATION, variant, lambda: _launch(features, found, launch), twin, launches=[launch]
        )
    )


def launch_of(rows: int, outputs: int) -> Launch:
    high, wide = row_tiles(rows) * 8, TILES * 8
    memory = SIMDGROUPS * high * wide * 4
    return Launch((-(-outputs // wide), 1, 1), (SIMDGROUPS * 32, 1, 1), memory)


def _launch(features: Features, weights: Weights, launch: Launch) -> list[mx.array]:
    rows, taps = features.shape[1], [mx.contiguous(part.squeeze(0)) for part in features.whole]
    fused, squares = kernel(OPERATION, _NAMES, ("y", "row_squares"))(
        inputs=[
            *(*taps, *[taps[0]] * (MAX_TAPS - len(taps)), *weights.arrays[:3]),
            *(constant(features.first), constant(rows)),
        ],
        template=[
            *(("X", features.dtype), *weights.template, ("TAPS", len(taps))),
            *(("ROW_TILES", row_tiles(rows)), ("TILES", TILES), ("SIMDS", SIMDGROUPS)),
        ],
        grid=launch.grid,
        threadgroup=launch.threads,
        output_shapes=[(rows, weights.outputs), (launch.groups[0], rows)],
        output_dtypes=[mx.float32] * 2,
    )
    return [fused[None], squares]
