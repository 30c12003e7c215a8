"""`doctor MODEL`: every kernel case that an engine meets was tried before, on made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_folder, write_quantized
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu
from tiny import tiny_config, tiny_prompt
from tiny_drafter import drafter_config, write_drafter
from tiny_engine import VOCAB, write_tokenizer

from dflash_mlx import cli, engine, loader, trials
from dflash_mlx.cli import doctor
from dflash_mlx.errors import MismatchError, SourceError
from dflash_mlx.kernels import attention, backend, record

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB}


def write_pair(folder: Path, family: str, variant: str, block: int, bits: int = 0) -> Any:
    """Folders of a target and of a drafter for it."""
    if bits:
        target = write_quantized(folder / "target", family, bits=bits, **SIZES)
    else:
        target = write_folder(folder / "target", tiny_config(family, **SIZES))
    config = drafter_config(variant, hidden_size=64, intermediate_size=128, vocab_size=VOCAB)
    config["num_target_layers"] = 2
    config["dflash_config"] |= {"target_layer_ids": [0, 1], "block_size": block}
    return str(write_tokenizer(target)), str(write_drafter(folder / "drafter", config))


@pytest.mark.metal_cpu
@pytest.mark.parametrize(
    ("family", "variant", "block", "bits", "dtype"),
    [
        ("qwen3_5", "sliding_bidirectional", 12, 0, "float32"),
        ("qwen3", "second_mixed", 5, 4, "bfloat16"),
    ],
)
def test_an_engine_meets_no_case_that_was_not_tried(
    family: str,
    variant: str,
    block: int,
    bits: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SPLIT_KEYS", 32)  # so that short texts take several splits
    as_on_metal = loader.Precision(loader.DTYPES[dtype], keep_quantized=True)
    monkeypatch.setattr(loader, "resolve_dtype", lambda name: as_on_metal)
    target, drafter = write_pair(tmp_path, family, variant, block, bits)
    given = trials.subject(target, drafter, bits or None, dtype)
    assert given.remarks == ()
    with kernels_on_cpu(Mode.FAST, trusted=False):
        trials.try_model(given)
        assert backend.rejections() == []
        tried = set(backend._trusted)
        for exact in (False, True):
            loaded = engine.load(
                target,
                draft=drafter,
                draft_bits=bits or None,
                dtype=dtype,
                block_size=None,
                exact=exact,
            )
            stats = loaded.generate(tiny_prompt(VOCAB, 21), max_tokens=20).stats
            assert stats.cycles > 3
        assert {operation for operation, _ in tried} >= {
            *("rows_matmul", "fuse_taps", "head_projection", "block_attention"),
            *(("gated_delta_advance", "gated_delta_replay") if family == "qwen3_5" else ()),
            *(("block_convolution",) if "second" in variant else ()),
        }
        assert set(backend._trusted) - tried == set()


@pytest.mark.metal_cpu
def test_doctor_names_a_kernel_that_fails_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = write_pair(tmp_path, "qwen3", "full", 5)
    monkeypatch.setattr(record, "home_dir", lambda: tmp_path)
    monkeypatch.setattr("dflash_mlx.kernels.attention.tile_keys", lambda dim, dtype: 48)
    monkeypatch.setattr("dflash_mlx.kernels.attention.SPLIT_KEYS", 64)
    with kernels_on_cpu(Mode.FAST, trusted=False):
        trial = doctor._trial_of(target, drafter, None, "float32")
        status, kept, remarks = doctor._kernels(trial)
    assert "block_attention not used, it differs" in status
    assert [one["operation"] for one in kept] == ["block_attention"]
    assert len(remarks) == 1
    assert remarks[0].startswith("The Metal kernel block_attention is not used: it differs")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return int(ended.value.code or 0)


def test_without_kernels_the_model_is_found_and_nothing_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = write_pair(tmp_path, "qwen3_moe", "full", 5)
    assert run(target, "--json") == 0
    remarks = json.loads(capsys.readouterr().out)["remarks"]
    assert "The kernels were not tried on the model: none is active here." in remarks
    assert "The kernels of a drafter were not tried: no drafter is known for it." in remarks
    assert run(target, "--draft", drafter) == 0
    assert "no drafter is known" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("Qwen3-8B", "Qwen3-8B is not on this disk, so its shapes are not known. `dfl"),
        ("TARGET --draft org/none", "The drafter org/none is not on this disk. Give a folder."),
        ("TARGET --draft-bits 5", "--draft-bits is 5"),
        ("TARGET --dtype half", "--dtype is 'half'"),
        ("--dtype float16", "--draft, --draft-bits and --dtype say how MODEL is held. Name it."),
        ("--draft org/none", "--draft, --draft-bits and --dtype say how MODEL is held. Name it."),
        ("/nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dflash_mlx.hub.fetch", lambda *a, **k: pytest.fail("it was fetched"))
    target, _ = write_pair(tmp_path, "qwen3", "full", 5)
    assert run(*arguments.replace("TARGET", target).split()) == 2
    assert message in capsys.readouterr().err


def test_a_drafter_of_another_model_does_not_fit(tmp_path: Path) -> None:
    _, drafter = write_pair(tmp_path, "qwen3", "full", 5)
    (other := tmp_path / "other").mkdir()
    wider = write_folder(other / "target", tiny_config("qwen3", **{**SIZES, "hidden_size": 80}))
    with pytest.raises(MismatchError, match="reads hidden states of width 64"):
        trials.subject(str(wider), drafter)
    with pytest.raises(SourceError):
        trials.subject("no such name", drafter)
