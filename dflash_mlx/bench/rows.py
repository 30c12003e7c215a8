"""Rows of a data set's file: JSON Lines, JSON, CSV, Parquet, or a zip archive of such files."""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError
from dflash_mlx.train.corpus import UNREADABLE, json_fault, read_jsonl

Row = dict[str, Any]
#: endings of the files that can be read
ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".zip")


def rows(file: Path | zipfile.Path, members: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """(where it stands, row by column) of all rows; `members`: of a zip archive, in this order.

    UsageError for a file that cannot be read, or a row that is none.
    """
    readers = {".csv": _csv, ".parquet": _parquet, ".json": _json}
    if file.suffix == ".zip":
        for member in _members(file, members):
            yield from rows(member)
    elif file.suffix in readers:
        try:
            for number, row in enumerate(readers[file.suffix](file), start=1):
                if not isinstance(row, dict):
                    raise UsageError(f"{file} row {number} is no JSON object. Correct it.")
                yield f"{file} row {number}", row
        except (*UNREADABLE, csv.Error) as error:
            raise UsageError(f"{file} cannot be read ({error}). Fetch the file again.") from None
    else:
        for number, row in read_jsonl(file):
            yield f"{file} line {number}", row


def _json(file: Path) -> Iterator[Any]:
    text = file.read_text("utf-8")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(json_fault(error)) from None
    if not isinstance(found, list):
        raise ValueError("no JSON list")
    yield from found


def _csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # documents are longer than the usual limit
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)


def _parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{file} is a Parquet file, and pyarrow, which reads them, is not installed. "
            f"Install it with `{sys.executable} -m pip install pyarrow`."
        ) from None
    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _members(file: Path | zipfile.Path, names: Sequence[str]) -> Iterator[zipfile.Path]:
    try:
        archive = zipfile.ZipFile(file)
    except UNREADABLE as error:
        raise UsageError(f"{file} cannot be read ({error}). Fetch the file again.") from None
    for name in names:
        member = zipfile.Path(archive, name)
        if not member.exists():
            raise UsageError(f"{file} has no file {name}. Take the data set's own archive.")
        yield member
