"""Converting what was converted: its drafter goes along; and conversions beside each other."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from conversions import bytes_of, write_source, write_tiny_drafter

from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.convert.order import _NoCache
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
