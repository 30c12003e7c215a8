"""Reading prompts to train on: the kinds of lines, names, duplicates, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.train.prompts import Prompt, read_prompts

USER = {"role": "user", "content": "hello"}
OWN = Path(__file__).resolve().parents[1] / "scripts" / "prompts"


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_kinds_of_lines(tmp_path: Path) -> None:
    system, answer = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "one", "id": "first", "max": 7},
        {"turns": ["a", "b", "c"], "id": 12, "category": "any"},
        {"messages": [system, USER, answer], "id": "m"},
        {"messages": [USER, answer, USER], "id": "n"},
    )
    assert read_prompts([file]) == [
        Prompt("first", ({"role": "user", "content": "one"},), (), 7),
        Prompt("12", ({"role": "user", "content": "a"},), ("b", "c")),
        Prompt("m", (system, USER)),
        Prompt("n", (USER, answer, USER)),
    ]
    assert read_prompts([file])[1].answer_names == ["12", "12/turn-2", "12/turn-3"]


def test_lines_end_where_json_lines_end(tmp_path: Path) -> None:
    """Other characters that end a line in Unicode may stand in a string; \\r may end a line."""
    file, text = tmp_path / "p.jsonl", "a\u2028b\x85c\u2029d"
    file.write_bytes(f'{{"prompt": "{text}"}}\r\n{{"prompt": "e"}}'.encode())
    assert [p.messages[0]["content"] for p in read_prompts([file])] == [text, "e"]


def test_duplicates_once_and_names_from_content(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"turns": ["x"], "id": "other"})
    b = tmp_path / "b.jsonl.gz"
    b.write_bytes(
        gzip.compress(b'\n{"prompt": "y"}\n{"messages": [%s]}\n' % json.dumps(USER).encode())
    )
    names = [p.name for p in read_prompts([a, b, a])]
    assert len(names) == len(set(names)) == 3
    assert [p.name for p in read_prompts([b])] == names[1:]  # wherever the line stands
    assert [p.name for p in read_prompts([b, a])] == [*names[1:], names[0]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "no prompt"),
        ({"prompt": "a", "turns": ["a"]}, "prompt and turns"),
        ({"prompt": "  "}, "'  '"),
        ({"prompt": 3}, "3"),
        ({"prompt": "\ud800"}, "ud800"),
        ({"turns": []}, r"\[\]"),
        ({"turns": ["a", ""]}, "'a', ''"),
        ({"turns": "abc"}, "abc"),
        ({"messages": USER}, "role"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{**USER, "tool_calls": []}]}, "tool_calls"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no message of the user"),
        ({"messages": [{"role": "assistant", "content": "s"}]}, "no message of the user"),
        ({"prompt": "a", "id": ["x"]}, "id"),
        ({"prompt": "a", "max": 0}, "max 0"),
        ({"prompt": "a", "max": True}, "max True"),
        ([1], "no JSON object"),
    ],
)
def test_malformed_lines_are_refused_by_file_and_line(tmp_path: Path, row: Any, said: str) -> None:
    file = write(tmp_path / "bad.jsonl", {"prompt": "good"}, row)
    with pytest.raises(UsageError, match=rf"bad\.jsonl line 2 .*{said}"):
        read_prompts([file])


def test_broken_json_ids_taken_twice_and_empty_files_are_refused(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(UsageError, match=r"torn\.jsonl line 2"):
        read_prompts([torn])
    twice = write(tmp_path / "twice.jsonl", {"prompt": "a", "id": "i"}, {"prompt": "b", "id": "i"})
    with pytest.raises(UsageError, match=r"twice\.jsonl line 2 .*'i' of .*line 1"):
        read_prompts([twice])
    # An answer's name, too.
    turn = write(
        tmp_path / "turn.jsonl", {"turns": ["a", "b"], "id": "i"}, {"prompt": "c", "id": "i/turn-2"}
    )
    with pytest.raises(UsageError, match=r"line 2 .*'i/turn-2'"):
        read_prompts([turn])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(UsageError, match=r"empty\.jsonl has no prompts"):
        read_prompts([torn.rename(tmp_path / "t"), empty][1:])
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("[" * 100_000, "it is nested too deeply"), ('{"max": ' + "9" * 5000, "Exceeds .* digits")],
)
def test_json_that_python_cannot_hold(tmp_path: Path, text: str, said: str) -> None:
    (file := tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(UsageError, match=rf"f\.jsonl line 1 is no JSON \({said}"):
        read_prompts([file])


def test_a_damaged_archive(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "a"}\n' * 99))
    packed[12:20] = b"\xff" * 8
    (file := tmp_path / "f.jsonl.gz").write_bytes(packed)
    with pytest.raises(UsageError, match=r"f\.jsonl\.gz cannot be read"):
        read_prompts([file])


def test_the_projects_own_prompts_are_read() -> None:
    files = sorted(OWN.glob("*.jsonl"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    prompts = read_prompts(files)
    assert len(files) == 2
    assert len(prompts) == lines > 1000  # no prompt twice
    assert any(prompt.further for prompt in prompts)
