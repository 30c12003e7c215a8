"""Which tokens a reduced draft head would know, and how often the text's tokens are among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: rows of reduced heads to choose from, where they are at most half of the whole one
SIZES = (2048, 4096, 8192, 16384, 32768)
#: share of tokens expected among them before anything is known, and how many tokens that is worth
PRIOR, PRIOR_TOKENS = 0.95, 20.0
#: what a token keeps of the counts before it: about 200 count
KEPT = 0.995


def sizes(vocab_size: int) -> tuple[int, ...]:
    """Rows of the reduced heads to choose from."""
    return tuple(size for size in SIZES if size <= vocab_size // 2)


class Words:
    """The tokens of one text so far, and for each size of head which of them it would lack.

    A reduced head knows the most frequent tokens and every token of the text so far.
    order: all token ids [V], the most frequent first.
    """

    def __init__(self, order: np.ndarray) -> None:
        self._rank = np.empty(len(order), np.int64)
        self._rank[order] = np.arange(len(order))
        self.sizes = sizes(len(order))
        self._seen: set[int] = set()
        self._others: dict[int, list[int]] = {size: [] for size in self.sizes}
        self._met = PRIOR_TOKENS
        self._covered = dict.fromkeys(self.sizes, PRIOR * PRIOR_TOKENS)

    def read(self, prompt: Sequence[int]) -> None:
        """The tokens of a prompt; they are known from now on."""
        for token in prompt:
            self._add(token)

    def met(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer, in order: counted, then known."""
        for token in tokens:
            self._met = self._met * KEPT + 1
            for size in self.sizes:
                self._covered[size] = self._covered[size] * KEPT + self.knows(token, size)
            self._add(token)

    def knows(self, token: int, rows: int | None) -> bool:
        """Whether a head of so many frequent tokens knows it now; None is the whole head."""
        return rows is None or token in self._seen or int(self._rank[token]) < rows

    def covered(self, rows: int) -> float:
        """Share of the answer's tokens that a head of so many frequent ones knew, lately."""
        return self._covered[rows] / self._met

    def others(self, rows: int) -> list[int]:
        """The text's tokens that are not among the `rows` most frequent ones, each once."""
        return self._others[rows]

    def _add(self, token: int) -> None:
        if token not in self._seen:
            self._seen.add(token)
            for size, others in self._others.items():
                if self._rank[token] >= size:
                    others.append(token)
