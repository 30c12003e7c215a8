"""The file of rejected kernels: what it keeps, for whom, and what a damaged one does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.cli import doctor
from dflash_mlx.kernels import backend, record
from dflash_mlx.kernels.source import Launch

ONES = [mx.ones((4,))]


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The record, of a process whose kernels are active and were not used yet."""
    monkeypatch.setattr(record, "home_dir", lambda: tmp_path / "home")
    monkeypatch.setattr(backend, "choice", lambda: backend.Choice(True, "a test"))
    monkeypatch.setattr(backend, "_on_gpu", lambda: True)
    new_process(monkeypatch)
    return record.record_file()


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("_trusted", set()), ("_rejected", {}), ("_beyond", {})):
        monkeypatch.setattr(backend, name, empty)


def use(operation: str, variant: Any, factor: float = 1.0) -> None:
    launch = Launch((1, 1, 1), (32, 1, 1), 0)
    backend.run(operation, variant, lambda: [ONES[0] * factor], lambda: ONES, launches=[launch])


def told() -> list[str]:
    return doctor._kernels(list)[2]


def test_a_rejection_outlives_its_process_until_the_same_case_agrees(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="sums is not used"):
        use("sums", ("a", mx.bfloat16, 4), 1.5)
    assert len(told()) == 1  # its own rejection, once
    new_process(monkeypatch)
    (sentence,) = told()
    assert sentence.startswith("The Metal kernel sums was not used on 20")
    assert "it differs from MLX's operations by 0.5 (case ('a', mlx.core.bfloat16, 4))" in sentence
    use("sums", ("b", mx.bfloat16, 4))  # another case
    use("others", ("a", mx.bfloat16, 4))
    assert told() == [sentence]
    use("sums", ("a", mx.bfloat16, 4))
    assert told() == []
    assert json.loads(file.read_text()) == []
    assert [entry.name for entry in file.parent.iterdir()] == ["kernels.json"]


def test_a_second_rejection_of_a_case_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in (1.5, 3.0):
        new_process(monkeypatch)
        with pytest.warns(RuntimeWarning):
            use("sums", 0, factor)
    (one,), fault = record.kept()
    assert fault is None
    assert one.reason.endswith("by 2")


@pytest.mark.parametrize("changed", ["chip", "versions"])
def test_another_machine_and_other_versions_are_not_meant(
    changed: str, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    assert record.keep("sums", 0, "it differs") is None
    other: Any = "Apple M9" if changed == "chip" else {"mlx": "9.9", "dflash-mlx": "9"}
    with monkeypatch.context() as patch:
        patch.setattr(record, changed, lambda: other)
        assert record.kept() == ([], None)
        record.drop("sums", 0)
        assert record.keep("sums", 0, "it does not run") is None
        assert [one.reason for one in record.kept()[0]] == ["it does not run"]
    assert [one.reason for one in record.kept()[0]] == ["it differs"]
    assert len(json.loads(file.read_text())) == 2


def test_the_file_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST", 3)
    for variant in range(5):
        record.keep("sums", variant, "it differs")
    assert [one.variant for one in record.kept()[0]] == ["2", "3", "4"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"[{", b"\xff", b"null", b"{}x", b'[{"operation": "sums"}]', b"[3]", b"[" * 100_000),
        b'[{"operation": 1, "variant": "", "reason": "", "date": "", "machine": ""}]',
    ],
)
def test_a_damaged_file_is_told_and_begun_anew(content: bytes, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    found, fault = record.kept()
    assert found == []
    assert fault is not None
    assert str(file) in fault
    assert told() == [fault]
    use("sums", 0)  # reads it, and leaves it
    assert file.read_bytes() == content
    assert record.keep("sums", 0, "it differs") is None
    (one,), fault = record.kept()
    assert (one.operation, fault) == ("sums", None)


def test_a_file_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("no folder")
    with pytest.warns(RuntimeWarning, match=r"This could not be kept in .*kernels.json"):
        use("sums", 0, 1.5)
    assert backend.rejections() == [
        "The Metal kernel sums is not used: it differs from MLX's operations by 0.5."
    ]


def test_writers_at_the_same_time_lose_nothing(file: Path) -> None:
    def several(number: int) -> None:
        for variant in range(6):
            assert record.keep(f"op{number}", variant, "it differs") is None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(several, range(4)))
    assert len(record.kept()[0]) == 24


def test_a_folder_that_cannot_be_searched_ends_no_generation(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refused)
        record.drop("sums", 0)


def test_a_failed_write_leaves_nothing(file: Path) -> None:
    file.mkdir(parents=True)
    assert record.keep("sums", 0, "it differs") is not None
    assert [path.name for path in file.parent.iterdir()] == [file.name]
