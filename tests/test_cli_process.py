"""The command line as a process of its own: quick start, Ctrl-C, readers that leave."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
