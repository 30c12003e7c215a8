"""Context K/V of a drafter's layers: target features projected once, kept as far as layers look.

MLX's attention wants a block's K/V behind the context, written in place: a buffer a layer. The
attention kernel takes the block apart from it: one buffer for all layers of a kind, one write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.cache.kv import GROWTH_ROWS
from dflash_mlx.kernels import Rows, Surroundings

# Rows a window keeps beyond those it needs, so that a sequence can be shortened a little. They have
# to be there before it is known that a turn goes back; without them it is prefilled anew.
REWIND_ROWS = 64
# Room behind these, for blocks; when it is full, the rows in reach are moved to the front.
SPARE_ROWS, SPARE_SHARE = 64, 8  # at least, and one row for so many of the window


class Held(ABC):
    """Which context rows a buffer holds, in temporal order, and when it is made anew.

    With a `window` W (positions a query sees, itself included) the W-1 rows before the next
    position are needed; the rows held are positions start .. length - 1.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.length = 0
        self.start = 0

    def rows_kept(self, rows: int) -> int:
        """How many of `rows` new rows are worth computing; older ones no query will see."""
        return rows if self.window is None else min(rows, self.window - 1 + REWIND_ROWS)

    @property
    def visible(self) -> int:
        """Context rows that the query at position `length` may see."""
        held = self.length - self.start
        return held if self.window is None else min(held, self.window - 1)

    def rewind(self, length: int) -> bool:
        """Shorten to `length` positions; False, and nothing changes, when rows are missing."""
        if not self.can_rewind(length):
            return False
        self.length = min(self.length, length)
        return True

    def can_rewind(self, length: int) -> bool:
        """Whether every row that a query at `length` may see is still held."""
        if length >= self.length:
            return True
        needed = 0 if self.window is None else max(0, length - (self.window - 1))
        return self.start <= needed

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What the buffer consists of; nothing before the first write."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def _admit(self, given: int, rows: int) -> None:
        """`rows` new positions are committed, and the last `given` of them will be written."""
        if given != self.rows_kept(rows):
            raise ValueError(f"{given} rows given where {self.rows_kept(rows)} are kept")
        if given < rows:  # A gap: what was held lies too far back to be seen again.
            self.length += rows - given
            self.start = self.length

    def _room(self, capacity: int, rows: int, superseded: int) -> tuple[slice, int] | None:
        """Room for `rows` rows behind the held ones, of which `superseded` need not be kept.

        None where a buffer of `capacity` has it; else the rows of the buffer that stay, now counted
        as held, and the capacity of a new one. A window shrinks when a write larger than those that
        follow, such as a prompt's chunk, left it more room than they need.
        """
        held = self.length - self.start
        drop, oversized = 0, False
        if self.window is not None:
            reach = self.window - 1 + REWIND_ROWS
            spare = max(SPARE_ROWS, self.window // SPARE_SHARE)
            drop = max(0, held - max(0, reach - superseded))
            largest = max(held - drop + rows, reach + spare)
            oversized = capacity > largest
        if held + rows <= capacity and not oversized:
            return None
        keep = held - drop
        if self.window is None:
            capacity = _roomy(keep, rows)
        else:
            capacity = min(largest, keep + max(rows, GROWTH_ROWS, keep // 4))
        self.start += drop
        return slice(drop, held), capacity


class LayerContext(Held):
    """Committed context rows of one layer, keys and values [1, Hkv, capacity, D]."""

    def __init__(self, window: int | None) -> None:
        super().__init__(window)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Commit `rows` new positions, of which keys and values hold the last `rows_kept(rows)`."""
        given = keys.shape[2]
        self._admit(given, rows)
        self._write(keys, values, superseded=given)
        self.length += given

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """K/V that a block's queries may see: the context in reach, then the block's own rows.

        The block's rows never become context; the next write replaces them.
        """
        self._write(keys, values)
        assert self.keys is not None
        assert self.values is not None
        end = self.length - self.start
        first, last = end - self.visible, end + keys.shape[2]
        return self.keys[:, :, first:last], self.values[:, :, first:last]

    def around(self, keys: mx.array, values: mx.array) -> Surroundings:
        """What a block with own K/V [1, Hkv, R, D] attends to."""
        return Surroundings(joined=Rows(*self.with_block(keys, values)))

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values) if a is not None]

    def _write(self, keys: mx.array, values: mx.array, superseded: int = 0) -> None:
        """Write rows behind the held ones; `superseded` of these need not be kept for windows."""
        rows = keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if (room := self._room(capacity, rows, superseded)) is not None:
            self.keys = _moved(self.keys, keys, *room)
            self.values = _moved(self.values, values, *room)
        assert self.keys is not None
        assert self.values is not None
        at = self.length - self.start
        self.keys[:, :, at : at + rows] = keys
        self.values[:, :, at : at + rows] = values


class JoinedContext(Held):
    """Committed context rows of several layers, [2, layers, Hkv, capacity, D]: keys, then values.

    One write commits rows to all of them.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__(window)
        self.both: mx.array | None = None

    def append(self, both: mx.array, rows: int) -> None:
        """Commit `rows` new positions, of which `both` holds the last `rows_kept(rows)`."""
        given = both.shape[3]
        self._admit(given, rows)
        capacity = 0 if self.both is None else self.both.shape[3]
        if (room := self._room(capacity, given, superseded=given)) is not None:
            self.both = _moved(self.both, both, *room)
        assert self.both is not None
        at = self.length - self.start
        self.both[..., at : at + given, :] = both
        self.length += given

    def reach(self, layer: int) -> Rows | None:
        """The context rows that a block of one of the layers sees."""
        if not self.visible:
            return None
        assert self.both is not None
        end = self.length - self.start
        keys, values = (
            self.both[side, layer : layer + 1, :, end - self.visible : end] for side in (0, 1)
        )
        return Rows(keys, values)

    def arrays(self) -> list[mx.array]:
        return [] if self.both is None else [self.both]


class SharedContext:
    """One layer's part of a buffer that several layers share."""

    def __init__(self, buffer: JoinedContext, layer: int) -> None:
        self.buffer, self.layer = buffer, layer

    @property
    def length(self) -> int:
        return self.buffer.length

    def rows_kept(self, rows: int) -> int:
        return self.buffer.rows_kept(rows)

    def around(self, keys: mx.array, values: mx.array) -> Surroundings:
        """What a block with own K/V [1, Hkv, R, D] attends to."""
        return Surroundings(self.buffer.reach(self.layer), Rows(keys, values))


class ContextCache:
    """The context of all layers of a drafter for one sequence.

    `length` is the number of positions observed and equals the target's committed length. With
    `shared` all layers of one window have one buffer.
    """

    def __init__(self, windows: Sequence[int | None], *, shared: bool = False) -> None:
        self.shared = shared
        self.layers: list[LayerContext | SharedContext]
        self._buffers: Sequence[LayerContext | JoinedContext]
        if not shared:
            own = [LayerContext(window) for window in windows]
            self._buffers, self.layers = own, list(own)
            return
        kinds = {window: JoinedContext(window) for window in windows}
        self._buffers = list(kinds.values())
        members = [list(windows[:i]).count(window) for i, window in enumerate(windows)]
        self.layers = [SharedContext(kinds[w], m) for w, m in zip(windows, members, strict=True)]

    def __getitem__(self, index: int) -> LayerContext | SharedContext:
        return self.layers[index]

    @property
    def length(self) -> int:
        return self._buffers[0].length

    def append(self, layers: Sequence[int], both: mx.array, rows: int) -> None:
        """Commit `rows` new positions to `layers`, which are all those of one window.

        both: keys, then values, [2, len(layers), Hkv, kept, D], of the last `rows_kept(rows)`
        positions.
        """
        for place, number in enumerate(layers):
            layer = self.layers[number]
            if isinstance(layer, SharedContext):
                layer.buffer.append(both, rows)
                return
            own = slice(place, place + 1)
            layer.append(both[0, own], both[1, own], rows)

    def rewind(self, length: int) -> bool:
        """Shorten to `length` positions; False, and nothing changes, when a window lost rows."""
        if length > self.length or not all(b.can_rewind(length) for b in self._buffers):
            return False
        for buffer in self._buffers:
            buffer.rewind(length)
        return True

    def arrays(self) -> list[mx.array]:
        return [a for buffer in self._buffers for a in buffer.arrays()]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


def _roomy(keep: int, rows: int) -> int:
    """Capacity without a window for `rows` rows behind `keep` ones, with room for more.

    The room is proportional for long contexts, so that copying stays linear in the context.
    """
    capacity = keep + max(rows, GROWTH_ROWS, keep // 4)
    return -(-capacity // GROWTH_ROWS) * GROWTH_ROWS


def _moved(old: mx.array | None, like: mx.array, stay: slice, capacity: int) -> mx.array:
    """A buffer of `capacity` rows, the last axis but one, that begins with rows of `old`."""
    *before, _, dim = like.shape
    keep = stay.stop - stay.start
    tail = mx.zeros((*before, capacity - keep, dim), like.dtype)
    if old is None or keep == 0:
        return tail
    return mx.concatenate([old[..., stay, :], tail], axis=-2)
