"""The set-up script in a copy of the checkout, with a stand-in for Python that notes its calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Answers the version question and makes an environment that holds itself and the command; its
# pip writes down the arguments and fails, or is killed, where the test says so.
PYTHON = """#!/bin/bash
echo "$(basename "$0") $*" >>"{log}"
case "$*" in
*version_info*) echo "{minor}" ;;
*sys.version*) echo "{minor}.1" ;;
*ensurepip*) exit {no_ensurepip} ;;
"-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/bash\\necho "ran:$*"\\n' >"$3/bin/dflash-mlx"
    chmod +x "$3/bin/dflash-mlx" ;;
"-m pip install "*)
    echo "pip is noisy"
    if [ -f "{folder}/fail" ]; then exit 1; fi
    if [ -f "{folder}/kill" ]; then kill -9 $PPID; exit 1; fi
    while [ -f "{folder}/hold" ]; do sleep 0.05; done ;;
"-m pytest"*) echo "pytest in $PWD:${{*:3}}" ;;
esac
"""


@dataclass
class Checkout:
    """A copy of what the scripts need, and a PATH with only stand-ins and the system's tools."""

    root: Path
    bin: Path
    log: Path
    env: dict[str, str] = field(default_factory=dict)

    def add_python(self, name: str, minor: str, no_ensurepip: int = 0) -> None:
        text = PYTHON.format(
            log=self.log, minor=minor, no_ensurepip=no_ensurepip, folder=self.log.parent
        )
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.root), **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self, word: str) -> int:
        return self.log.read_text().count(word) if self.log.exists() else 0

    def switch(self, name: str, on: bool) -> None:
        place = self.log.parent / name
        place.touch() if on else place.unlink()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a check out"  # a space in the path must not matter
    root.mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in (
        "bash", "env", "dirname", "basename", "cksum", "mkdir", "rm", "mv", "cp", "cat", "sed",
        "ls", "sleep", "chmod", "ln", "readlink",
    ):  # fmt: skip
        (tools / name).symlink_to(shutil.which(name) or name)
    return Checkout(root, tools, tmp_path / "log")


def test_the_first_run_sets_up_and_the_second_only_runs(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    code, out, err = checkout.run("dflash", "chat", "a b", "--json")
    assert (code, out) == (0, "ran:chat a b --json\n")  # pip's lines are kept off the output
    assert "making a private environment" in err
    assert "pip is noisy" in err
    assert checkout.run("dflash", "x") == (0, "ran:x\n", "")
    assert checkout.calls("-m venv") == checkout.calls("-m pip install") == 1


def test_the_second_run_costs_little(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    checkout.run("dflash")
    costs = []
    for _ in range(5):
        start = time.perf_counter()
        checkout.run("dflash")
        costs.append(time.perf_counter() - start)
    assert min(costs) < 0.2


@pytest.mark.parametrize(
    ("flags", "code", "answer"),
    [
        ("-c", 'import sys; print("%d.%d" % sys.version_info[:2])', r"3\.\d+"),
        ("-ISc", "import sys; print(sys.version.split()[0])", r"3\.\d+\.\S+"),
        ("-c", "import ensurepip, venv", ""),
        ("-Ic", "import pip", ""),
    ],
)
def test_a_real_python_answers_as_the_stand_in_does(flags: str, code: str, answer: str) -> None:
    assert f"{flags} '{code}'" in (ROOT / "scripts/setup.sh").read_text()
    done = subprocess.run([sys.executable, flags, code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(answer, done.stdout.strip())


def test_a_fitting_python_is_searched_for(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.9")
    checkout.add_python("python3.13", "")  # a shim that leads nowhere
    checkout.add_python("python3.12", "3.12", no_ensurepip=1)
    checkout.add_python("python3.11", "3.11")
    code, _, err = checkout.run("dflash")
    assert code == 0, err
    assert "with " + str(checkout.bin / "python3.11") in err


def test_no_fitting_python_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.14")
    assert checkout.run("dflash") == (
        2,
        "",
        "No Python 3.11, 3.12 or 3.13 was found on the PATH. "
        "Install one (python.org, your package manager) and run this again.\n",
    )
    assert not list(checkout.root.glob(".venv*"))


def test_a_python_without_ensurepip_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.11", no_ensurepip=1)
    code, out, err = checkout.run("dflash")
    assert (code, out) == (2, "")
    assert err == (
        f"{checkout.bin}/python3 lacks the modules venv and ensurepip, which make a private "
        "environment. Install them (on Debian and Ubuntu: apt-get install python3-venv) and run "
        "this again.\n"
    )


@pytest.mark.parametrize("how", ["fail", "kill"])
def test_an_interrupted_set_up_is_repeated(checkout: Checkout, how: str) -> None:
    checkout.add_python("python3", "3.12")
    checkout.switch(how, True)
    code, out, err = checkout.run("dflash", "x")
    assert code != 0
    assert "ran:" not in out
    assert ("could not be installed" in err) == (how == "fail")
    checkout.switch(how, False)
    code, out, err = checkout.run("dflash", "x")
    assert (code, out) == (0, "ran:x\n")
    assert checkout.calls("-m venv") == 2


def test_changed_dependencies_are_installed(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    checkout.run("dflash")
    with (checkout.root / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert checkout.run("dflash", "x")[1] == "ran:x\n"
    assert checkout.calls("-m pip install") == 2
    assert checkout.calls("-m venv") == 1
    assert checkout.run("dflash", "x") == (0, "ran:x\n", "")


def test_another_python_or_another_place_makes_a_new_environment(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    checkout.run("dflash")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run("dflash", "x")[1] == "ran:x\n"
    assert checkout.calls("-m venv") == 2
    (checkout.root / ".venv/bin/python").unlink()  # the Python it was made with has gone
    assert checkout.run("dflash", "x")[1] == "ran:x\n"
    assert checkout.calls("-m venv") == 3


def test_tests_need_more_packages_than_the_command(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    checkout.run("dflash")
    code, out, _ = checkout.run("test", "-k", "a b")
    assert (code, out) == (
        0,
        f"pytest in {checkout.root}:-n auto --dist loadfile --no-loadscope-reorder -k a b\n",
    )
    assert checkout.calls(f"--editable {checkout.root}[dev]") == 1
    assert checkout.run("dflash", "x") == (0, "ran:x\n", "")
    assert checkout.calls("-m pip install") == 2


def test_the_environment_can_lie_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    checkout.add_python("python3", "3.12")
    checkout.env["DFLASH_VENV"] = str(tmp_path / "new/place")
    assert checkout.run("dflash", "x")[1] == "ran:x\n"
    assert (tmp_path / "new/place/bin/python").exists()
    assert not (checkout.root / ".venv").exists()


def test_a_folder_of_the_user_is_never_removed(checkout: Checkout, tmp_path: Path) -> None:
    checkout.add_python("python3", "3.12")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").touch()
    checkout.env["DFLASH_VENV"] = str(tmp_path / "mine")
    code, _, err = checkout.run("dflash")
    assert code == 2
    assert err == (
        f"{tmp_path}/mine exists and was not made by this script. "
        "Move it away, or set DFLASH_VENV to another folder.\n"
    )
    assert (tmp_path / "mine/thesis").exists()


def test_two_set_ups_at_once_make_one_environment(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    checkout.switch("hold", True)
    first = checkout.start("dflash", "x")
    while not checkout.calls("-m pip install"):
        assert first.poll() is None
        time.sleep(0.02)
    second = checkout.start("dflash", "y")
    assert second.stderr is not None
    assert f"(process {first.pid}); waiting for it" in second.stderr.readline()
    checkout.switch("hold", False)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert outputs == ["ran:x\n", "ran:y\n"]
    assert checkout.calls("-m venv") == checkout.calls("-m pip install") == 1


def stand_in_for_ln(checkout: Checkout, text: str) -> None:
    (checkout.bin / "ln").unlink()
    (checkout.bin / "ln").write_text(f"#!/bin/bash\n{text}\n")
    (checkout.bin / "ln").chmod(0o755)


def test_a_set_up_that_ends_while_another_asks_for_its_lock_is_no_error(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    seen = checkout.root / "seen"
    refusal = 'echo "ln: failed to create symbolic link: File exists" >&2; exit 1'
    stand_in_for_ln(
        checkout,
        f'[ -f "{seen}" ] || {{ : >"{seen}"; {refusal}; }}\nexec {shutil.which("ln")} "$@"',
    )
    code, out, err = checkout.run("dflash", "x")
    assert (code, out) == (0, "ran:x\n"), err
    assert seen.exists()


def test_a_folder_that_cannot_be_written_in_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    stand_in_for_ln(checkout, "echo 'ln: here: Read-only file system' >&2; exit 1")
    assert checkout.run("dflash") == (
        2,
        "",
        f"Cannot write in {checkout.root}: ln: here: Read-only file system\n",
    )


def dead_process() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_the_lock_of_a_killed_set_up_does_not_block(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    (checkout.root / ".venv.locked").symlink_to(str(dead_process()))
    several = [checkout.start("dflash", "x") for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in several]
    assert [out for out, _ in outputs] == ["ran:x\n"] * 4, outputs
    assert checkout.calls("-m venv") == checkout.calls("-m pip install") == 1
    assert [path.name for path in checkout.root.glob(".venv*")] == [".venv"]


def test_what_is_no_lock_stays_and_is_named(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    lock = checkout.root / ".venv.locked"
    lock.mkdir()
    message = f"{lock} is in the way. Remove it and run this again.\n"
    assert checkout.run("dflash") == (2, "", message)
    assert list(lock.iterdir()) == []
    lock.rmdir()
    for name in (".venv.locked", ".venv.locked.break"):
        (checkout.root / name).symlink_to(str(dead_process()))
    code, out, err = checkout.run("dflash")
    assert (code, out) == (2, "")
    assert err == (
        f"A set-up that was killed left {lock} and {lock}.break. Remove both and run this again.\n"
    )


def test_foreign_python_paths_stay_out(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12")
    with (checkout.bin / "python3").open("a") as python:
        python.write(f'echo "path:$PYTHONPATH" >>"{checkout.log}"\n')
    checkout.env["PYTHONPATH"] = "/foreign"
    checkout.run("dflash")
    assert checkout.calls("path:") > 0
    assert checkout.calls("/foreign") == 0


def test_the_scripts_can_be_executed() -> None:
    for name in ("scripts/dflash", "scripts/test", "scripts/check", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
    ci = (ROOT / ".ci/run").read_text()
    assert "scripts/check" in ci
    assert "scripts/test" in ci
    assert "bash .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
