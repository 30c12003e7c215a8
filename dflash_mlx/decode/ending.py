"""Where a text ends before its most tokens: at an end token, or where its words say so."""

from __future__ import annotations

from collections.abc import Callable, Collection

#: whether a token is the last one of its text; asked once for each, in order
Stopped = Callable[[int], bool]


class Ending:
    """Cuts the tokens of each step behind the last one of the text.

    reason: "" while the text goes on, then "stop" (an end token) or "stop_string" (`stopped`).
    """

    def __init__(self, end_ids: Collection[int], stopped: Stopped | None = None) -> None:
        self._end_ids, self._stopped = end_ids, stopped
        self.reason = ""

    def cut(self, tokens: list[int]) -> list[int]:
        """Those of a step's tokens that belong to the text."""
        for index, token in enumerate(tokens):
            if token in self._end_ids:
                self.reason = "stop"
            elif self._stopped is not None and self._stopped(token):
                self.reason = "stop_string"
            if self.reason:
                return tokens[: index + 1]
        return tokens
