"""What `load` does with drafters: errors where one was named, a reason where none was."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import write_folder
from tiny import tiny_config
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx import engine, hub, registry
from dflash_mlx.errors import CheckpointError, DFlashError, UsageError
from dflash_mlx.models.exact import ExactLinear
from dflash_mlx.registry import Pair, Registry

TAPS = [0, 2]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = tiny_config("llama", vocab_size=VOCAB, tie_word_embeddings=True, hidden_size=64)
    folder = write_folder(tmp_path / "target", config)
    return write_tokenizer(folder)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    from tiny_drafter import drafter_config, write_drafter

    config = drafter_config("full")
    config |= {"hidden_size": 64, "vocab_size": VOCAB, "num_target_layers": 4}
    config["intermediate_size"] = 64
    config["dflash_config"] = {"target_layer_ids": TAPS, "mask_token_id": 5, "block_size": 5}
    return write_drafter(tmp_path / "drafter", config)


@pytest.fixture
def known(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that knows the tiny pair as Tiny."""
    pair = Pair("Tiny", (), str(target), str(drafter), "llama", "real weights", "")
    monkeypatch.setattr(registry, "load_registry", lambda: Registry((pair,)))


def answer(loaded: engine.Engine):
    return loaded.generate("Hi", max_tokens=12).stats


def test_the_registrys_drafter_is_taken(known: None, drafter: Path) -> None:
    stats = answer(engine.load("Tiny", dtype="float32", block_size=None))
    assert (stats.engine, stats.model, stats.drafter) == ("dflash", "Tiny", str(drafter))
    assert stats.engine_reason == "the registry's drafter for Tiny"
    assert stats.cycles > 0
    assert not [w for w in stats.warnings if "plainly" in w]


def test_a_broken_registry_drafter_means_plain_with_the_reason(known: None, drafter: Path) -> None:
    (drafter / "config.json").write_text("{")
    stats = answer(engine.load("Tiny", dtype="float32"))
    assert (stats.engine, stats.drafter, stats.cycles) == ("plain", None, 0)
    assert stats.engine_reason.startswith(f"the drafter {drafter} could not be used: ")
    assert stats.warnings == [f"Decoding plainly, since {stats.engine_reason}"]


def test_a_named_drafter_that_cannot_serve_is_an_error(target: Path, drafter: Path) -> None:
    (drafter / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        engine.load(str(target), draft=str(drafter), dtype="float32")
    with pytest.raises(DFlashError):
        engine.load(str(target), draft=str(target / "nowhere"), dtype="float32")
    with pytest.raises(UsageError, match=r"^The drafter's name is empty"):
        engine.load(str(target), draft=" ")


def test_a_named_drafter_serves(target: Path, drafter: Path) -> None:
    loaded = engine.load(str(target), draft=str(drafter), dtype="float32", block_size=3)
    stats = answer(loaded)
    assert (stats.engine, stats.engine_reason) == ("dflash", "the drafter given")
    assert len(stats.accept_histogram) == 3
    one = answer(engine.load(str(target), draft=str(drafter), dtype="float32", block_size=1))
    assert (one.engine, one.engine_reason) == (
        "plain",
        "a block of one row leaves nothing to draft",
    )


def test_without_a_drafter_it_is_said(known: None, target: Path) -> None:
    stats = answer(engine.load("Tiny", draft=None, dtype="float32"))
    assert (stats.engine, stats.engine_reason) == ("plain", "drafting is switched off")
    bare = answer(engine.load(f"{target}/", dtype="float32"))
    assert bare.engine == "plain"
    assert bare.engine_reason.startswith("no drafter is known for ")


@pytest.mark.parametrize("options", [{"block_size": 8}, {"draft_bits": 4}])
def test_options_of_a_drafter_need_one(target: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="need a drafter"):
        engine.load(str(target), draft=None, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (None, {}, r"^The model's name is None\. Give"),
        (3, {}, r"^The model's name is 3\. Give"),
        ("m", {"draft": 3}, r"^The drafter's name is 3\. Give"),
        ("m", {"draft": False}, r"^The drafter's name is False\. Give"),
        ("m", {"block_size": True}, r"^block_size is True\. Give a whole number"),
        ("m", {"block_size": 2.0}, r"^block_size is 2\.0\. Give a whole number"),
        ("m", {"block_size": [4]}, r"^block_size is \[4\]\. Give a whole number"),
    ],
)
def test_arguments_of_another_type(name: object, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.load(name, **options)


def test_draft_bits_quantize_the_drafter(target: Path, drafter: Path) -> None:
    loaded = engine.load(
        str(target), draft=str(drafter), draft_bits=4, dtype="float32", block_size=None
    )
    assert loaded.drafter is not None
    assert "scales" in loaded.drafter.model.fc  # type: ignore[attr-defined]
    assert answer(loaded).cycles > 0
    with pytest.raises(UsageError, match=r"^draft_bits is 3\."):
        engine.load(str(target), draft=str(drafter), draft_bits=3)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", mx.float32), ("float16", mx.bfloat16), ("auto", None)]
)
def test_the_drafters_type_follows_the_targets(
    target: Path, drafter: Path, dtype: str, kind: mx.Dtype | None
) -> None:
    loaded = engine.load(str(target), draft=str(drafter), dtype=dtype)
    auto = mx.bfloat16 if mx.metal.is_available() else mx.float32
    assert loaded.drafter is not None
    found = loaded.drafter.model.hidden_norm.weight.dtype  # type: ignore[attr-defined]
    assert found == (kind or auto)


def test_revisions_reach_the_hub_and_the_statistics(
    known: None, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(spec: str, *, revision: str | None = None, **options: object) -> hub.Fetched:
        asked.append((spec, revision))
        return hub.Fetched(Path(spec), spec, revision or "head")

    monkeypatch.setattr(hub, "fetch", fetch)
    stats = answer(engine.load("Tiny", revision="abc", dtype="float32"))
    assert [revision for _, revision in asked] == ["abc", None]
    assert (stats.model_revision, stats.drafter_revision) == ("abc", "head")
    assert json.loads(json.dumps(stats.to_json()))["drafter_revision"] == "head"


def test_exact_mode_reaches_target_and_statistics(
    target: Path, drafter: Path, row_invariant_blas: None
) -> None:
    loaded = engine.load(str(target), draft=str(drafter), block_size=4, exact=True)
    assert any(isinstance(module, ExactLinear) for module in loaded.target.modules())
    answer = loaded.generate([1, 2, 3], max_tokens=5)
    assert answer.stats.exact
    plain = engine.load(str(target), draft=None)
    assert not any(isinstance(module, ExactLinear) for module in plain.target.modules())
    assert plain.generate([1, 2, 3], max_tokens=5).token_ids == answer.token_ids
