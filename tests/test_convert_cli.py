"""`dflash-mlx convert`: options, JSON, exit codes; and the real SmolLM2 taken through it."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conversions import start, write_source, write_tiny_drafter

from dflash_mlx import cli, convert
from dflash_mlx.cli import convert as command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, drafter = write_source(tmp_path / "m"), write_tiny_drafter(tmp_path / "d")
    options = ["--bits", "6", "--group-size", "32", "--drafter", str(drafter), "--json"]
    code, out, err = run(capsys, str(source), str(tmp_path / "q"), *options)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["recipe"] == {
        "bits": 6,
        "group_size": 32,
        "mode": "affine",
        "mixed": None,
        "dtype": None,
    }
    assert report["destination"] == str(tmp_path / "q")
    assert report["remarks"] == []
    assert report["self_check"]["worst"]["error"] < 0.2
    assert (tmp_path / "q/drafter/config.json").exists()


# Rotary settings that mlx-lm reads otherwise.
UNROUNDED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "m", changes={"rope_scaling": UNROUNDED})
    options = ["--recipe", "mixed_3_6", "--dtype", "float16"]
    code, out, _ = run(capsys, str(source), str(tmp_path / "q"), *options, "--dry-run")
    assert code == 0
    assert out.splitlines()[0] == f"would write  {tmp_path / 'q'}"
    code, out, _ = run(capsys, str(source), str(tmp_path / "q"), *options)
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["recipe"].strip() == "mixed_3_6, groups of 64"
    assert "largest relative error 0." in lines["self-check"]
    assert lines["verdict"].strip().startswith("as expected: most tokens are off by 0.")
    record = json.loads((tmp_path / "q/config.json").read_text())["conversion"]
    assert [lines["remark"].strip()] == record["remarks"]
    assert "does not read rope_scaling.truncate" in lines["remark"]


def test_the_destination_is_named_by_model_and_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "m")
    for options in ([], ["--mode", "mxfp4"], ["--recipe", "mixed_2_6"]):
        assert run(capsys, "./m", *options)[0] == 0
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-4bit", "m-mixed_2_6", "m-mxfp4"]
    monkeypatch.chdir(tmp_path / "m")
    before = sorted((tmp_path / "m").iterdir())
    assert run(capsys, ".", "--bits", "8")[0] == 0
    assert (tmp_path / "m-8bit/config.json").is_file()
    assert sorted((tmp_path / "m").iterdir()) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--bits", "7"], "Bits 7 does not exist in mode affine; use 2, 3, 4, 5, 6, 8."),
        (
            ["--mode", "mxfp4", "--bits", "8"],
            "Bits 8 does not exist in mode mxfp4; use 4.",
        ),
        (
            ["--group-size", "48"],
            "Group size 48 does not exist in mode affine; use 32, 64, 128.",
        ),
        (
            ["--mode", "int4"],
            "The mode 'int4' is not known; use one of affine, mxfp4, mxfp8, nvfp4.",
        ),
        (
            ["--recipe", "mixed_1_2"],
            "The recipe 'mixed_1_2' is not known; use one of mixed_2_6, mixed_3_4, mixed_3_6, "
            "mixed_4_6.",
        ),
        (
            ["--recipe", "mixed_2_6", "--bits", "4"],
            "The recipe mixed_2_6 chooses mode and bits; leave --mode and --bits out.",
        ),
        (["--draft-bits", "3"], "--draft-bits is 3; a drafter can be held in 4 or 8."),
        (
            ["--dtype", "int8"],
            "The dtype 'int8' is not known; use one of bfloat16, float16, float32.",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    source = write_source(tmp_path / "m")
    code, out, err = run(capsys, str(source), str(tmp_path / "q"), *options)
    assert (code, out, err) == (2, "", f"dflash-mlx: {sentence}\n")
    assert not (tmp_path / "q").exists()


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", interrupted)
    code, _, err = run(capsys, str(tmp_path / "m"), str(tmp_path / "q"))
    assert code == 130
    assert "The same command goes on from here" in err


def test_an_unexpected_error_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_mlx.convert.order.noise_of", lambda _: 1e-6)
    source = write_source(tmp_path / "m")
    code, out, err = run(capsys, str(source), str(tmp_path / "q"), "--json")
    assert code == 0
    assert not json.loads(out)["self_check"]["as_expected"]
    assert "The self-check found more than expected: most tokens are off by" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_bytes_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    clock = iter(range(1000))  # each look at it a second later
    monkeypatch.setattr("rich.console.monotonic", lambda: float(next(clock)))
    with command._bar() as progress:
        for done in range(0, 60, 10):
            progress(done * 1_000_000, 600_000_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"writing .* 50\.0/600\.0 MB .*/s 0:0[0-9]:[0-9]{2}\s*$", shown, re.M), shown
    assert "checking" not in shown
    with command._bar() as progress:
        progress(600_000_000, 600_000_000)
    assert "checking" in terminal.getvalue()


SMOLLM2 = """
import json, sys
from pathlib import Path
import dflash_mlx.fast_blas
from dflash_mlx import calibration, engine
from dflash_mlx.convert import Order, Recipe, convert

calibration.FIRST_SECONDS = 0.0
for bits in (4, 8):
    place = Path(sys.argv[1]) / str(bits)
    report = convert(Order("SmolLM2-135M", place, Recipe(bits=bits, group_size=32)))
    answer = engine.load(str(place)).generate("What is the capital of France?", max_tokens=8)
    stats = answer.stats
    print(json.dumps([report.to_json(), answer.text, stats.engine, stats.engine_reason]))
"""


@pytest.mark.smollm2
def test_smollm2_keeps_its_wits(smollm2_gguf: Path, tmp_path: Path) -> None:
    process = start(SMOLLM2, str(tmp_path))
    out, err = process.communicate()
    assert process.returncode == 0, err
    for bits, line in zip((4, 8), out.splitlines(), strict=True):
        report, text, kind, reason = json.loads(line)
        assert "The capital of France is Paris" in text
        assert (kind, reason) == ("dflash", f"the drafter beside {tmp_path / str(bits)}")
        # Q4_1 matrices stay in 4 bits; the embedding, Q6_K or Q8_0 in the file, stays in 8.
        assert report["modules_kept"] == {4: 210, 8: 1}[bits]
        assert report["self_check"]["worst"]["error"] < {4: 0.3, 8: 0.1}[bits]
        from mlx_lm.utils import load

        model, tokenizer = load(str(tmp_path / str(bits)), lazy=True)[:2]
        assert len(model.layers) == 30
        assert tokenizer.eos_token_ids >= {2}
