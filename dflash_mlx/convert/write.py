"""Writes and hashes safetensors files tensor by tensor, each file whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.convert.quantize import Output
from dflash_mlx.hub.request import write_whole

PART = ".part"
INDEX = "model.safetensors.index.json"
_TYPE_NAMES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}


@dataclass(frozen=True)
class Job:
    """One stored tensor on its way: what it becomes, and its bytes when they are asked for."""

    outputs: tuple[Output, ...]
    encode: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint and what goes into it."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; the header comes on top."""
        return sum(job.nbytes for job in self.jobs)


def make_shards(jobs: Iterable[Job], limit: int) -> list[Shard]:
    """Jobs in their order, in files of at most `limit` bytes unless one job is larger."""
    groups: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if groups[-1] and size + job.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += job.nbytes
    count = len(groups)
    if count == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    ]


def write_shard(folder: Path, shard: Shard, tag: str, advance: Callable[[int], None]) -> str:
    """Write one file under a name of its own and rename it; returns its sha256.

    tag: the format named in the file's metadata, "mlx" or "pt". advance: told the bytes written.
    Raises OSError, and what a job's `encode` raises.
    """
    file = folder / shard.name
    part = file.with_name(file.name + PART)
    digest = hashlib.sha256()
    with part.open("wb") as stream:
        header = _header([output for job in shard.jobs for output in job.outputs], tag)
        stream.write(header)
        digest.update(header)
        for job in shard.jobs:
            written = 0
            for block in job.encode():
                stream.write(block)
                digest.update(block)
                written += block.nbytes
                advance(block.nbytes)
            if written != job.nbytes:
                raise AssertionError(f"{job.outputs[0].name}: {written} bytes, not {job.nbytes}")
            mx.clear_cache()
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    return digest.hexdigest()


def _header(outputs: Sequence[Output], tag: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": tag}}
    end = 0
    for output in outputs:
        start, end = end, end + output.nbytes
        header[output.name] = {
            "dtype": _TYPE_NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_index(folder: Path, shards: Sequence[Shard]) -> str | None:
    """Write the index of a checkpoint of several files and return its name; one needs none."""
    if len(shards) == 1:
        return None
    names = {o.name: shard.name for shard in shards for job in shard.jobs for o in job.outputs}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(names.items())),
    }
    write_json(folder / INDEX, index)
    return INDEX


def write_json(file: Path, content: Any) -> None:
    """Write a small JSON file whole or not at all."""
    write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sha256_of(file: Path) -> str:
    """The hash of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
