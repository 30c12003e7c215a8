"""Sections that a signal must not tear apart: it is delivered behind them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """Stopped by a signal other than Ctrl-C's; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code(stopped: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells report it."""
    return 128 + (stopped.number if isinstance(stopped, Ended) else signal.SIGINT)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """kill and a closed terminal stop what runs inside as Ctrl-C does, unless they are handled."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers are set in the main thread only
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    ending = [s for s in _SIGNALS if signal.getsignal(s) == signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, stop)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C, and other signals that a Python function handles, wait for the end of the section.

    A section that fails ends the run by its error instead.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    handled = {s: handler for s in _SIGNALS if callable(handler := signal.getsignal(s))}
    try:
        for number in handled:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    for number in waiting:
        signal.raise_signal(number)
