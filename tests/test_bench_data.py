"""Where the benchmark's prompts come from (package, hub, folder, file), and their lengths."""

from __future__ import annotations

import builtins
import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from dflash_mlx.bench import contexts, questions
from dflash_mlx.bench.questions import Question, from_file, load
from dflash_mlx.bench.rows import rows
from dflash_mlx.bench.suites import SUITES, suite_names
from dflash_mlx.cli import bench as command
from dflash_mlx.errors import SourceError, UsageError
from tests.fake_hub import FakeHub, FakeRepo

pytest_plugins = ("tests.hub_fixtures",)
REASON = "Please reason step by step, and put your final answer within \\boxed{}."

# Rows as the data sets have them, by suite, and the prompts that DFlash's benchmark makes of them.
ROWS = {
    "gsm8k": ({"question": "1+1?", "answer": "2"}, f"1+1?\n{REASON}"),
    "math500": ({"problem": "x?", "solution": ""}, f"x?\n{REASON}"),
    "aime25": ({"problem_idx": 1, "problem": "y?"}, f"y?\n{REASON}"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n\n```",
    ),
    "mbpp": ({"task_id": 2, "prompt": "Write f."}, "Write f."),
    "livecodebench": (
        {"question_content": "Sort.", "starter_code": "", "private_test_cases": "x"},
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program\n\n### Question:\nSort.\n\n"
        "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)",
    ),
    "mt-bench": ({"question_id": 81, "turns": ["Go.", "On."]}, "Go."),
    "alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\nInput:\n1 2"),
    "gpqa": (
        {"Question": "Q?", "Correct Answer": "c", "Incorrect Answer 1": "i1",
         "Incorrect Answer 2": "i2", "Incorrect Answer 3": "i3"},
        None,
    ),
    "longbench": (
        {"input": "", "context": "A report."},
        "A report.\n\nWrite a one-page summary of the text above.",
    ),
}  # fmt: skip


def content(suite: str, records: list[dict]) -> bytes:
    """A data set's file in its own format."""
    file = SUITES[suite].file
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if file.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        out = BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(records), out)
        return out.getvalue()
    if file.endswith(".csv"):
        import csv
        from io import StringIO

        text = StringIO()
        writer = csv.DictWriter(text, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue().encode()
    if file.endswith(".zip"):
        out = BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for member in SUITES[suite].members:
                archive.writestr(member, lines)
        return out.getvalue()
    return lines.encode()


def test_help_names_all_suites() -> None:
    assert command._SUITES == ", ".join(SUITES) == ", ".join(ROWS)
    assert suite_names("mbpp, gsm8k") == ["mbpp", "gsm8k"]
    assert command.DEFAULT_SUITE in SUITES


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_is_fetched_from_the_hub_and_worded_as_dflash_does(
    suite: str, server: FakeHub
) -> None:
    record, prompt = ROWS[suite]
    place = SUITES[suite]
    commit = place.revision or "b" * 40
    server.repos[f"datasets/{place.repo}"] = FakeRepo(
        {place.file: content(suite, [record] * 20)}, commit=commit
    )
    loaded = load(suite, 17, "hub")
    count = 20 * (len(place.members) or 1)
    assert len({q.name for q in loaded.questions}) == len(loaded.questions) == count
    assert [q.name for q in loaded.questions[:2]] != [f"{suite}/0", f"{suite}/1"]  # shuffled
    assert (loaded.source, loaded.revision) == (f"hub: {place.repo}", commit)
    if prompt is not None:
        assert {q.prompt for q in loaded.questions} == {prompt}
    asked = len(server.asked)
    server.broken = True  # a pinned file that is on disk needs no hub; else the last one serves
    assert load(suite, 17, "hub").revision == commit
    assert place.revision is None or len(server.asked) == asked


def test_answers_of_gpqa_stand_in_an_order_of_the_questions_own() -> None:
    record, _ = ROWS["gpqa"]
    seen = set()
    for number in range(40):
        wording = SUITES["gpqa"].word({**record, "Question": f"Q{number}?"})
        first, *lines, last = wording.ask.replace("\n\n", "\n").split("\n")
        assert first == f"Q{number}?"
        assert sorted(line[3:] for line in lines) == ["c", "i1", "i2", "i3"]
        assert "".join(line[0] for line in lines) == "ABCD"
        assert "letter of your final answer" in last
        seen.add(next(line[0] for line in lines if line.endswith("c")))
        assert wording == SUITES["gpqa"].word({**record, "Question": f"Q{number}?"})
    assert seen == set("ABCD")


def test_samples_of_the_package_serve_while_they_suffice(server: FakeHub) -> None:
    shipping = [name for name, suite in SUITES.items() if suite.ships]
    assert len(shipping) == 4
    for name in shipping:
        loaded = load(name, 16, None)
        assert (loaded.source, len(loaded.questions)) == ("package", 16)
        assert len({q.name for q in loaded.questions}) == 16
    assert load("gsm8k", 1, None).questions[0].prompt.endswith(REASON)
    assert server.asked == []
    with pytest.raises(SourceError, match=r"The dataset openai/gsm8k .* shows no repo"):
        load("gsm8k", 17, None)
    with pytest.raises(SourceError, match=r"The dataset HuggingFaceH4/MATH-500 .* shows no repo"):
        load("math500", 1, None)


def test_a_gated_data_set_says_where_to_ask(server: FakeHub) -> None:
    place = SUITES["gpqa"]
    repo = FakeRepo({place.file: b"x"}, commit=str(place.revision), gated=True)
    server.repos[f"datasets/{place.repo}"] = repo
    with pytest.raises(SourceError, match=r"is gated.*/datasets/Idavidrein/gpqa"):
        load("gpqa", 1, None)


def test_data_sets_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "math500.jsonl").write_bytes(content("math500", [ROWS["math500"][0]]))
    loaded = load("math500", 9, str(tmp_path))
    assert [q.prompt for q in loaded.questions] == [ROWS["math500"][1]]
    assert (loaded.source, loaded.revision) == (str(tmp_path / "math500.jsonl"), None)
    own = tmp_path / "mbpp" / SUITES["mbpp"].file
    own.parent.mkdir(parents=True)
    own.write_bytes(content("mbpp", [ROWS["mbpp"][0]]))
    assert load("mbpp", 9, str(tmp_path)).questions[0].prompt == "Write f."
    (tmp_path / "gsm8k.json").write_text(json.dumps([ROWS["gsm8k"][0]]))
    assert load("gsm8k", 9, str(tmp_path)).questions[0].prompt == ROWS["gsm8k"][1]
    with pytest.raises(UsageError, match="has no alpaca: neither"):
        load("alpaca", 9, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("math500.jsonl", '{"problem": "a"}\n{"a": "b"}\n', "line 2 has no text in .* 'problem'"),
        ("math500.jsonl", '{"problem": ""}\n', "line 1 has no text in the column 'problem'"),
        ("math500.jsonl", '{"problem"', "line 1 is no JSON"),
        ("math500.jsonl", "\n", "has no rows"),
        ("math500.json", "{}", "cannot be read .no JSON list"),
        ("math500.json", "[" * 100_000, "cannot be read .it is nested too deeply"),
        ("math500.json", "[" + "9" * 5000, "cannot be read .*limit .* digits"),
        ("math500.json", "[1]", "row 1 is no JSON object"),
        ("math500.csv", "a,b\n1,2\n", "row 1 has no text in the column 'problem'"),
        ("math500.parquet", "PAR", "cannot be read"),
        ("longbench.zip", "PK", "cannot be read"),
    ],
)  # fmt: skip
def test_faults_of_a_data_set_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        load(name.partition(".")[0], 9, str(tmp_path))


@pytest.mark.parametrize(
    ("suite", "column", "values"),
    [
        ("gsm8k", "question", [None, 3, " ", "half \ud800"]),
        ("longbench", "input", [None, 3, "\ud800"]),
        ("longbench", "context", [None, ""]),
        ("alpaca", "input", [None, {"a": 1}, ["a"], "\ud800"]),
        ("livecodebench", "starter_code", [None, {"a": 1}]),
        ("mt-bench", "turns", [None, "a", [], [None], [["a"]], [" "], ["\ud800"]]),
        ("gpqa", "Incorrect Answer 2", [None, 3]),
    ],
)
def test_columns_of_another_type_are_no_prompts(
    suite: str, column: str, values: list, tmp_path: Path
) -> None:
    for value in values:
        (tmp_path / "f.jsonl").write_text(json.dumps(ROWS[suite][0] | {column: value}))
        with pytest.raises(UsageError, match=f"f.jsonl line 1 has no text .* '{column}'"):
            questions._worded(suite, SUITES[suite], tmp_path / "f.jsonl")


def test_an_archive_without_its_members_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "longbench.zip", "w") as archive:
        archive.writestr("data/other.jsonl", "{}")
    with pytest.raises(UsageError, match=r"has no file data/gov_report\.jsonl"):
        load("longbench", 9, str(tmp_path))


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    def patched(find: bytes, offset: int, new: bytes, central: int | None, **options) -> bytes:
        out = BytesIO()
        with zipfile.ZipFile(out, "w", **options) as archive:
            for member in SUITES["longbench"].members:
                archive.writestr(member, json.dumps(ROWS["longbench"][0]))
        found = bytearray(out.getvalue())
        places = [(found.index(find), offset)]
        if central is not None:
            places.append((found.index(b"PK\1\2"), central))
        for start, at in places:
            found[start + at : start + at + len(new)] = new
        return bytes(found)

    deflated = {"compression": zipfile.ZIP_DEFLATED}
    for content in (
        patched(b"A report", 0, b"B", None),  # another checksum
        patched(b"gov_report.jsonl", 16, b"\xff" * 8, None, **deflated),
        patched(b"PK\3\4", 6, b"\1", 8),  # encrypted
        patched(b"PK\3\4", 8, b"\x63", 10),  # an unknown method
    ):
        (tmp_path / "longbench.zip").write_bytes(content)
        with pytest.raises(UsageError, match=r"longbench\.zip.*cannot be read"):
            load("longbench", 9, str(tmp_path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(
        UsageError, match=r"pyarrow, which reads them, is not installed.*pip install"
    ):
        list(rows(tmp_path / "x.parquet"))


def test_a_prompts_file_is_read_whole_and_as_training_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\u2028b"},  # no end of a line within JSON
        {"role": "assistant", "content": "c"},
    ]
    lines = [{"id": "t", "turns": ["b", "c"]}, {"id": "m", "messages": talk}]
    lines += [{"id": str(n), "prompt": f"p{n}"} for n in range(30)]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    found = from_file(file).questions
    assert len(found) == 32
    assert (found[0].name, found[0].prompt) == ("t", "b")
    assert found[1].prompt == talk[:2]


def test_equal_prompts_of_a_file_are_all_run(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x", "id": "i"}\n{"prompt": "y"}\n' + '{"prompt": "x"}\n' * 2)
    found = from_file(file).questions
    assert [q.prompt for q in found] == ["x", "y", "x", "x"]
    names = [q.name for q in found]
    assert [names[0], *names[2:]] == ["i", "i (2)", "i (3)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is no JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', "line 3 has no prompt"),
        ('["a"]', "line 1 is no JSON object"),
        ('{"turns": []}', "line 1 has turns that is \\[\\]"),
        ("", "has no prompts"),
    ],
)
def test_prompt_files_are_read_strictly(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        from_file(file)
    with pytest.raises(UsageError, match="cannot be read"):
        from_file(tmp_path / "none")


def words(question: Question) -> int:
    """A stand-in for a tokenizer: words, and 5 of a template."""
    prompt = question.prompt
    text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
    return 5 + len(text.split())


def ask(name: str, text: str, document: str | None = None) -> Question:
    return Question(name, ({"role": "user", "content": text},), document)


def test_questions_are_brought_to_a_length_by_other_questions_text() -> None:
    some = [ask(f"q{n}", " ".join([f"w{n}"] * (n + 3))) for n in range(4)]
    found = contexts.fitted(some, 200, 3, words)
    assert [q.name for q in found] == ["q0 at 200", "q1 at 200", "q2 at 200"]
    for question, before in zip(found, some, strict=False):
        assert 200 - contexts.SLACK <= words(question) <= 200
        assert question.prompt.endswith("\n\n" + before.prompt)
        assert question.prompt.startswith(some[int(before.name[1]) + 1].prompt)
    assert contexts.fitted([ask("long", "w " * 300)], 200, 3, words) == []
    only = contexts.fitted([ask("one", "a b")], 1024, 1, words)
    assert 1016 <= words(only[0]) <= 1024
    assert only[0].name == "one at 1k"


def test_documents_lose_their_middle() -> None:
    text = " ".join(str(n) for n in range(1000))
    some = [ask("short", "Sum up.", "a b c"), ask("long", "Sum up.", text)]
    (found,) = contexts.fitted(some, 100, 9, words)
    assert 92 <= words(found) <= 100
    kept = found.prompt.split()
    assert kept[0] == "0"
    assert kept[-3:] == ["999", "Sum", "up."]
    assert "500" not in kept
    sizes = [ask(str(n), "Sum up.", "w " * n) for n in (5, 2000, 90000, 3000, 1500)]
    assert [q.name for q in contexts.within(sizes, 2500, 9, words)] == ["2000", "1500"]
    assert [q.name for q in contexts.within(sizes, 99999, 1, words)] == ["2000"]


def test_a_system_message_stays_in_front_of_the_added_text() -> None:
    talk = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    (found,) = contexts.fitted([Question("t", talk)], 60, 1, words)
    assert found.prompt[0] == talk[0]
    assert found.prompt[1]["content"].endswith("\n\nu")
    assert questions.SAMPLES == 16
