"""A conversion killed in the middle is taken up to the same bytes; memory stays in its bound."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversions import bytes_of, start, write_source, write_tiny_drafter
from tiny import tiny_config, tiny_weights
from tiny_engine import VOCAB

from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.loader import load_target

KILLED = """
import sys, time
from pathlib import Path
import mlx.core
from dflash_mlx.convert import Order, convert

def progress(done, total):
    if done > total * 0.6:
        print("there", flush=True)
        time.sleep(60)

source, drafter, destination = sys.argv[1:]
convert(Order(source, Path(destination), drafter=drafter, shard_bytes=20_000), progress)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Order:
    """The order of a conversion that was killed in the middle of a file."""
    place = tmp_path_factory.mktemp("killed")
    source, drafter = write_source(place / "m"), write_tiny_drafter(place / "d")
    order = Order(str(source), place / "q", drafter=str(drafter), shard_bytes=20_000)
    process = start(KILLED, str(source), str(drafter), str(place / "q"))
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n", process.communicate()
    process.kill()
    process.communicate()
    return order


@pytest.fixture
def order(killed: Order, tmp_path: Path) -> Order:
    """The same with a copy of what the killed run left."""
    assert killed.destination is not None
    shutil.copytree(killed.destination, tmp_path / "q")
    return replace(killed, destination=tmp_path / "q")


@pytest.fixture(scope="module")
def whole(killed: Order, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the same conversion without an interruption."""
    place = tmp_path_factory.mktemp("whole") / "q"
    assert convert(replace(killed, destination=place)).resumed_bytes == 0
    return bytes_of(place)


def test_a_killed_run_says_so_and_is_taken_up_to_the_same_bytes(
    order: Order, whole: dict[str, bytes], tmp_path: Path
) -> None:
    place = tmp_path / "q"
    assert not (place / "config.json").exists()
    with pytest.raises(CheckpointError) as caught:
        load_target(place)
    assert str(caught.value) == (
        f"{place} is an unfinished conversion; run the same `dflash-mlx convert` again to finish "
        "it, or delete the folder."
    )
    finished = {p: p.stat().st_mtime_ns for p in place.glob("*.safetensors")}
    assert len(finished) >= 2
    report = convert(order)
    assert {p: p.stat().st_mtime_ns for p in finished} == finished
    assert 0 < report.resumed_bytes < report.result_bytes
    assert bytes_of(place) == whole
    load_target(place)


def test_a_finished_file_that_was_damaged_is_written_again(
    order: Order, whole: dict[str, bytes], tmp_path: Path
) -> None:
    first = min((tmp_path / "q").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    convert(order)
    assert bytes_of(tmp_path / "q") == whole


def test_an_unfinished_folder_is_for_the_same_order_only(order: Order, tmp_path: Path) -> None:
    before = bytes_of(tmp_path / "q")
    with pytest.raises(UsageError, match="unfinished conversion of another source or with other"):
        convert(replace(order, recipe=Recipe(bits=8)))
    file = Path(order.source) / "model.safetensors"
    times = file.stat()
    os.utime(file)  # the source itself was changed in between
    with pytest.raises(UsageError, match="unfinished conversion of another source or with other"):
        convert(order)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert bytes_of(tmp_path / "q") == before


def test_an_interrupted_run_is_taken_up(tmp_path: Path) -> None:
    order = Order(str(write_source(tmp_path / "m")), tmp_path / "q", shard_bytes=20_000)

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(order, interrupt)
    assert convert(order).resumed_bytes > 0


def test_two_conversions_do_not_share_a_folder(tmp_path: Path) -> None:
    order = Order(str(write_source(tmp_path / "m")), tmp_path / "q", shard_bytes=20_000)
    refused = []

    def again(done: int, total: int) -> None:
        if done == total and not refused:
            with pytest.raises(UsageError, match="Another conversion is writing"):
                convert(order)
            refused.append(True)

    convert(order, again)
    assert refused
    load_target(tmp_path / "q")


MEMORY = """
import sys
from pathlib import Path
import dflash_mlx.fast_blas
from dflash_mlx.convert import Order, Recipe, convert

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

small, place, *large = sys.argv[1:]
# What the program itself needs is there afterwards.
convert(Order(small, Path(place) / "small", Recipe(bits=4, group_size=32)))
for source in large:
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    convert(Order(source, Path(source + "-4bit"), Recipe(bits=4, group_size=32)))
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_memory_stays_below_one_and_a_half_shards(tmp_path: Path) -> None:
    """Of converting and of the self-check, with several layers in a shard and with one."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    }
    four = tiny_config("llama", **sizes, intermediate_size=544, num_hidden_layers=32)
    one = tiny_config("llama", **sizes, intermediate_size=4480, num_hidden_layers=8)
    large = [write_large(tmp_path / "four", four), write_large(tmp_path / "one", one)]
    small = write_source(tmp_path / "m")
    process = start(MEMORY, str(small), str(tmp_path), *(str(folder) for folder, _ in large))
    out, err = process.communicate()
    assert process.returncode == 0, err
    for held, (_, shard) in zip(out.split(), large, strict=True):
        assert 32e6 < shard < 34e6
        assert int(held) < 1.5 * shard, out


def write_large(folder: Path, config: dict[str, Any]) -> tuple[Path, int]:
    """Eight shards of as many layers, every layer with the same numbers; the largest's size."""
    one = tiny_weights({**config, "num_hidden_layers": 1})
    layer = {n: mx.array(a).astype(mx.bfloat16) for n, a in one.items() if "layers.0." in n}
    rest = {n: mx.array(a).astype(mx.bfloat16) for n, a in one.items() if "layers.0." not in n}
    write_source(folder, "llama")  # tokenizer and all
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    sizes, index, count = [], {}, config["num_hidden_layers"] // 8
    for shard in range(8):
        part = dict(rest) if shard == 0 else {}
        for number in range(count * shard, count * (shard + 1)):
            part |= {n.replace("layers.0.", f"layers.{number}."): a for n, a in layer.items()}
        file = folder / f"model-{shard + 1}-of-8.safetensors"
        mx.save_safetensors(str(file), part)
        sizes.append(file.stat().st_size)
        index.update(dict.fromkeys(part, file.name))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder, max(sizes)
