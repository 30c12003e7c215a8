"""Hybrid checkpoints as people publish them: HF and MLX, text alone or with images; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_hybrid
from checkpoints import INDEX, write_folder
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from oracle import plain_logits
from tiny import target_of, tiny_prompt, tiny_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models import build_target
from dflash_mlx.segment import Segment
from dflash_mlx.weights import is_mlx_format, read_weights

IDS = tiny_prompt(96, 20)
# Widths that quantization groups divide.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
VARIANTS = sorted(tiny_hybrid.VARIANTS)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def packed(variant: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and weights as released: qwen3_5 inside a multimodal checkpoint, qwen3_next alone."""
    config = tiny_hybrid.hybrid_config(variant, **overrides)
    weights = tiny_weights(config)
    if variant == "qwen3_next":
        apart = tiny_hybrid.one_tensor_an_expert(weights)
        return config, {**apart, "mtp.fc.weight": np.ones((3, 3), np.float32)}
    return tiny_hybrid.multimodal(config, weights)


def mlx_folder(folder: Path, variant: str, bits: int | None = None, **overrides: Any) -> Path:
    """A checkpoint that mlx-lm made of a released one, quantized by its own rules or not."""
    overrides = {**WIDE, **overrides}
    plain = write_folder(folder.parent / "released", *packed(variant, **overrides))
    model, config = load_model(plain)
    if bits:
        model, config = quantize_model(model, config, 32, bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    assert is_mlx_format(folder)
    return folder


def mlx_lm_logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_released_checkpoints_load_and_equal_mlx_lm(
    tmp_path: Path, variant: str, tied: bool
) -> None:
    config, weights = packed(variant, tie_word_embeddings=tied)
    folder = write_folder(tmp_path / "m", config, weights, shards=2)
    seen = plain_logits(load_target(folder, "float32"), IDS)
    text = tiny_hybrid.hybrid_config(variant, tie_word_embeddings=tied)
    assert off(seen, plain_logits(target_of(text), IDS)) == 0.0
    assert off(seen, mlx_lm_logits(folder)) <= 1e-4


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_on_its_own_loads(tmp_path: Path, variant: str) -> None:
    config = tiny_hybrid.hybrid_config(variant)
    folder = write_folder(tmp_path / "m", config, tiny_weights(config))
    seen = plain_logits(load_target(folder, "float32"), IDS)
    assert off(seen, plain_logits(target_of(config), IDS)) == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_tensor_an_expert_or_all_in_one_are_the_same(tmp_path: Path, variant: str) -> None:
    config = tiny_hybrid.hybrid_config(variant)
    weights = tiny_weights(config)
    split = tiny_hybrid.one_tensor_an_expert(weights)
    assert (len(split) > len(weights)) == ("num_experts" in config)
    folder = write_folder(tmp_path / "m", config, split)
    seen = plain_logits(load_target(folder, "float32"), IDS)
    assert off(seen, plain_logits(target_of(config), IDS)) == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [None, 4], ids=["plain", "4bit"])
def test_mlx_lm_s_checkpoints_equal_mlx_lm(tmp_path: Path, variant: str, bits: int | None) -> None:
    folder = mlx_folder(tmp_path / "mlx", variant, bits)
    expected = mlx_lm_logits(folder)
    for keep in (True, False) if bits else (False,):
        target = load_target_as(folder, Precision(mx.float32, keep))
        kinds = {type(m).__name__ for _, m in target.named_modules()}  # type: ignore[attr-defined]
        assert ("QuantizedLinear" in kinds) == keep
        assert off(plain_logits(target, IDS), expected) <= 1e-4
    plain = mlx_lm_logits(tmp_path / "released")
    # Quantization must show, or the comparison would also pass on the unquantized weights.
    assert (off(expected, plain) > 0.01) == bool(bits)


def test_image_parts_of_an_mlx_checkpoint_are_left_out(tmp_path: Path) -> None:
    folder = mlx_folder(tmp_path / "mlx", "qwen3_5", 4, tie_word_embeddings=True)
    expected = plain_logits(load_target(folder, "float32"), IDS)
    weights = read_weights(folder)
    assert all(name.startswith("language_model.model.") for name in weights)
    for other in ("vision_tower.blocks.0.attn.qkv", "language_model.mtp.fc"):
        weights[f"{other}.weight"] = mx.zeros((4, 8), mx.uint32)
        weights[f"{other}.scales"] = weights[f"{other}.biases"] = mx.zeros((4, 2))
    weights["language_model.lm_head.weight"] = mx.zeros((96, 64))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / INDEX).unlink()
    assert off(plain_logits(load_target(folder, "float32"), IDS), expected) == 0.0


def test_other_tensors_too_many_are_still_an_error(tmp_path: Path) -> None:
    config, weights = packed("qwen3_5")
    weights["model.language_model.layers.0.linear_attn.in_proj_q.weight"] = np.ones((2, 2))
    folder = write_folder(tmp_path / "m", config, weights)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.linear_attn\.in_proj_q"):
        load_target(folder)


def test_the_decay_is_not_rounded_to_16_bits(tmp_path: Path) -> None:
    config, weights = packed("qwen3_5")
    target = load_target(write_folder(tmp_path / "m", config, weights), "bfloat16")
    layer = target.model.layers[0].linear_attn  # type: ignore[attr-defined]
    assert layer.A_log.dtype == mx.float32
    own = weights["model.language_model.layers.0.linear_attn.A_log"]
    assert off(np.array(layer.A_log), own) == 0.0
    cache = target.make_cache()
    hidden, features = target.forward([Segment(mx.array(IDS), cache)], [0])
    cache.commit(7)
    mx.eval(cache.arrays())
    assert features is not None
    kinds = {target.dtype, hidden.dtype, features.dtype, layer.dt_bias.dtype, cache[0].tail.dtype}
    assert kinds == {mx.bfloat16}
    assert cache[0].state.dtype == mx.float32  # type: ignore[attr-defined]
    exact = plain_logits(target_of(config["text_config"]), IDS)
    seen = np.array(target.logits(hidden)[0].astype(mx.float32))
    assert np.abs(seen - exact).mean() <= 0.1 * exact.std()


REFUSED = [
    ({"attn_output_gate": False}, "attn_output_gate = False is not supported;"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported;"),
    ({"layer_types": ["linear_attention"] * 3}, "3 layer_types for 4 layers;"),
    ({"layer_types": ["mamba", *["full_attention"] * 3]}, "layer_types = 'mamba' is not supp"),
    ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is no multiple of its linear_num_k"),
    ({"linear_key_head_dim": None}, "no linear_key_head_dim;"),
    ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, not a whole number above zero;"),
    ({"head_dim": None}, "no head_dim;"),
    ({"full_attention_interval": "4"}, "full_attention_interval is '4', not a whole number"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds its 4 experts;"),
    ({"sliding_window": 8, "use_sliding_window": True}, "use_sliding_window = True is not supp"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported;"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}},
        "partial_rotary_factor 0.2 of head_dim 16 is no even number of dimensions;",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}},
        "rope type 'longrope' is not supported;",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[s[:24] for _, s in REFUSED])
@pytest.mark.parametrize("variant", ["qwen3_5_moe", "qwen3_next"])
def test_unsupported_configs_are_refused_by_name(variant: str, change: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_target(tiny_hybrid.hybrid_config(variant, **change))
    assert sentence in str(caught.value)


def test_a_quarter_of_each_head_is_rotated_where_the_config_does_not_say() -> None:
    config = tiny_hybrid.hybrid_config("qwen3_next", partial_rotary_factor=None)
    assert build_target(config).model.layers[1].self_attn.rope.dims == 4  # type: ignore[attr-defined]


def test_released_configs_name_no_unknown_key(caplog: pytest.LogCaptureFixture) -> None:
    """Keys as the released configs of Qwen3.5 and Qwen3-Coder-Next have them."""
    training = {"router_aux_loss_coef": 0.001, "output_router_logits": False, "dtype": "bfloat16"}
    mtp = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    build_target(tiny_hybrid.hybrid_config("qwen3_5", **training, **mtp, eos_token_id=5))
    build_target(tiny_hybrid.hybrid_config("qwen3_next", **training, use_sliding_window=False))
    assert not caplog.records
    build_target(tiny_hybrid.hybrid_config("qwen3_5", swirl=2.0))
    assert "swirl" in caplog.text
