"""Shards of features: what the safetensors package and MLX write is read; damage is told."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_mlx.errors import CheckpointError
from dflash_mlx.train.shards import Shard


def numbers(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 50, shape).astype(dtype)


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_what_the_package_writes_is_read(dtype, name, tmp_path):
    """Whatever the length of the header, behind which the data may begin anywhere."""
    arrays = {name: numbers((3, 5), dtype), "other": numbers((2,), dtype)}
    save_file(arrays, tmp_path / "x.safetensors", {"why": "x" * len(name)})
    shard = Shard(tmp_path / "x.safetensors")
    assert sorted(shard.names()) == sorted(arrays)
    for key, expected in arrays.items():
        found = np.array(shard.read(key))
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.int32])
def test_what_mlx_writes_is_read(dtype, tmp_path):
    arrays = {"x.features": mx.array(numbers((7, 3), np.float32)).astype(dtype)}
    arrays["none"] = mx.zeros((0, 4), dtype)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays)
    shard = Shard(tmp_path / "x.safetensors")
    for name, expected in arrays.items():
        assert shard.read(name).dtype == dtype
        assert mx.array_equal(shard.read(name), expected)


@pytest.mark.parametrize("odd", range(4))
def test_data_may_begin_at_any_byte(odd, tmp_path):
    """The format asks for no alignment."""
    array = numbers((4, 3), np.float32)
    entry = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, array.nbytes]}
    text = json.dumps({"x": entry}).encode()
    text += b" " * ((odd - len(text)) % 4)
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + array.tobytes())
    assert np.array_equal(np.array(Shard(file).read("x")), array)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_shards_keep_no_file_open(tmp_path):
    """A corpus may have more shards than a process may have files."""
    save_file({"x": numbers((4, 3), np.float32)}, tmp_path / "x.safetensors")
    before = open_files()
    shards = [Shard(tmp_path / "x.safetensors") for _ in range(20)]
    arrays = [shard.read("x") for shard in shards]
    mx.eval(arrays)
    assert open_files() == before


def test_a_shard_that_is_gone_or_shorter_is_told_when_it_is_read(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"x": numbers((4, 3), np.float32)}, file)
    shard = Shard(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"x\.safetensors are damaged"):
        shard.read("x")
    save_file({"y": numbers((9, 3), np.float32), "x": numbers((4, 3), np.float32)}, file)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        shard.read("x")
    file.unlink()
    for reading in (lambda: shard.read("x"), lambda: Shard(file)):
        with pytest.raises(CheckpointError, match=r"cannot be read \(No such file") as told:
            reading()
        assert "delete" not in str(told.value)


def broken(content: bytes, what: str) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if what == "entry":
        header["x"]["shape"] = [99, 3]
    if what == "offsets":
        header["x"]["data_offsets"] = [-8, 40]
    if what in HOSTILE:
        header["x"]["shape"], header["x"]["data_offsets"] = HOSTILE[what]
    if what == "type":
        header["x"]["dtype"] = "F8_E4M3"
    if what == "list":
        header = [1]
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    return {
        "empty": b"",
        "short": whole[:5],
        "cut in the header": whole[:30],
        "cut in the data": whole[:-3],
        "longer": whole + b"123",
        "noise": bytes(range(256)),
    }.get(what, whole)


#: shapes and offsets that Python's JSON reads and no array has
HOSTILE = {
    "offsets with points": ([4, 3], [0.0, 48.0]),
    "a shape with points": ([4.0, 3.0], [0, 48]),
    "infinite": ([float("inf")], [0, float("inf")]),
    "huge": ([10**400, 1.5], [0, 48]),
    "empty and huge": ([0, 10**40], [0, 0]),
    "true": ([True, 12], [0, 48]),
    "negative": ([-4, -3], [0, 48]),
}
KINDS = ("empty", "short", "cut in the header", "cut in the data", "longer", "noise")


@pytest.mark.parametrize("what", [*KINDS, *HOSTILE, "entry", "offsets", "type", "list"])
def test_damage_is_told_with_the_file(what, tmp_path):
    file = Path(tmp_path / "features-1.safetensors")
    save_file({"x": numbers((4, 3), np.float32)}, file)
    assert Shard(file).names() == ["x"]
    file.write_bytes(broken(file.read_bytes(), what))
    with pytest.raises(CheckpointError, match=r"features-1\.safetensors are damaged"):
        Shard(file)
