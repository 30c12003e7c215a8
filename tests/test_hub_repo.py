"""Repos of the hub: the real huggingface_hub against a local server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_mlx import hub
from dflash_mlx.errors import SourceError
from tests.fake_hub import FakeHub, FakeRepo, start, wait_for

pytest_plugins = ("tests.hub_fixtures",)
pytestmark = pytest.mark.usefixtures("home")

REPO = "org/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{} ",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": b"weights " * 4000,
    "README.md": b"# card",
    "pictures.md": b"# words",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"again",
    "original/model.safetensors": b"again",
    "tiny.Q4_1.gguf": b"GGUF" + bytes(100),
}
KEPT = {
    "config.json",
    "tokenizer.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors",
    "README.md",
}


@pytest.fixture(autouse=True)
def tiny(server: FakeHub) -> None:
    server.repos[REPO] = FakeRepo(dict(FILES))


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


def test_two_processes_at_once(server: FakeHub) -> None:
    processes = [start(REPO), start(REPO)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{hub.local_path(REPO)}\n"
    assert len(server.gets("model.safetensors")) == 1
