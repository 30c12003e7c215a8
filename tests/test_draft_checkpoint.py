"""Opening a drafter's folder: strict tensors, and a drafter that does not fit its target."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_drafter as tiny
from tiny_drafter import BorrowedTarget, write_drafter

from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.draft.dflash import DFlashDrafter
from dflash_mlx.errors import CheckpointError, DFlashError, MismatchError
from dflash_mlx.paths import assets_dir

MISMATCHES: dict[str, tuple[dict[str, int], str]] = {
    "hidden size": ({"hidden": 40}, r"width 32 \(fc takes 3 taps, 96 in all\).*gives 40 \(120"),
    "taps": ({"layers": 6}, r"taps layer 6.*has 6 layers, 0 to 5"),
    "depth": ({"layers": 9}, r"made for a target of 7 layers.*has 9"),
    "vocabulary": ({"vocab": 50}, r"vocabulary of 48.*one of 50"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_drafter_of_another_target_is_refused(tmp_path: Path, kind: str) -> None:
    sizes, message = MISMATCHES[kind]
    folder = write_drafter(tmp_path, tiny.drafter_config())
    with pytest.raises(MismatchError, match=message):
        open_drafter(folder, BorrowedTarget(**sizes), dtype=mx.float32)


def test_mask_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config = tiny.drafter_config()
    config["dflash_config"] = config["dflash_config"] | {"mask_token_id": 48}
    with pytest.raises(MismatchError, match=r"mask token id 48.*up to 47"):
        open_drafter(write_drafter(tmp_path, config), BorrowedTarget(), dtype=mx.float32)


def broken(change: Callable[[dict[str, mx.array]], None], folder: Path) -> DFlashError:
    write_drafter(folder, tiny.drafter_config())
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file))
    change(weights)
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    with pytest.raises(CheckpointError) as caught:
        open_drafter(folder, BorrowedTarget(), dtype=mx.float32)
    return caught.value


BROKEN: dict[str, tuple[Callable[[dict[str, mx.array]], Any], str]] = {
    "missing": (lambda w: w.pop("hidden_norm.weight"), "lacks hidden_norm.weight"),
    "unknown": (lambda w: w.update({"layers.0.g_proj.weight": mx.zeros(3)}), "g_proj"),
    "layer too many": (
        lambda w: w.update({"layers.3.input_layernorm.weight": mx.zeros(32)}),
        "layers.3.input_layernorm.weight",
    ),
    "bias not announced": (
        lambda w: w.update({"layers.0.self_attn.o_proj.bias": mx.zeros(32)}),
        "o_proj.bias",
    ),
    "fc of two taps": (
        lambda w: w.update({"fc.weight": mx.zeros((32, 64))}),
        r"\(32, 64\).*3 taps of width 32 need \(32, 96\)",
    ),
    "shape": (lambda w: w.update({"norm.weight": mx.zeros(31)}), r"\(31,\).*\(32,\)"),
    "whole numbers": (
        lambda w: w.update({"norm.weight": mx.zeros(32, dtype=mx.int32)}),
        "norm.weight.*int32",
    ),
    "Meta's packaging": (
        lambda w: w.update({"encoder.fc.weight": w.pop("fc.weight")}),
        "encoder.fc",
    ),
    "draft vocabulary": (lambda w: w.update({"d2t": mx.zeros(3)}), "d2t"),
    "DFlash 2": (
        lambda w: w.update({"candidate_selector.hidden_projection.weight": mx.zeros(3)}),
        "DFlash 2",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_tensors_are_named(tmp_path: Path, kind: str) -> None:
    change, message = BROKEN[kind]
    error = broken(change, tmp_path)
    assert error.args[0].count(". ") == 0, "one sentence"
    with pytest.raises(CheckpointError, match=message):
        raise error


def test_a_target_given_as_drafter_is_told_apart(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is a target model \(Qwen3ForCausalLM\)"):
        open_drafter(tmp_path, BorrowedTarget(), dtype=mx.float32)


def test_embedded_drafter_opens_and_drafts() -> None:
    target = BorrowedTarget(hidden=576, layers=30, vocab=49152)
    folder = assets_dir() / "smollm2-135m-dflash2-b8"
    drafter = open_drafter(folder, target, dtype=mx.float32)
    assert (drafter.block_size, drafter.taps) == (8, (1, 8, 14, 20, 27))
    cache = drafter.make_cache()
    drafter.observe(mx.random.normal((1, 3, 2880), key=mx.random.key(0)), cache)
    first = drafter.draft_logits(mx.array([11]), 5, cache)
    drafter.observe(mx.random.normal((1, 1, 2880), key=mx.random.key(1)), cache)
    second = drafter.draft_logits(mx.array([11]), 5, cache)
    assert mx.isfinite(first).all().item()
    assert mx.abs(first - second).max().item() > 0.1


def first_drafts(drafter: DFlashDrafter) -> mx.array:
    cache = drafter.make_cache()
    drafter.observe(mx.array(tiny.context_features(tiny.drafter_config(), 20))[None], cache)
    logits = drafter.draft_logits(mx.array([3]), 4, cache)
    mx.eval(logits, drafter.propose(mx.array([3]), 4, None, cache).tokens)
    return logits


@pytest.mark.parametrize("variant", ["sliding", "second"])
@pytest.mark.parametrize("bits", [None, 8])
def test_opened_in_one_thread_used_in_another(
    tmp_path: Path, variant: str, bits: int | None
) -> None:
    """MLX's streams belong to threads: an array left lazy by opening would fail elsewhere."""
    config = tiny.drafter_config(variant, intermediate_size=64)
    folder, target = write_drafter(tmp_path, config), BorrowedTarget()
    opened: list[DFlashDrafter] = []
    drafted: list[mx.array] = []

    def open_it() -> None:
        opened.append(open_drafter(folder, target, dtype=mx.float32, bits=bits, group_size=32))

    for work in (open_it, lambda: drafted.append(first_drafts(opened[0]))):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert mx.array_equal(drafted[0], first_drafts(opened[0])).item()


@pytest.mark.parametrize("variant", ["full", "second"])
def test_bfloat16_drafter_stays_near(tmp_path: Path, variant: str) -> None:
    folder, target = write_drafter(tmp_path, tiny.drafter_config(variant)), BorrowedTarget()
    exact, rounded = (
        first_drafts(open_drafter(folder, target, dtype=kind)) for kind in (mx.float32, mx.bfloat16)
    )
    assert rounded.dtype == mx.float32  # choosing among logits never happens in bfloat16
    assert 1e-4 < mx.abs(exact - rounded).mean().item() < 0.1
