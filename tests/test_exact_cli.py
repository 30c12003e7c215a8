"""`--exact` of the command line: whole runs on tiny checkpoints, and models it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bench_reports import pair as pair_of
from checkpoints import WIDE, write_folder, write_quantized
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu, launches
from tiny import tiny_config
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx import cli, engine, loader
from dflash_mlx.bench import measure
from dflash_mlx.bench.play import Player

SIZES = {**WIDE, "vocab_size": VOCAB}
TOKENS = 10


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a target and of a drafter for it."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_tokenizer(write_folder(folder / "target", tiny_config("qwen3", **SIZES)))
    config = drafter_config("full") | {"hidden_size": 64, "vocab_size": VOCAB}
    config |= {"num_target_layers": 2, "intermediate_size": 64}
    config["dflash_config"] = {"target_layer_ids": [0, 1], "mask_token_id": 5, "block_size": 5}
    return str(target), str(write_drafter(folder / "drafter", config))


def dflash_mlx(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    return int(ended.value.code or 0)


@pytest.mark.metal_cpu
def test_chat_gives_plain_decodings_text_through_the_kernels(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    options = ["--json", "--max-tokens", str(TOKENS), "--dtype", "float32"]
    found: list[dict[str, Any]] = []
    with kernels_on_cpu(Mode.FAST) as made:
        for how in (["--draft", drafter, "--block-size", "5"], ["--no-draft"]):
            before = launches(made).get("block_attention", 0)
            assert dflash_mlx("chat", target, "Count.", "--exact", *how, *options) == 0
            found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
            # Also single rows, which without exact mode are attended to by MLX.
            assert launches(made)["block_attention"] - before >= 2 * found[-1]["cycles"]
    dflash, plain = found
    assert [one["engine"] for one in found] == ["dflash", "plain"]
    assert [one["exact"] for one in found] == [True, True]
    assert dflash["cycles"] > 3
    assert len(plain["token_ids"]) == TOKENS
    assert dflash["token_ids"] == plain["token_ids"]
    assert dflash["text"] == plain["text"]


@pytest.mark.metal_cpu
def test_bench_runs_both_sides_in_exact_mode_and_reports_it(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    (prompts := tmp_path / "own.jsonl").write_text('{"prompt": "Count."}\n')
    report, page = tmp_path / "r.md", tmp_path / "r.html"
    arguments = [
        "--draft", drafter, "--prompts", str(prompts), "--max-tokens", "6", "--block-size", "4",
        "--exact", "--json", "--markdown", str(report), "--html", str(page),
    ]  # fmt: skip
    with kernels_on_cpu(Mode.FAST) as made:
        assert dflash_mlx("bench", target, *arguments) == 0
        assert launches(made)["rows_matmul"] > 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["settings"]["exact"] is True
    assert found["settings"]["near_tie_spacings"] == 0
    agreement = found["summary"]["agreement"]
    assert (agreement["identical"], agreement["total"]) == (1, 1)
    assert "| exact | True |" in report.read_text("utf-8")
    assert "<td>exact</td><td>True</td>" in page.read_text("utf-8").replace("\n", "")


def test_in_exact_mode_no_difference_is_a_near_tie(
    pair: tuple[str, str], row_invariant_blas: None
) -> None:
    target, drafter = pair
    for exact, near in ((False, True), (True, False)):
        loaded = engine.load(target, draft=drafter, dtype="float32", block_size=4, exact=exact)
        # As close as two logits can be.
        logits = type(loaded.target).logits
        shape: Any = loaded.target
        shape.logits = lambda rows, shape=shape, logits=logits: 0 * logits(shape, rows) + 1
        parted = Player(loaded).difference([1, 2, 3], [4, 5], [4, 6])
        assert parted is not None
        assert (parted.token, parted.gap, parted.near_tie) == (1, 0, near)
        made = pair_of(difference=parted)
        made.dflash.stats["exact"] = exact
        refused = measure.refusal([made])
        assert (refused is None) is near
        if refused is not None:
            assert "1 of 1 runs differ although exact mode promises the same" in refused


@pytest.mark.parametrize("command", [["chat"], ["bench"]])
def test_a_model_with_experts_is_refused_by_name(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row_invariant_blas: None,
) -> None:
    config = tiny_config("qwen3_moe", **SIZES)
    folder = write_tokenizer(write_folder(tmp_path / "experts", config))
    question = ["Count."] if command == ["chat"] else ["--samples", "1"]
    assert dflash_mlx(*command, str(folder), *question, "--exact") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "(ExpertLinear) has no exact operation. Leave --exact out, or use a dense model" in err


def test_mxfp4_weights_are_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row_invariant_blas: None,
) -> None:
    folder = write_tokenizer(write_quantized(tmp_path / "mxfp4", "qwen3", mode="mxfp4", **SIZES))
    capsys.readouterr()  # what writing it said
    as_on_metal = loader.Precision(mx.float32, keep_quantized=True)
    monkeypatch.setattr(loader, "resolve_dtype", lambda name: as_on_metal)
    assert dflash_mlx("chat", str(folder), "Count.", "--exact") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "lm_head (QuantizedLinear) has no exact operation. Leave --exact out" in err
