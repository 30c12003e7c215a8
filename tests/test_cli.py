"""The command line on a stand-in engine: messages and exit codes, streams, JSON, other commands."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from fake_engine import WARNING, FakeEngine

from dflash_mlx import __version__, cli, engine, kernels, machine, paths
from dflash_mlx.cli import console
from dflash_mlx.cli import doctor as doctor_command
from dflash_mlx.engine import Chunk

SEE_CHAT = " `dflash-mlx chat --help` lists what it takes."

STATS = """\
model             m
drafter           org/drafter
engine            dflash (the drafter given)
prompt            31 tokens
prefill           0.50 s, 62.0 tok/s
generated         11 tokens (stop)
generation        2.00 s, 5.0 tok/s
total             2.62 s including prefill
tokens per cycle  2.67 over 3 cycles
accepted          5 of 21 drafted tokens
peak memory       0.75 GB
BLAS              a BLAS: a reason
kernels           none: a reason
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Run:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys, self._patch = capsys, patch
        self.engines: list[FakeEngine] = []

    def use_fake_engine(self) -> None:
        def load(name: str, **options: object) -> FakeEngine:
            self.engines.append(FakeEngine(name, **options))
            return self.engines[-1]

        self._patch.setattr(engine, "load", load)

    def __call__(self, *arguments: str, stdin: bytes | None = b"") -> tuple[int, str, str]:
        """Exit code, standard output and error. stdin None is a terminal."""
        source = Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        self._patch.setattr(sys, "stdin", source)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Run(capsys, monkeypatch)


@pytest.fixture
def fake(run: Run) -> Run:
    run.use_fake_engine()
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nope", "No such option: --nope. `dflash-mlx --help` lists what it takes."),
        ("talk", "No such command 'talk'. `dflash-mlx --help` lists what it takes."),
        ("chat", f"Missing argument 'model'.{SEE_CHAT}"),
        ("chat m p q", f"Got unexpected extra argument(s) (q).{SEE_CHAT}"),
        ("chat m p --seeds 1", f"No such option: --seeds (Possible options: --seed).{SEE_CHAT}"),
        (
            "chat m p --draft d --no-draft",
            "--draft and --no-draft contradict each other. Leave one of them out.",
        ),
        (
            "chat m p --thinking --reasoning low",
            "--reasoning sets a level, --thinking a switch. Leave one of them out.",
        ),
        (
            "chat m p --no-draft --draft-bits 4",
            "--draft-bits needs a drafter, and --no-draft forbids one. Leave one out.",
        ),
        (
            "chat m p --draft-bits 5",
            "--draft-bits is 5. A drafter can be quantized to 4 or 8.",
        ),
        (
            "chat m p --dtype int8",
            "--dtype is 'int8'. Give one of auto, bfloat16, float16, float32.",
        ),
        ("chat m p --max-tokens 0", "--max-tokens is 0. Give a whole number above 0."),
        (
            "chat m p --temp -1",
            "temperature is -1.0. Give a value that is 0 (greedy) or at least 1e-05.",
        ),
        (
            "chat m p --temp nan",
            "temperature is nan. Give a value that is 0 (greedy) or at least 1e-05.",
        ),
        ("chat m p --top-p 0", "top_p is 0.0. Give a value that is above 0 and at most 1."),
        ("chat m p --min-p 2", "min_p is 2.0. Give a value that is between 0 and 1."),
        (
            "chat m p --top-k -3",
            "top_k is -3. Give a value that is a whole number, 0 (off) or more.",
        ),
        (
            "chat m p --repetition-penalty 0",
            "repetition_penalty is 0.0. Give a value that is above 0.",
        ),
        ("chat m -", "The prompt is empty. Give some text to answer."),
        ("chat m", "The prompt is empty. Give some text to answer."),
        (
            "chat SmolLM p",
            "'SmolLM' is no known model, and no file or folder of that name exists here. "
            "Did you mean SmolLM2-135M? `dflash-mlx models` lists the known names; "
            "a hub repo is written ORG/NAME.",
        ),
        (
            "chat z-lab/Qwen3-4B-DFlash-b16 p",
            "z-lab/Qwen3-4B-DFlash-b16 is a drafter, which cannot answer on its own. "
            "Give its target as the model: Qwen3-4B.",
        ),
        (
            "chat ./missing.gguf p",
            "The model './missing.gguf' does not exist: there is no such file or folder. "
            "Check the path; a hub repo is written ORG/NAME.",
        ),
        (
            "models Quen3-8B",
            "No known pair has 'Quen3-8B' in its names. Did you mean Qwen3-8B or Qwen3-4B or "
            "Qwen3.5-9B? Run `dflash-mlx models`.",
        ),
        ("models nothing", "No known pair has 'nothing' in its names. Run `dflash-mlx models`."),
    ],
)
def test_errors_of_the_user_are_sentences(run: Run, arguments: str, message: str) -> None:
    assert run(*arguments.split()) == (2, "", f"dflash-mlx: {message}\n")


def test_an_unreadable_number_is_refused_by_the_options_name(run: Run) -> None:
    code, out, err = run("chat", "m", "p", "--temp", "warm")
    assert (code, out) == (2, "")
    assert err.startswith("dflash-mlx: Invalid value for '--temp': ")
    assert err.endswith(f".{SEE_CHAT}\n")


def test_errors_of_the_engine_are_sentences(fake: Run) -> None:
    assert fake("chat", "m", "refuse") == (
        2,
        "",
        "dflash-mlx: The prompt is refused. Give another one.\n",
    )


def test_an_empty_or_unreadable_prompt_is_refused_before_loading(fake: Run) -> None:
    message = "dflash-mlx: The prompt is empty. Give some text to answer.\n"
    assert fake("chat", "m", " \n") == (2, "", message)
    message = "dflash-mlx: Standard input is not UTF-8 text (byte 2). Convert it first.\n"
    assert fake("chat", "m", stdin=b"ab\xff") == (2, "", message)
    message = "dflash-mlx: --json answers one prompt. Give the prompt, or pipe it in.\n"
    assert fake("chat", "m", "--json", stdin=None) == (2, "", message)
    assert fake.engines == []


def test_a_bug_keeps_its_traceback(fake: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["chat", "m", "crash"])


def test_one_answer_and_its_statistics(fake: Run) -> None:
    code, out, err = fake("chat", "m", "hello there")
    assert (code, out) == (0, "hello there\n")
    assert err == f"warning: {WARNING}\n{STATS}"
    assert fake("chat", "m", "hello", "--no-stats") == (0, "hello\n", f"warning: {WARNING}\n")


def test_the_options_reach_the_engine(fake: Run) -> None:
    fake(
        "chat", "m", "p", "--draft", "d", "--draft-bits", "8", "--max-tokens", "5",
        "--temp", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1",
        "--repetition-penalty", "1.2", "--seed", "7", "--system", "s", "--no-thinking",
        "--block-size", "4", "--dtype", "float32", "--stop", "a", "--stop", "b",
        "--revision", "r", "--exact",
    )  # fmt: skip
    fake("chat", "m", "p")
    fake("chat", "m", "p", "--no-draft", "--reasoning", "low")
    full, plain, undrafted = fake.engines
    assert full.loaded == {
        "name": "m", "draft": "d", "draft_bits": 8, "dtype": "float32", "revision": "r",
        "block_size": 4, "exact": True, "trace": None,
    }  # fmt: skip
    assert full.asked == [
        (
            "p",
            {
                "max_tokens": 5,
                "sampling": engine.SamplingParams(0.5, 0.9, 3, 0.1, 1.2, 7),
                "stop": ("a", "b"),
                "system": "s",
                "thinking": False,
            },
        )
    ]
    assert plain.loaded == {
        "name": "m", "draft": "auto", "draft_bits": None, "dtype": "auto", "revision": None,
        "block_size": "auto", "exact": False, "trace": None,
    }  # fmt: skip
    assert plain.asked[0][1]["sampling"] == engine.SamplingParams()
    assert plain.asked[0][1]["thinking"] is None
    assert undrafted.loaded["draft"] is None
    assert undrafted.asked[0][1]["thinking"] == "low"


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_the_prompt_can_come_through_a_pipe(fake: Run, arguments: tuple[str, ...]) -> None:
    code, out, _ = fake("chat", "m", *arguments, stdin="grüße\ndir\n".encode())
    assert (code, out) == (0, "grüße dir\n")
    # The newline that ends the last line is no part of the question: `echo` and an argument agree.
    assert fake.engines[0].asked[0][0] == "grüße\ndir"


def test_json_is_the_only_line(fake: Run) -> None:
    code, out, err = fake("chat", "m", "one «two»", "--json", "--thinking")
    assert (code, err) == (0, f"warning: {WARNING}\n")
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["text"] == "one «two»"
    assert document["reasoning"] == "let me think"
    assert (document["accepted"], document["accept_histogram"]) == (5, [1, 0, 1, 1])
    assert document["tokens_per_cycle"] == pytest.approx(8 / 3)
    assert {
        "text", "token_ids", "prompt_tokens", "prefill_seconds", "prefill_tps",
        "generation_tokens", "generation_seconds", "generation_tps", "total_seconds", "engine",
        "engine_reason", "cycles", "drafted", "accepted", "tokens_per_cycle", "accept_histogram",
        "finish_reason", "peak_memory_gb", "model", "drafter", "versions",
    } <= set(document)  # fmt: skip


def test_json_with_statistics_keeps_them_apart(fake: Run) -> None:
    _, out, err = fake("chat", "m", "p", "--json", "--stats")
    json.loads(out)
    assert err.endswith(STATS)


def test_reasoning_stays_out_of_a_pipe(fake: Run) -> None:
    _, out, err = fake("chat", "m", "yes", "--thinking", "--no-stats")
    assert out == "yes\n"
    assert err == f"let me think\n\nwarning: {WARNING}\n"


def test_reasoning_is_dimmed_on_a_terminal() -> None:
    screen = Terminal()
    writer = console.AnswerWriter(screen)
    for chunk in (Chunk("", "hm", []), Chunk("yes", "", [])):
        writer.write(chunk)
    writer.end()
    assert screen.getvalue() == "\x1b[2mhm\x1b[0m\n\nyes\n"


def test_a_model_cannot_steer_the_terminal_but_can_write_to_a_file() -> None:
    for out, shown in ((Terminal(), "a\n\tb\ufffd[31m\ufffd"), (io.StringIO(), "a\n\tb\x1b[31m\r")):
        console.AnswerWriter(out).write(Chunk("a\n\tb\x1b[31m\r", "", []))
        assert out.getvalue() == shown


def test_text_is_written_as_it_comes() -> None:
    out = io.StringIO()
    writer = console.AnswerWriter(out)
    seen = []
    for text in ("one", " two", "\n"):
        writer.write(Chunk(text, "", []))
        seen.append(out.getvalue())
    writer.end()
    assert seen == ["one", "one two", "one two\n"]
    assert out.getvalue() == "one two\n"  # the line was ended already


def test_statistics_of_plain_decoding_leave_out_what_did_not_happen() -> None:
    from dflash_mlx.decode.stats import GenerationStats

    stats = GenerationStats(prompt_tokens=9, cached_tokens=4, model="m", generation_tokens=1)
    rows = dict(console.stats_rows(stats.to_json()))
    assert "tokens per cycle" not in rows
    assert "drafter" not in rows
    assert rows["prompt"] == "9 tokens, 4 of them kept"
    assert rows["generation"] == "0.00 s, no rate"  # one token belongs to prefill


def test_models_lists_every_pair(run: Run) -> None:
    from dflash_mlx.registry import load_registry

    code, out, err = run("models")
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split("  ")[0] == "NAME"
    assert [line.split()[0] for line in lines] == [pair.name for pair in load_registry().pairs]
    assert not any(line.endswith(" ") for line in lines)


def test_models_shows_more_on_a_wide_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    basic = "NAME STATUS ON DISK GB 16/8/4 BIT FAMILY TARGET DRAFTER"
    more = ("BLOCK", "CONTEXT", "READY BITS", "DRAFTER GB", "GATED", "LICENCE", "READY 4-BIT")
    for width in (80, 110, 140, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        head, row = run("models", "Qwen/Qwen3-8B")[1].splitlines()
        titles = " ".join(head.split())
        assert titles.startswith(basic)
        assert titles == basic or max(len(head), len(row)) <= width
        assert (titles == basic) == (width == 80)
    assert all(title in head for title in more)
    for fact in ("  16  ", "40960", "8 / 4", "mlx-community/Qwen3-8B-4bit", "Apache-2.0"):
        assert fact in row
    (document,) = json.loads(run("models", "Qwen/Qwen3-8B", "--json")[1])
    assert f"{document['drafter_bytes'] / 1e9:.3g}" in row


def test_models_counts_what_is_on_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the embedded drafter, and of a target that the hub module says is here."""
    folder = paths.assets_dir() / "smollm2-135m-dflash2-b8"
    drafter = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    (row,) = json.loads(run("models", "SMOLLM2", "--json")[1])
    assert row["target_path"] is None
    assert row["bytes_on_disk"] == drafter
    assert "(drafter only)" in run("models", "smollm2")[1]
    folder = Path(row["drafter_path"])
    monkeypatch.setattr("dflash_mlx.hub.local_path", lambda spec, revision=None: folder)
    (row,) = json.loads(run("models", "SMOLLM2", "--json")[1])
    assert row["bytes_on_disk"] == 2 * drafter
    assert "only" not in run("models", "smollm2")[1]


def test_doctor_says_that_this_machine_can_run(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert (code, report["can_run"], report["problems"]) == (0, True, [])
    assert report["versions"] == machine.versions()
    assert report["back_end"]["name"] == machine.back_end()[0]
    assert report["blas"]["name"] == machine.blas_in_use().name
    assert report["kernels"] == kernels.status() != ""
    assert report["cache"]["path"] == str(tmp_path / "home")
    assert set(report["files"].values()) == {
        str(paths.registry_file()), str(paths.metal_dir()), str(paths.assets_dir()),
    }  # fmt: skip
    code, out, _ = run("doctor")
    assert code == 0
    assert out.endswith("This machine can run.\n")
    if not machine.blas_in_use().fast:
        assert "remark" in out
        assert "Matrix products are slow" in out


def test_doctor_names_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "metal_dir", lambda: Path("/nowhere"))
    monkeypatch.setattr(machine, "_requirements", lambda: ["mlx>=99"])
    monkeypatch.setenv("DFLASH_HOME", "/proc/home")
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert (code, report["can_run"]) == (1, False)
    assert report["problems"] == [
        f"mlx {machine.versions()['mlx']} is installed, but >=99 is needed.",
        "The cache folder /proc/home cannot be written. Set DFLASH_HOME to another.",
        "The kernel sources are missing at /nowhere. Install the package again.",
    ]
    if report["back_end"]["name"] == "cpu":
        assert any("Install g++." in remark for remark in report["remarks"])
    code, out, _ = run("doctor")
    assert code == 1
    assert out.endswith("This machine cannot run yet.\n")


def test_doctor_refuses_other_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert len(doctor_command._python_problems()) == 1


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"dflash-mlx {__version__}\n", "")
    for arguments in ((), ("--help",)):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert all(f"\n  {name}" in out for name in ("chat", "models", "doctor"))
    assert "--repetition-penalty" in run("chat", "--help")[1]
