"""Tests of Metal kernels have a budget of processor time: a run that takes more fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")
"""
RUN = """
import subprocess, sys, time, pytest

def spend(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

@pytest.mark.metal_cpu
def test_kernel():
    spend(0.2)

@pytest.mark.metal_cpu
def test_compiler():
    code = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code])

def test_other():
    spend(0.5)
"""


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["--metal-seconds=0.45"], 1),
        (["--metal-seconds=0.45", "-n1"], 1),
        (["--metal-seconds=5"], 0),
        (["--metal-seconds=0.45", "--full"], 0),
        (["--metal-seconds=0", "-k", "other"], 0),
    ],
)
def test_a_run_over_its_budget_fails(tmp_path: Path, given: list[str], code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_run.py").write_text(RUN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "metal_budget", "-W", "ignore", *given]
    # The plugin by itself, and xdist where it is asked for: to import the others takes a second.
    command += ["-p", "xdist"] if "-n1" in given else []
    places = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("more than the 0.45 of --metal-seconds" in done.stdout) == bool(code)
    assert ("seconds of Metal on the CPU" in done.stdout) == ("other" not in given)
