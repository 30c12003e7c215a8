"""The README tells the truth: generated parts, tree, and examples that run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from test_architecture import LEVELS

from dflash_mlx import paths

ROOT = paths.registry_file().parent
README = (ROOT / "README.md").read_text("utf-8")


def test_generated_parts_are_up_to_date():
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts/update_readme"), "--check"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_out_of_date_parts_are_found(tmp_path):
    """The check can fail: in a copy with another table it does."""
    for name in ("README.md", "models.toml"):
        text = (ROOT / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace("| SmolLM2-135M |", "| SmolLM3 |"), "utf-8")
    (tmp_path / "scripts").mkdir()
    script = (ROOT / "scripts/update_readme").read_text("utf-8")
    (tmp_path / "scripts/update_readme").write_text(script, "utf-8")
    run = subprocess.run(
        [sys.executable, str(tmp_path / "scripts/update_readme"), "--check"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 1
    assert "out of date" in run.stderr


def test_tree_names_what_exists():
    tree = README.split("## The tree")[1].split("```")[1]
    for name in re.findall(r"^  (\S+)", tree, re.MULTILINE):
        assert (ROOT / "dflash_mlx" / name).exists(), f"{name} is in the tree but not there"
    package = ROOT / "dflash_mlx"
    for path in package.iterdir():
        if path.name != "__pycache__":
            name = path.name + ("/" if path.is_dir() else "")
            assert tree.count(f"\n  {name} ") == 1, f"{name} is not in the tree once"


def test_the_import_order_is_the_one_that_is_enforced():
    said = README.split("Modules import only from earlier levels: ")[1].split(".\n")[0]
    assert " ".join(said.split()) == " · ".join(LEVELS)


def part(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert found, f"README.md has no part named {name}"
    return found[1]


def test_transcript_is_a_whole_answer():
    """The transcript has the command, the answer and every row of the statistics."""
    from dflash_mlx.cli.console import stats_rows
    from dflash_mlx.decode.stats import GenerationStats

    transcript = part("transcript")
    assert 'scripts/dflash chat SmolLM2-135M "Natalia' in transcript
    stats = GenerationStats(drafter="x", cycles=1, cycle_tokens=1, accept_histogram=[1])
    for label, _ in stats_rows(stats.to_json()):
        assert re.search(rf"^{re.escape(label)}  ", transcript, re.MULTILINE), label


def test_measurements_name_machine_command_and_date():
    measured = part("measured")
    assert "scripts/bench_engine" in measured
    assert re.search(r"20\d\d-\d\d-\d\d", measured)
    for word in ("cores", "plain_vs_mlx_lm", "prefill_vs_mlx_lm", "cycle_overhead", "aa"):
        assert word in measured


def test_two_commands_come_first():
    head = README[:700]
    assert 'scripts/dflash chat SmolLM2-135M "Natalia' in head
    assert "scripts/test" in head


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.smollm2
@pytest.mark.parametrize("index", range(len(examples())))
def test_examples_run(index, smollm2_gguf):
    """Every Python example runs as a program of its own, and prints something."""
    short = re.sub(r"max_tokens=\d+", "max_tokens=4", examples()[index])
    run = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.strip()) > 10
