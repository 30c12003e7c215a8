"""A draft head that knows some of the vocabulary: the frequent tokens and those of the text.

Any such set is lossless: tokens outside have no draft probability, and the target judges drafts
by the distribution they were really drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx.draft.base import Projection, ReducedHead
from dflash_mlx.errors import CheckpointError

#: in a drafter's folder: {"order": [token ids, the most frequent first]}
ORDER_FILE = "token_order.json"


class FrequentRows:
    """Makes reduced heads of one whole head; the rows of the last size in use are kept.

    take: the projection of the tokens with these ids [R]. order: all ids, most frequent first.
    """

    def __init__(self, take: Callable[[mx.array], Projection], order: np.ndarray) -> None:
        self.order = order
        self._take = take
        self._frequent: ReducedHead | None = None

    def reduced(self, rows: int, others: Sequence[int] = ()) -> ReducedHead:
        """The head of the `rows` most frequent tokens and of `others`, which are none of them."""
        frequent = self._frequent
        if frequent is None or frequent.rows != rows:
            ids = mx.array(self.order[:rows].astype(np.int32))
            self._frequent = frequent = ReducedHead(rows, ids, (self._take(ids),))
        if not others:
            return frequent
        ids = mx.array(np.asarray(others, np.int32))
        joined = mx.concatenate([frequent.ids, ids])
        return ReducedHead(rows, joined, (*frequent.parts, self._take(ids)))


def token_order(folder: Path, vocab_size: int) -> np.ndarray:
    """Token ids by frequency [V]: as the drafter's folder says, else in their own order.

    Vocabularies of byte-pair encoding number tokens in the order of their merges, frequent ones
    first. Ids that the file leaves out follow in their own order. CheckpointError for a file that
    is no list of different ids.
    """
    file = folder / ORDER_FILE
    natural = np.arange(vocab_size)
    if not file.is_file():
        return natural
    try:
        order = json.loads(file.read_text("utf-8"))["order"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken(file, f"cannot be read ({error})") from None
    whole = isinstance(order, list) and all(type(i) is int for i in order)
    if not whole or len(set(order)) < len(order):
        raise _broken(file, "is no list of different token ids")
    if order and not 0 <= min(order) <= max(order) < vocab_size:
        raise _broken(file, f"names tokens outside the {vocab_size} of the target")
    first = np.array(order, natural.dtype)
    return np.concatenate([first, np.setdiff1d(natural, first)])


def _broken(file: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{file} {how}; remove it, or fetch the drafter again.")
