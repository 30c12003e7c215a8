"""Facts about the machine; the BLAS is looked at in fresh processes, as it is chosen once."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx import machine

linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the OpenBLAS wheel is for Linux on x86-64",
)
SAY = "print(json.dumps([*machine.blas_in_use()]))"
MULTIPLY = """
import mlx.core as mx, time
a = mx.ones((512, 512)); mx.eval(a)
def seconds():
    start = time.process_time(); mx.eval(a @ a); return time.process_time() - start
print(min(seconds() for _ in range(3)))
"""


def _python(code: str, **env: str) -> list[Any]:
    """Run code in a new process; every line it prints, read as JSON."""
    code = "import json, os, sys; from dflash_mlx import machine\n" + code
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": root, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_importing_the_file_imports_no_mlx() -> None:
    assert _python("print(json.dumps([n for n in sys.modules if n.startswith('mlx')]))") == [[]]


@linux_x86
def test_openblas_is_loaded_before_mlx_and_multiplies_faster() -> None:
    """The linker's word is checked by a stopwatch: several times faster than MLX's own."""
    choice, fast = _python(f"machine.prepare_blas(); {SAY}" + MULTIPLY)
    assert choice[0].startswith("OpenBLAS 0.3")
    assert choice[1] == "Loaded before MLX, with 1 thread; OPENBLAS_NUM_THREADS sets more."
    slow_choice, slow = _python(SAY + MULTIPLY)
    assert slow_choice[0] == "bundled reference BLAS"
    assert slow > 3 * fast


@pytest.mark.parametrize(
    ("given", "width"),
    [(None, "1000"), ("7", "7"), ("0", "1000"), ("", "1000"), ("abc", "1000")],
)
def test_a_steps_passes_may_run_beside_each_other(given: str | None, width: str) -> None:
    """Wide enough for the outputs of all passes; a person's own choice stays, if it is one."""
    code = "import dflash_mlx.train; print(json.dumps(os.environ['MLX_BFS_MAX_WIDTH']))"
    assert _python(code, **({} if given is None else {"MLX_BFS_MAX_WIDTH": given})) == [width]


@linux_x86
def test_training_from_python_loads_the_fast_blas_too() -> None:
    [fast] = _python("import dflash_mlx.train.run; print(json.dumps(machine.blas_in_use().fast))")
    assert fast


@linux_x86
def test_preparing_twice_changes_nothing() -> None:
    twice = "a = machine.prepare_blas(); import mlx.core; b = machine.prepare_blas()\n"
    assert _python(twice + "print(json.dumps(a == b))") == [True]


@linux_x86
def test_the_users_number_of_threads_wins() -> None:
    lines = _python(f"machine.prepare_blas(); {SAY}", OPENBLAS_NUM_THREADS="2")
    if (os.cpu_count() or 1) > 1:
        assert "with 2 threads" in lines[0][1]


@linux_x86
def test_the_environment_of_child_processes_stays_as_it_was() -> None:
    code = "machine.prepare_blas(); print(json.dumps(os.environ.get('OPENBLAS_NUM_THREADS')))"
    assert _python(code) == [None]
    assert _python(code, OPENBLAS_NUM_THREADS="2") == ["2"]


@linux_x86
def test_too_late_is_said() -> None:
    lines = _python(f"import mlx.core; machine.prepare_blas(); {SAY}")
    reason = "MLX was imported before dflash_mlx could load a faster one."
    assert lines == [["bundled reference BLAS", reason]]


@linux_x86
def test_a_library_loaded_behind_mlx_is_not_taken_for_the_one_in_use() -> None:
    lines = _python(f"import mlx.core; machine._load_openblas(); {SAY}")
    reason = "MLX was imported before libopenblas.so.0 was loaded."
    assert lines == [["bundled reference BLAS", reason]]


@linux_x86
def test_a_missing_wheel_is_said() -> None:
    code = "machine.find_spec = lambda name: None; print(json.dumps([*machine.prepare_blas()]))"
    reason = "The package ngsolve-openblas is not installed."
    assert _python(code) == [["bundled reference BLAS", reason]]


@linux_x86
def test_a_library_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    (tmp_path / "ngsolve_openblas").mkdir()
    (tmp_path / "ngsolve_openblas/__init__.py").touch()
    (tmp_path / "ngsolve_openblas/libopenblas.so").write_text("no library")
    code = f"sys.path.insert(0, {str(tmp_path)!r}); machine.prepare_blas(); {SAY}"
    ((name, reason),) = _python(code)
    assert name == "bundled reference BLAS"
    assert reason.startswith("OpenBLAS could not be loaded: ")


@linux_x86
def test_no_temporary_folder_to_write_in_is_said() -> None:
    """Nothing is raised where even the folder of links cannot be made."""
    code = "import tempfile; tempfile.tempdir = '/nonexistent'; machine.prepare_blas(); "
    ((name, reason),) = _python(code + SAY)
    assert name == "bundled reference BLAS"
    assert "/nonexistent" in reason


@linux_x86
def test_the_folder_of_links_is_gone_afterwards(tmp_path: Path) -> None:
    _python("machine.prepare_blas()", TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_test_suite_runs_on_mlxs_own_blas() -> None:
    expected = "Accelerate" if sys.platform == "darwin" else "bundled reference BLAS"
    assert machine.prepare_blas().name == expected


def test_the_back_end_is_mlxs() -> None:
    import mlx.core as mx

    name, reason = machine.back_end()
    assert name == ("metal" if mx.metal.is_available() else "cpu")
    assert reason.endswith(".")


def test_memory_and_chip_are_those_of_the_machine() -> None:
    if sys.platform == "linux":
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert 0 < machine.memory_bytes() <= total
    assert machine.memory_bytes() > 2**28
    assert machine.chip().strip()


def test_versions_are_those_of_the_imported_packages() -> None:
    import mlx.core as mx
    import transformers

    found = machine.versions()
    assert list(found) == [
        "dflash-mlx", "python", "mlx", "mlx-lm", "transformers", "huggingface_hub",
    ]  # fmt: skip
    assert found["mlx"] == mx.__version__
    assert found["transformers"] == transformers.__version__


def test_this_installation_has_no_problem() -> None:
    assert machine.check_versions() == []


def test_unfit_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [
        "mlx>=99", "no-such-package>=1", "numpy>=2",
        "absent; sys_platform == 'nowhere'", "absent; extra == 'dev'",
    ]  # fmt: skip
    monkeypatch.setattr(machine, "_requirements", lambda: needs)
    assert machine.check_versions() == [
        f"mlx {machine.versions()['mlx']} is installed, but >=99 is needed.",
        "The package no-such-package is not installed (needed: >=1).",
    ]


def test_missing_functions_of_mlx_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MLX_FUNCTIONS", ("fast.rope", "fast.ropes", "nothing.at.all"))
    version = machine.versions()["mlx"]
    assert machine.check_versions() == [
        f"MLX {version} has no mlx.core.fast.ropes.",
        f"MLX {version} has no mlx.core.nothing.at.all.",
    ]


def test_every_dependency_is_checked() -> None:
    names = {re.split(r"[^\w-]", line)[0] for line in machine._requirements()}
    assert {"mlx", "mlx-lm", "transformers", "tokenizers", "typer", "packaging"} <= names
