"""Planned bytes of checkpoints on disk against bytes really held, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import packagings
import pytest
from checkpoints import write_folder
from conversions import write_source
from mlx.utils import tree_flatten
from tiny import VARIANTS, target_of, tiny_config
from tiny_drafter import VOCAB, BorrowedTarget, drafter_config, write_drafter

from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import CheckpointError, SourceError
from dflash_mlx.plan import find_model, mac_memory, part_bytes
from dflash_mlx.plan.shape import read_shape
from dflash_mlx.weights import UNFINISHED, read_weights

MAC = mac_memory(64)
WIDE_DRAFTER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}

# Enough layers that mixed recipes treat some unlike others; rows that groups of 32 divide.
SIZES = {
    "llama": {"num_hidden_layers": 9},
    "qwen3_5_moe": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64},
}


def held(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def converted(folder: Path, bits: int | None = None) -> Path:
    """A target's folder that records a drafter, which is still to be put there."""
    record = {"drafter": {"folder": "drafter", "bits": bits}}
    return write_folder(folder, tiny_config("llama", vocab_size=VOCAB, conversion=record))


def write_official(folder: Path) -> None:
    write_drafter(folder, drafter_config("mixed"))


def write_speculators(folder: Path) -> None:
    weights = packagings.official_weights() | packagings.own_tables()
    packagings.save(folder, packagings.speculators_config(), weights)


def write_meta(folder: Path) -> None:
    packagings.save(folder, packagings.meta_config(), packagings.meta_weights())


@pytest.mark.parametrize("family", VARIANTS)
def test_every_quantizable_module_is_known_by_its_path(family: str) -> None:
    config = tiny_config(family)
    wanted = {
        path: module.weight.size
        for path, module in target_of(config).named_modules()
        if hasattr(module, "to_quantized")
    }
    assert read_shape(config).modules == wanted


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", Recipe(mixed="mixed_2_6", group_size=32)),
        ("llama", Recipe(mixed="mixed_3_4", group_size=32)),
        ("llama", Recipe(mode="nvfp4")),
        ("qwen3_5_moe", Recipe(bits=3, group_size=32)),
        ("gpt_oss", Recipe(bits=4, group_size=32)),
        ("gpt_oss", Recipe(mode="mxfp4")),
        ("gpt_oss", None),
    ],
)
def test_a_converted_target_takes_the_bytes_planned(
    tmp_path: Path, family: str, recipe: Recipe | None
) -> None:
    changes = SIZES.get(family, {})
    folder = write_source(tmp_path / "plain", family, changes=changes, dtype=mx.bfloat16)
    if recipe is not None:
        convert(Order(str(folder), tmp_path / "q", recipe))
        folder = tmp_path / "q"
    stored = sum(array.nbytes for array in read_weights(folder).values())
    model = find_model(str(folder))
    planned = part_bytes(model, MAC, 100, None)["target"]
    assert planned == pytest.approx(stored, rel=0.05)
    assert not [remark for remark in model.remarks if "quantized" in remark]


def test_published_gpt_oss_is_counted_in_mxfp4(tmp_path: Path) -> None:
    config = tiny_config("gpt_oss")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    experts = sum(count for path, count in read_shape(config).modules.items() if "experts" in path)
    wanted = 2 * (read_shape(config).parameters - experts) + experts * 17 // 32
    for bits in (None, 16):
        assert part_bytes(find_model(str(file)), MAC, 100, bits)["target"] == wanted
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        assert find_model(name).target.experts_mxfp4


@pytest.mark.parametrize("write", [write_official, write_speculators, write_meta])
def test_a_bundled_drafter_of_every_packaging_is_counted(tmp_path: Path, write: Any) -> None:
    folder = converted(tmp_path / "m")
    write(folder / "drafter")
    drafter = open_drafter(folder / "drafter", BorrowedTarget(), dtype=mx.bfloat16)
    model = find_model(str(folder))
    assert model.draft is not None
    assert (model.taps, model.block) == (len(drafter.taps), drafter.block_size)
    windows = [layer.window for layer in model.draft.layers]
    assert sorted(windows, key=str) == sorted(drafter.config.windows, key=str)
    assert part_bytes(model, MAC, 100, None)["drafter"] == held(drafter.model)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("variant", ["full", "second"])
def test_recorded_bits_of_a_bundled_drafter_count(tmp_path: Path, bits: int, variant: str) -> None:
    folder = converted(tmp_path / "m", bits)
    config = drafter_config(variant, **WIDE_DRAFTER)
    write_drafter(folder / "drafter", config)
    target = BorrowedTarget(hidden=64)
    drafter = open_drafter(folder / "drafter", target, dtype=mx.bfloat16, bits=bits)
    planned = part_bytes(find_model(str(folder)), MAC, 100, None)["drafter"]
    assert planned == pytest.approx(held(drafter.model), rel=0.001)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config("llama"), "given as drafter is a target model"),
        ({**packagings.speculators_config(), "aux_hidden_state_layer_ids": None}, "has no aux_"),
    ],
)
def test_a_bundled_drafter_that_is_none(tmp_path: Path, config: Any, message: str) -> None:
    folder = converted(tmp_path / "m")
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        find_model(str(folder))


QUANTIZATION = {"group_size": 64, "bits": 4}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization": "x"}, "quantization is 'x', not an object"),
    ("llama", {"quantization": [1]}, r"quantization is \[1\], not an object"),
    ("llama", {"quantization": {"group_size": 64}}, "not an object with group_size and bits"),
    ("llama", {"quantization": {**QUANTIZATION, "mode": "zz"}}, "mode 'zz'; MLX knows affine"),
    ("llama", {"quantization": {**QUANTIZATION, "mode": []}}, r"mode \[\]"),
    ("llama", {"quantization": {**QUANTIZATION, "group_size": 0}}, "has group_size 0, which"),
    ("llama", {"quantization": {**QUANTIZATION, "bits": -4}}, "has bits -4, which"),
    ("llama", {"quantization": {**QUANTIZATION, "bits": "4"}}, "has bits '4', which"),
    ("llama", {"quantization": {**QUANTIZATION, "lm_head": {"bits": "q"}}}, "of lm_head has bits"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by gptq"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized by mxfp4"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantized by an unnamed method"),
    ("llama", {"architectures": ["DFlashDraftModel"]}, "is a DFlash drafter, not a model"),
    ("llama", packagings.meta_config(), "is a DFlash drafter, not a model"),
    ("llama", packagings.speculators_config(), "is a DFlash drafter, not a model"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, not .* 10000"),
    ("llama", {"hidden_size": 10**40}, "hidden_size is 1000.*, not a whole number from"),
    ("llama", {"attention_bias": "no"}, "attention_bias is 'no', not true, false or null"),
    *(
        ("llama", {"max_position_embeddings": value}, "max_position_embeddings is .*, not a whole")
        for value in ("x", 1.5, -1, [], 10**12)
    ),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "not a list of 4 layers but of 1"),
    ("gpt_oss", {"layer_types": "x"}, "layer_types is 'x', not a list of full_attention"),
    ("gpt_oss", {"layer_types": ["other"] * 4}, "not a list of full_attention"),
    ("gpt_oss", {"num_local_experts": "4"}, "num_local_experts is '4', not a whole number"),
    ("qwen3_moe", {"num_experts": "4"}, "num_experts is '4', not a whole number"),
    ("qwen3_moe", {"decoder_sparse_step": "4"}, "decoder_sparse_step is '4', not a whole"),
    ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers is '1', not a list of whole"),
    ("gemma4", {"num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2', not a whole number"),
]


@pytest.mark.parametrize(("family", "changes", "message"), WRONG)
def test_wrong_values_are_named(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(family), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        find_model(str(tmp_path))
    assert len(str(caught.value)) < 400


def test_an_unfinished_conversion_and_a_name_too_long(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert find_model(str(tmp_path)).target.layers
    (tmp_path / UNFINISHED).touch()
    for place in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CheckpointError, match="is an unfinished conversion"):
            find_model(str(place))
    with pytest.raises(SourceError, match="Nothing is known"):
        find_model("x" * 300)
    with pytest.raises(SourceError, match="Nothing is known"):
        find_model("a/" + "x" * 300)
