"""The command line as a process of its own: quick start, Ctrl-C, readers that leave."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from dflash_mlx import cli, engine
from dflash_mlx.cli.chat import _trace_writer
from dflash_mlx.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


def _process(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from dflash_mlx import cli\ntry: cli.main({arguments})\nfinally: "
        "print(sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    process = _process("-c", code)
    out, err = process.communicate()
    assert process.returncode == 0, err
    loaded = set(eval(out.splitlines()[-1]))
    assert "typer" in loaded
    assert loaded & {"mlx", "mlx_lm", "transformers", "huggingface_hub", "numpy", "rich"} == set()


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource")
def test_help_is_quick() -> None:
    """--help takes no more than a few times what starting Python and importing typer takes."""
    import resource

    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _process("-c", code).communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ours = "from dflash_mlx import cli; cli.main(['chat', '--help'])"
    pairs = [(seconds(ours), seconds("import typer.main, typer.core")) for _ in range(5)]
    assert min(a for a, _ in pairs) < 3 * min(b for _, b in pairs)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the OpenBLAS wheel is for Linux on x86-64",
)
@pytest.mark.parametrize("command", [["chat", "./missing.gguf", "hi"], ["doctor"]])
def test_the_fast_blas_is_loaded_before_a_command_imports_mlx(command: list[str]) -> None:
    code = (
        f"import sys; from dflash_mlx import cli, machine\ntry: cli.main({command})\nfinally: "
        "print('mlx.core' in sys.modules, machine.blas_in_use().name)"
    )
    process = _process("-c", code, stdin=subprocess.DEVNULL)
    out, _ = process.communicate()
    assert out.splitlines()[-1].startswith("True OpenBLAS")


FAKE = str(ROOT / "tests/fake_engine.py")


def test_ctrl_c_ends_one_answer_with_130() -> None:
    process = _process(FAKE, "chat", "m", "forever", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.read(12) == "forever more"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_ends_the_work_quietly() -> None:
    process = _process(FAKE, "chat", "m", "forever", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(7) == "forever"
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_reader_that_leaves_a_short_list_sees_no_complaint() -> None:
    """All of it fits the buffer, so the closed pipe shows at the last flush only."""
    process = _process("-m", "dflash_mlx", "models", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_without_a_standard_output_nothing_is_said() -> None:
    command = [sys.executable, "-m", "dflash_mlx", "models"]
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [
        [FAKE, "chat", "m", "hi"],
        [FAKE, "chat", "m", "hi", "--json"],
        ["-m", "dflash_mlx", "models"],
    ],
)
def test_a_full_output_is_one_sentence(arguments: list[str]) -> None:
    with FULL.open("w") as out:
        ended = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    *others, last = ended.stderr.splitlines()
    sentence = "Standard output cannot be written (No space left on device). Send it elsewhere."
    assert (ended.returncode, last) == (2, f"dflash-mlx: {sentence}")
    assert not [line for line in others if not line.startswith("warning: ")]


def test_another_error_of_the_system_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "elsewhere")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(OSError, match="elsewhere"):
        cli.main(["models"])


def test_a_trace_is_opened_by_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (file := tmp_path / "trace").write_text("old")
    monkeypatch.setattr(engine, "load", FakeEngine)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "m", "hi", "--trace", str(file)])
    assert (ended.value.code, file.read_text()) == (0, "old")
    assert (
        "There is nothing to trace: decoding is plain (no drafter is kn" in capsys.readouterr()[1]
    )
    write = _trace_writer(file)
    assert write is not None
    write("a")
    write("b")
    assert file.read_text() == "a\nb\n"
    with pytest.raises(UsageError, match=r"--trace cannot write .*: it is a folder"):
        _trace_writer(tmp_path)


@needs_full
def test_a_trace_that_fails_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    write = _trace_writer(FULL)
    assert write is not None
    write("a")
    write("b")
    said = "The trace cannot be written to /dev/full any more (No space left on device).\n"
    assert capsys.readouterr().err == said
