"""The built wheel in a fresh environment, run from another folder: it brings all its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from dflash_mlx import __version__, paths

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["DFLASH_HOME"] = str(cwd / "home")
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder, ROOT, cwd=folder,
    )  # fmt: skip
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_is_named_apart_from_the_unrelated_project(wheel: Path) -> None:
    assert wheel.name == f"dflash_mlx_engine-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = [n for n in names if n.endswith("/LICENSE")]
        metadata = next(n for n in names if n.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    tracked = _run("git", "ls-files", "dflash_mlx", "metal", "models.toml", cwd=ROOT).split()
    assert len(tracked) > 30
    for file in tracked:
        assert (file if file.startswith("dflash_mlx/") else f"dflash_mlx/{file}") in names
    assert len(licence) == 1
    assert "License-Expression: MIT" in text
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)


def test_doctor_finds_everything_from_another_folder(installed: Path, tmp_path: Path) -> None:
    report = json.loads(_run(installed / "bin/dflash-mlx", "doctor", "--json", cwd=tmp_path))
    assert report["can_run"]
    package = next(installed.glob("lib/python*/site-packages")) / "dflash_mlx"
    assert report["files"] == {
        "registry": str(package / "models.toml"),
        "kernel sources": str(package / "metal"),
        "embedded drafters": str(package / "assets"),
    }
    for name in ("models.toml", "metal/README.md"):
        assert (package / name).read_bytes() == (ROOT / name).read_bytes()
    drafters = [f.relative_to(paths.assets_dir()) for f in paths.assets_dir().rglob("*.*")]
    assert any(f.suffix == ".safetensors" for f in drafters)
    for file in drafters:
        assert (package / "assets" / file).read_bytes() == (paths.assets_dir() / file).read_bytes()


def test_the_installed_command_lists_the_pairs(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(_run(installed / "bin/dflash-mlx", "models", "--json", cwd=tmp_path))
    assert any(row["name"] == "SmolLM2-135M" and row["drafter_path"] for row in listed)
