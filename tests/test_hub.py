"""Sources that are on disk already, and what is no source at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx import hub, paths
from dflash_mlx.errors import SourceError
from tests.fake_hub import FakeHub

pytest_plugins = ("tests.hub_fixtures",)
pytestmark = pytest.mark.usefixtures("home")


def test_folder_file_and_asset_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "assets_dir", lambda: tmp_path)
    for spec, path in [
        (str(tmp_path), tmp_path),
        ("org/tiny", Path("org/tiny")),  # a folder that exists wins over a repo of that name
        ("m.gguf", Path("m.gguf")),
        ("asset:org", tmp_path / "org"),
    ]:
        assert hub.fetch(spec) == hub.Fetched(path, spec, None)
        assert hub.local_path(spec) == path


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./nowhere", r"The drafter './nowhere' does not exist.*ORG/NAME"),
        ("/nowhere/at/all", r"does not exist"),
        ("~/nowhere", r"does not exist"),
        ("a/b/c", r"does not exist"),
        ("nowhere.gguf", r"does not exist"),
        ("folder/nowhere.gguf", r"does not exist"),
        ("bare", r"does not exist"),
        ("", r"does not exist"),
        ("a.txt", r"a\.txt is a file but no \.gguf file"),
        ("asset:nothing", r"asset:nothing is not part of this installation"),
        ("asset:/etc", r"not part of this installation"),
        ("asset:..", r"not part of this installation"),
        ("asset:", r"not part of this installation"),
    ],
)
def test_what_is_no_source(
    spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FakeHub
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(SourceError, match=message):
        hub.fetch(spec, kind="drafter")
    assert hub.local_path(spec) is None
    assert server.asked == []


def test_a_revision_needs_a_repo(tmp_path: Path) -> None:
    for spec in (str(tmp_path), "pypi:a==1/b#sha256=" + "0" * 64):
        with pytest.raises(SourceError, match="has no revision 'main': only repos"):
            hub.fetch(spec, revision="main")


def test_size_on_disk_follows_links_and_counts_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(1000))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to(tmp_path / "blob")
    (folder / "b").symlink_to(tmp_path / "blob")
    (folder / "c").write_bytes(bytes(10))
    assert hub.size_on_disk(folder) == 1010
    assert hub.size_on_disk(folder / "a") == 1000


def test_import_needs_neither_mlx_nor_huggingface_hub() -> None:
    code = "import sys, dflash_mlx.hub; print({'mlx', 'huggingface_hub'} & set(sys.modules))"
    root = Path(__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "set()\n"
