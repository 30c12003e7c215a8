"""State of one gated delta-rule layer: it cannot be cut, so accepted rows are run again.

S <- g_t S;  S <- S + beta_t (v_t - S k_t) k_t^T;  y_t = S q_t      (arXiv 2412.06464)
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.cache.base import LayerCache
from dflash_mlx.kernels import DeltaRows, advance, replay


class RecurrentCache(LayerCache):
    """The state S [1, Hv, Dv, Dk] (float32) and the convolution's last inputs [1, taps - 1, C].

    Pending rows are kept beside the state from before them; `commit` runs the recurrence again
    over the rows that stay. The recurrence goes row by row on MLX's CPU back-end, so that state
    equals, bit for bit, the one of rows run one at a time; elsewhere only if `exact`. Nothing is
    evaluated here.

    From `advance` to `commit`, and no longer, there is a second state: the one behind all pending
    rows, which the run makes in any case. With it a commit of all of them (every prompt's chunk and
    single row, and each block whose draft was right to the end) runs nothing again. At the sizes of
    Qwen3.5-4B that would take 5, 7 and 13 % of a layer's forward for 4, 8 and 16 rows (CPU, fast
    BLAS), to save 2 MB a layer: 50 MB beside 8 GB of weights.
    """

    def __init__(self, taps: int, *, exact: bool = False) -> None:
        self.taps, self.exact = taps, exact
        self.state: mx.array | None = None
        self.tail: mx.array | None = None
        self._end: mx.array | None = None  # the state behind all pending rows
        self._changes: mx.array | None = None  # what their run recorded for a replay
        self._window: mx.array | None = None
        self._rows: DeltaRows | None = None

    def window(self, inputs: mx.array) -> mx.array:
        """The convolution's inputs [1, T, C] behind the committed ones: [1, taps - 1 + T, C]."""
        tail = self.tail
        if tail is None:
            tail = mx.zeros((1, self.taps - 1, inputs.shape[2]), inputs.dtype)
        self._window = mx.concatenate([tail, inputs], axis=1)
        return self._window

    def advance(self, rows: DeltaRows) -> mx.array:
        """Run T rows behind the committed ones: y [1, T, Hv, Dv]; they are pending then.

        The same rows' inputs went through `window` before. A second forward before a commit
        replaces the pending rows of the first.
        """
        out, self._end, self._changes = advance(rows, self.state, exact=self.exact)
        self._rows = rows
        self.pending = rows.keys.shape[1]
        return out

    def commit(self, n: int) -> None:
        self._check_commit(n)
        if n:
            assert self._window is not None
            assert self._rows is not None
            if n == self.pending:
                self.state = self._end
            else:
                self.state = replay(self._rows, self.state, self._changes, n, exact=self.exact)
            # A copy: a view would hold the whole window's memory.
            self.tail = mx.contiguous(self._window[:, n : n + self.taps - 1])
        self.length += n
        self._drop_pending()

    def rewind(self, length: int) -> bool:
        """Only to where it stands: earlier states are gone."""
        if length != self.length:
            return False
        self._drop_pending()
        return True

    def arrays(self) -> list[mx.array]:
        held = [self.state, self.tail, self._end, self._changes, self._window]
        held += self._rows or ()
        return [a for a in held if a is not None]

    def _drop_pending(self) -> None:
        self.pending = 0
        self._end = self._changes = self._window = self._rows = None
