"""A session at the terminal: turns of one conversation, and the few commands between them.

Ctrl-C stops an answer and keeps the session.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dflash_mlx import paths
from dflash_mlx.cli import console
from dflash_mlx.errors import DFlashError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from dflash_mlx.cli.chat import Answering
    from dflash_mlx.engine import Chat, Engine

HELP = """\
/reset  forget the conversation
/stats  statistics of the last answer
/help   this list
/exit   leave (also Ctrl-D)
Ctrl-C stops an answer after the current step, a second one at once."""


def run_session(engine: Engine, how: Answering, model: str) -> None:
    """Ask and answer until the person leaves."""
    conversation = engine.chat(system=how.system, thinking=how.thinking)
    talk = Session(conversation, how)
    terminal = _terminal()
    console.say(f"{model} is ready. /help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            line = terminal.prompt(">>> ")
        except KeyboardInterrupt:
            if not terminal.default_buffer.text:
                console.say("Ctrl-D or /exit leaves.")
            continue
        except EOFError:
            return
        if not talk.handle(line.strip()):
            return


def _terminal() -> PromptSession[str]:
    """A prompt with line editing and a history kept in the cache folder, where it can be."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.output import create_output

    history: History = InMemoryHistory()
    if file := _history_file():
        history = FileHistory(file)
    # The prompt belongs on the terminal even when the answers go to a file.
    output = None if sys.stdout.isatty() else create_output(always_prefer_tty=True)
    return PromptSession(history=history, output=output)


def _history_file() -> Path | None:
    file = paths.home_dir() / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            file.chmod(0o600)
    except OSError as error:
        console.say(f"The history is not kept: {error}.")
        return None
    return file


class Session:
    """One conversation and what has been shown of it."""

    def __init__(self, conversation: Chat, how: Answering) -> None:
        self._chat = conversation
        self._how = how
        self._warnings = console.Warnings()

    def handle(self, line: str) -> bool:
        """Act on one line; False when the session is over."""
        if line == "/exit":
            return False
        if line == "/help":
            console.say(HELP)
        elif line == "/reset":
            self._chat.reset()
            console.say("The conversation is forgotten.")
        elif line == "/stats":
            self._show_last_stats()
        elif line.startswith("/"):
            console.say(f"There is no command {line.split()[0]}. /help lists the commands.")
        elif line:
            self._answer(line)
        return True

    def _show_last_stats(self) -> None:
        if self._chat.stats is None:
            console.say("There is no answer yet.")
        else:
            console.show_stats(self._chat.stats.to_json())

    def _answer(self, line: str) -> None:
        writer = console.AnswerWriter()
        try:
            with _interruptible() as interrupt:
                stream = self._chat.send(line, **self._how.for_turn())
                try:
                    final = None
                    for chunk in stream:
                        writer.write(chunk)
                        final = chunk.stats
                        if interrupt.wanted:
                            break
                finally:
                    stream.close()
        except DFlashError as error:
            writer.end()
            console.say(str(error))
            return
        except KeyboardInterrupt:
            # Stopped in the middle of a step: the engine drops its caches, the chat its last turn
            # at most, and the next turn runs the conversation again.
            writer.end()
            console.say("Stopped at once.")
            return
        writer.end()
        if final is None:
            console.say("Stopped.")
        else:
            self._report(final)

    def _report(self, stats: Any) -> None:
        self._warnings.show(stats.warnings)
        if self._how.stats:
            console.show_stats(stats.to_json())
        elif self._how.stats is None:
            console.say(console.brief_stats(stats.to_json()))


class _Interrupt:
    """The first Ctrl-C asks for a stop after the current step, a second one stops at once."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
