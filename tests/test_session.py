"""The session at the terminal on a stand-in engine: its commands, and keys on a real pseudo-tty."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import WARNING, FakeEngine

from dflash_mlx.cli.chat import Answering
from dflash_mlx.cli.session import HELP, Session
from dflash_mlx.engine import Chunk, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PROMPT = ">>>"  # its space is drawn by moving the cursor
BRIEF = "[dflash: 11 tokens, 5.0 tok/s, 2.67 tokens per cycle, 2.6 s]\n"


def _session(stats: bool | None = None) -> tuple[Session, FakeEngine]:
    engine = FakeEngine("m")
    how = Answering(9, SamplingParams(seed=3), ("x",), "be brief", True, stats)
    return Session(engine.chat(system=how.system, thinking=how.thinking), how), engine


def test_a_line_is_answered_with_the_options_of_the_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session, engine = _session()
    assert session.handle("hello you")
    assert engine.asked == [
        (
            "hello you",
            {
                "system": "be brief",
                "thinking": True,
                "max_tokens": 9,
                "sampling": SamplingParams(seed=3),
                "stop": ("x",),
            },
        )
    ]
    out, err = capsys.readouterr()
    assert out == "hello you\n"
    assert err == f"let me think\n\nwarning: {WARNING}\n{BRIEF}"


def test_a_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    session, _ = _session()
    session.handle("a")
    session.handle("b")
    assert capsys.readouterr().err.count(WARNING) == 1


@pytest.mark.parametrize(("stats", "lines"), [(False, 0), (None, 1), (True, 13)])
def test_statistics_of_a_turn_are_as_long_as_wanted(
    stats: bool | None, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    session, _ = _session(stats)
    session.handle("a")
    err = capsys.readouterr().err
    assert err.partition(f"{WARNING}\n")[2].count("\n") == lines


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    session, engine = _session()
    told = []
    for line in ("/help", "/stats", "/what now", "", "hi", "/stats", "/reset", "/stats"):
        assert session.handle(line)
        told.append(capsys.readouterr().err)
    assert told[0] == f"{HELP}\n"
    assert told[1] == told[7] == "There is no answer yet.\n"
    assert told[2] == "There is no command /what. /help lists the commands.\n"
    assert told[3] == ""
    assert "accepted          5 of 21 drafted tokens\n" in told[5]
    assert told[6] == "The conversation is forgotten.\n"
    assert len(engine.asked) == 1
    assert not session.handle("/exit")


def test_an_error_of_the_user_keeps_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    session, _ = _session()
    assert session.handle("refuse")
    assert capsys.readouterr().err == "The prompt is refused. Give another one.\n"
    with pytest.raises(ZeroDivisionError):  # a bug is not hidden
        session.handle("crash")


def test_a_second_ctrl_c_stops_in_the_middle_of_a_step_and_keeps_the_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, engine = _session()
    steps = []

    def stuck(prompt: str, **options: object) -> Iterator[Chunk]:
        for step in range(3):
            signal.raise_signal(signal.SIGINT)
            steps.append(step)
        yield Chunk("never", "", [])

    monkeypatch.setattr(engine, "stream", stuck)
    assert session.handle("hello")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Stopped at once.\n")
    assert steps == [0]
    assert session._chat.resets == 0  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):  # outside an answer Ctrl-C means what it always does
        signal.raise_signal(signal.SIGINT)


def test_a_stopped_answer_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, engine = _session()
    monkeypatch.setattr("time.sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    assert session.handle("forever")
    assert capsys.readouterr().out == "forever more\n"
    assert engine.closed == 1


class Screen:
    """A process on a pseudo-tty: keys in, everything shown out."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/fake_engine.py"), *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DFLASH_HOME": str(home),
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "TERM": "xterm",
            },
            preexec_fn=lambda: os.login_tty(slave),
            pass_fds=[slave],
        )
        os.close(slave)
        self._seen = b""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Read until the text stands behind what was waited for last."""
        end = time.monotonic() + seconds
        while text.encode() not in self._seen:
            ready, _, _ = select.select([self._master], [], [], end - time.monotonic())
            assert ready, f"{text!r} not in {self._seen!r}"
            self._seen += os.read(self._master, 65536)
        self._seen = self._seen.partition(text.encode())[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(tmp_path, "chat", "m", "--thinking")
    yield screen
    screen.close()


def test_a_session_at_a_terminal(screen: Screen, tmp_path: Path) -> None:
    screen.wait_for("m is ready.")
    screen.wait_for(PROMPT)
    screen.type("hello there\r")
    screen.wait_for("\x1b[2mlet me ")
    screen.wait_for("hello there\r\n")
    screen.wait_for("[dflash: 11 tokens")

    screen.wait_for(PROMPT)
    screen.type("forever\r")
    screen.wait_for("forever more more")
    screen.type("\x03")  # Ctrl-C stops the answer and keeps the session
    screen.wait_for("Stopped.")

    screen.wait_for(PROMPT)
    screen.type("\x03")
    screen.wait_for("Ctrl-D or /exit leaves.")
    screen.wait_for(PROMPT)
    screen.type("/stats\r")
    screen.wait_for("5 of 21 drafted tokens")
    screen.wait_for(PROMPT)
    screen.type("still here\r")
    screen.wait_for("still here\r\n")
    screen.wait_for("[dflash:")
    screen.wait_for(PROMPT)
    screen.type("\x04")
    assert screen.process.wait(timeout=30) == 0
    history = (tmp_path / "history").read_text()
    assert [line for line in history.splitlines() if line.startswith("+")] == [
        "+hello there", "+forever", "+/stats", "+still here",
    ]  # fmt: skip
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
