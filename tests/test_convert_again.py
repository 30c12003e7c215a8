"""Converting what was converted: its drafter goes along; and conversions beside each other."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversions import bytes_of, mlx_lm_logits, off, our_logits, write_source, write_tiny_drafter
from tiny_drafter import drafter_config

from dflash_mlx import engine
from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.convert.order import _NoCache
from dflash_mlx.draft.config import parse_config
from dflash_mlx.errors import CheckpointError


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in 8 bits with a drafter inside."""
    place = tmp_path_factory.mktemp("converted")
    source, drafter = write_source(place / "m"), write_tiny_drafter(place / "d")
    convert(Order(str(source), place / "q", Recipe(bits=8), drafter=str(drafter)))
    return place / "q"


def test_the_drafter_inside_is_taken_along(converted: Path, tmp_path: Path) -> None:
    before = json.loads((converted / "config.json").read_text())["conversion"]["drafter"]
    report = convert(Order(str(converted), tmp_path / "q", Recipe(bits=4)))
    after = json.loads((tmp_path / "q/config.json").read_text())["conversion"]["drafter"]
    assert after == before
    assert report.drafter == before["source"]
    assert bytes_of(tmp_path / "q/drafter") == bytes_of(converted / "drafter")


def test_a_drafter_inside_that_is_not_there_gets_a_remark(converted: Path, tmp_path: Path) -> None:
    source = shutil.copytree(converted, tmp_path / "m")
    shutil.rmtree(source / "drafter")
    report = convert(Order(str(source), tmp_path / "q", Recipe(bits=4)))
    assert report.drafter is None
    assert report.remarks[-1].startswith("The drafter inside of the source is not taken along: ")
    record = json.loads((tmp_path / "q/config.json").read_text())["conversion"]
    assert "drafter" not in record
    assert record["remarks"] == report.remarks
    assert not (tmp_path / "q/drafter").exists()


def test_a_tokenizer_that_makes_no_tokens_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    source = write_source(tmp_path / "m")
    empty = Tokenizer(models.BPE({"\u0120": 0}, []))
    empty.decoder = decoders.ByteLevel()
    empty.save(str(source / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="makes no tokens of an English sentence"):
        convert(Order(str(source), tmp_path / "q"))
    assert not (tmp_path / "q").exists()


def test_two_conversions_leave_the_cache_limit_as_it_was() -> None:
    before = mx.set_cache_limit(12345)
    try:
        limits, first_left, second_in = _NoCache(), threading.Event(), threading.Event()

        def second() -> None:
            with limits:
                second_in.set()
                first_left.wait(5)
                assert mx.set_cache_limit(0) == 0

        thread = threading.Thread(target=second)
        with limits:
            thread.start()
            assert second_in.wait(5)
        first_left.set()
        thread.join()
        assert mx.set_cache_limit(0) == 12345
    finally:
        mx.set_cache_limit(before)


def test_a_broken_chat_template_gets_a_remark(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    (source / "chat_template.jinja").write_text("{% for m in")
    report = convert(Order(str(source), tmp_path / "q"))
    assert report.remarks[-1].startswith("The chat template of m ")
    assert (tmp_path / "q/chat_template.jinja").read_text() == "{% for m in"


@pytest.mark.parametrize("odd", [{"conversion": [1]}, {"text_config": {"a": 1}}], ids=str)
def test_keys_of_other_programs_do_not_matter(tmp_path: Path, odd: dict[str, Any]) -> None:
    source = write_source(tmp_path / "m")
    convert(Order(str(source), tmp_path / "p"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **odd}))
    convert(Order(str(source), tmp_path / "q"))
    assert off(our_logits(tmp_path / "q"), our_logits(tmp_path / "p")) == 0.0
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4


def test_a_drafter_that_is_gone_is_said(converted: Path, tmp_path: Path) -> None:
    model = shutil.copytree(converted, tmp_path / "m")
    shutil.rmtree(model / "drafter")
    drafting = engine.load(str(model)).warnings
    assert any(
        "the drafter beside" in line and "is gone: there is no folder" in line for line in drafting
    )


def test_a_file_is_no_drafter(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    order = Order(str(converted), tmp_path / "q", drafter=str(tmp_path / "t.gguf"))
    with pytest.raises(CheckpointError, match="is a file, and drafters are folders of safetensors"):
        convert(order)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": -1}, "architectures is -1, not a list of names"),
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000, not a whole number of",
        ),
        ({"head_dim": 2**30}, "head_dim is 1073741824, not a whole number of at most 65536"),
        ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000, not a whole number"),
        ({"num_attention_heads": 2**30}, "num_attention_heads is 1073741824, not below 2"),
    ],
)
def test_sizes_that_no_drafter_has_get_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        parse_config({**drafter_config("full"), **changes})
