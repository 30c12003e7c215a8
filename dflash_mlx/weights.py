"""Reads a checkpoint folder: config.json and safetensors, sharded or not, checked before use.

Knows files and tensor names only, nothing of models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: a file that stands in a folder for as long as a conversion into it is not complete
UNFINISHED = "conversion.unfinished.json"
#: the folder below a converted target that holds its drafter
BUNDLED_DRAFTER = "drafter"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FETCH_AGAIN = "fetch the checkpoint again."

# Element bits of the safetensors types that MLX reads as the numbers they mean.
_ELEMENT_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; CheckpointError when it is absent or not a JSON object."""
    if (folder / UNFINISHED).exists():
        raise CheckpointError(
            f"{folder} is an unfinished conversion; run the same `dflash-mlx convert` again to "
            "finish it, or delete the folder."
        )
    return _read_json(folder / "config.json")


def bundled_drafter(folder: Path) -> tuple[Path, int | None] | None:
    """The drafter a conversion put beside its target, and the bits to hold it in; None without.

    What config.json records decides, not a folder that happens to lie there.
    """
    if not (folder / "config.json").is_file():
        return None
    conversion = read_config(folder).get("conversion") or {}
    if not isinstance(conversion, dict):
        raise CheckpointError(
            f"config.json of {folder} has a conversion {conversion!r:.80}, which is no object; "
            "convert the model again."
        )
    record = conversion.get("drafter")
    if not isinstance(record, dict):
        return None
    return folder / BUNDLED_DRAFTER, record.get("bits")


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of the folder by name, in the types they are stored in.

    Every file's header and size are checked first, so a truncated download is a CheckpointError
    here. The arrays are lazy: pop them one by one and evaluate each in this thread, and no second
    copy of the checkpoint is ever held.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json.")
    index = _read_index(folder)
    files = sorted({folder / name for name in index.values()}) if index else _plain_files(folder)
    home: dict[str, Path] = {}
    weights: dict[str, mx.array] = {}
    for file in files:
        names = _checked_names(file)
        for name in names:
            if name in home:
                raise CheckpointError(
                    f"Tensor {name} is in both {home[name].name} and {file.name} of {folder}; "
                    "remove the file that does not belong to the checkpoint."
                )
            home[name] = file
        if names:
            weights.update(mx.load(str(file), format="safetensors"))  # type: ignore[arg-type]
    if index:
        _check_index(folder, index, home)
    return weights


def is_mlx_format(folder: Path) -> bool:
    """Whether the folder's tensors carry MLX's format tag: names and layouts are MLX's then."""
    index = _read_index(folder)
    file = folder / min(index.values()) if index else _plain_files(folder)[0]
    _checked_names(file)
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    metadata = header.get("__metadata__")
    return isinstance(metadata, dict) and metadata.get("format") == "mlx"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} has no {file.name}; give the folder of a complete checkpoint."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({_reason(error)}); {_FETCH_AGAIN}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object; {_FETCH_AGAIN}")
    return content


def _reason(error: Exception) -> str:
    """What went wrong, without the file's name, which the sentence around it gives."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint; empty without an index file."""
    file = folder / _INDEX
    if not file.exists():
        return {}
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map; {_FETCH_AGAIN}")
    for name in weight_map.values():
        # A name with a folder in it could reach outside the checkpoint.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{file} names {name!r}, which is no file name; {_FETCH_AGAIN}")
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}, which {_INDEX} lists; {_FETCH_AGAIN}")
    return weight_map


def _plain_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no .safetensors file; give a folder with safetensors weights."
        )
    return files


def _check_index(folder: Path, index: dict[str, str], home: dict[str, Path]) -> None:
    for name, file in index.items():
        if name not in home or home[name].name != file:
            raise CheckpointError(
                f"{_INDEX} of {folder} puts tensor {name} into {file}, which does not hold it; "
                f"{_FETCH_AGAIN}"
            )
    if extra := sorted(home.keys() - index.keys()):
        raise CheckpointError(
            f"{home[extra[0]].name} of {folder} holds tensor {extra[0]}, which {_INDEX} does not "
            f"list; {_FETCH_AGAIN}"
        )


def _checked_names(file: Path) -> list[str]:
    """Tensor names of a safetensors file whose header agrees with its size."""
    try:
        size, stream = file.stat().st_size, file.open("rb")
    except OSError as error:  # such as links that lead in a circle
        raise CheckpointError(f"{file} cannot be read ({_reason(error)}); {_FETCH_AGAIN}") from None
    with stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is no complete safetensors file; {_FETCH_AGAIN}")
        try:
            header = json.loads(stream.read(header_bytes))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict) or not _is_metadata(header.pop("__metadata__", None)):
        raise CheckpointError(f"{file} has a broken safetensors header; {_FETCH_AGAIN}")
    end = 0
    for start, stop, name in sorted(_span(file, name, entry) for name, entry in header.items()):
        if start != end:  # the format knows neither gaps nor overlaps
            raise CheckpointError(f"{file} has a broken entry for {name}; {_FETCH_AGAIN}")
        end = stop
    if 8 + header_bytes + end != size:
        raise CheckpointError(
            f"{file} has {size} bytes, its header describes {8 + header_bytes + end}; "
            f"{_FETCH_AGAIN}"
        )
    return list(header)


def _is_metadata(found: Any) -> bool:
    """Whether it is what the format allows: nothing, or strings by name."""
    return found is None or (
        isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    )


def _span(file: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Where tensor `name` begins and ends, in bytes behind the header; and the name."""
    try:
        kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int for number in (*shape, start, end)):
            raise ValueError("no whole numbers")
        elements = math.prod(shape)
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{file} has a broken entry for {name}; {_FETCH_AGAIN}") from None
    if not isinstance(kind, str) or kind not in _ELEMENT_BITS:
        raise CheckpointError(
            f"Tensor {name} of {file} is stored as {kind}, which is not supported; use a "
            f"checkpoint in one of {', '.join(_ELEMENT_BITS)}."
        )
    if start < 0 or min(shape, default=0) < 0 or end - start != elements * _ELEMENT_BITS[kind] // 8:
        raise CheckpointError(f"{file} has a broken entry for {name}; {_FETCH_AGAIN}")
    return start, end, name
