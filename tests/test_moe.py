"""Experts, routers and sparse MLPs against numpy; qwen3_moe checkpoints in every packaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import WIDE, mixed_bits, write_folder, write_quantized
from mlx_lm.utils import load_model
from oracle import plain_logits
from tiny import target_of, target_with, tiny_config, tiny_prompt, tiny_weights

from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.moe import (
    SORTED_PAIRS,
    ExpertLinear,
    Experts,
    SparseMLP,
    softmax_top_k,
    top_k_softmax,
)
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models import build_target

TOLERANCE = 1e-4
IDS = tiny_prompt(96, 24)
RNG = np.random.default_rng(0)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def randomised(module: nn.Module, seed: int = 0) -> Any:
    """The module with random parameters."""
    rng = np.random.default_rng(seed)
    module.apply(lambda a: mx.array(rng.standard_normal(a.shape).astype(np.float32) * 0.4))
    mx.eval(module.parameters())
    return module


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def expert_output(experts: Experts, index: int, row: np.ndarray) -> np.ndarray:
    parts = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = experts[name]
        bias = np.array(layer.bias)[index] if "bias" in layer else 0.0
        parts[name] = np.array(layer.weight, dtype=np.float64)[index], bias
    gate, up = (parts[n][0] @ row + parts[n][1] for n in ("gate_proj", "up_proj"))
    return parts["down_proj"][0] @ (silu(gate) * up) + parts["down_proj"][1]


def softmax(x: np.ndarray) -> np.ndarray:
    grown = np.exp(x - x.max())
    return grown / grown.sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, SORTED_PAIRS // 3, 3 * SORTED_PAIRS])
def test_experts_equal_a_loop_over_rows(rows: int, bias: bool) -> None:
    """On both sides of the number of pairs from which they are sorted by expert."""
    experts = randomised(Experts(5, 16, 12, bias=bias))
    x = RNG.standard_normal((1, rows, 16)).astype(np.float32)
    chosen = np.stack([RNG.permutation(5)[:3] for _ in range(rows)])[None]
    seen = np.array(experts(mx.array(x), mx.array(chosen)))
    wanted = [[expert_output(experts, i, x[0, r]) for i in chosen[0, r]] for r in range(rows)]
    assert off(seen, np.array([wanted])) <= 1e-4


def test_rows_do_not_depend_on_how_many_run_beside_them() -> None:
    experts = randomised(Experts(5, 16, 12))
    x = mx.array(RNG.standard_normal((1, SORTED_PAIRS, 16)).astype(np.float32))
    chosen = mx.array(RNG.integers(0, 5, (1, SORTED_PAIRS, 2)))
    together = np.array(experts(x, chosen))
    alone = [np.array(experts(x[:, r : r + 1], chosen[:, r : r + 1])) for r in range(SORTED_PAIRS)]
    assert np.array_equal(together, np.concatenate(alone, axis=1))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_routers_equal_numpy(k: int) -> None:
    logits = RNG.standard_normal((1, 9, 6)).astype(np.float32)
    for name in ("all, summing to 1", "all", "the chosen"):
        if name == "the chosen":
            indices, weights = top_k_softmax(mx.array(logits), k)
        else:
            indices, weights = softmax_top_k(mx.array(logits), k, normalise="1" in name)
        assert indices.shape == weights.shape == (1, 9, k)
        for row, got, shares in zip(
            logits[0], np.array(indices)[0], np.array(weights)[0], strict=True
        ):
            assert set(got.tolist()) == set(np.argsort(row)[-k:].tolist())
            # A softmax over the chosen is a softmax over all, made to sum to 1.
            wanted = softmax(row)[got] if name == "all" else softmax(row[got])
            assert off(shares, wanted) <= 1e-6


@pytest.mark.parametrize("shared", [None, 20])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_sparse_mlp_equals_numpy(shared: int | None, normalise: bool) -> None:
    layer = randomised(
        SparseMLP(
            16,
            experts=5,
            experts_per_token=2,
            intermediate_size=12,
            normalise=normalise,
            shared_intermediate_size=shared,
        )
    )
    x = RNG.standard_normal((1, 6, 16)).astype(np.float32)
    wanted = []
    for row in x[0]:
        probs = softmax(np.array(layer.gate.weight) @ row)
        chosen = np.argsort(probs)[-2:]
        shares = probs[chosen] / (probs[chosen].sum() if normalise else 1.0)
        experts = layer.switch_mlp
        y = sum(s * expert_output(experts, i, row) for s, i in zip(shares, chosen, strict=True))
        if shared:
            parts = layer.shared_expert
            gate, up, down = (np.array(parts[f"{n}_proj"].weight) for n in ("gate", "up", "down"))
            opened = 1.0 / (1.0 + np.exp(-np.array(layer.shared_expert_gate.weight) @ row))
            y = y + opened * (down @ (silu(gate @ row) * (up @ row)))
        wanted.append(y)
    assert off(np.array(layer(mx.array(x))), np.array([wanted])) <= 1e-4


@pytest.mark.parametrize(
    ("group_size", "bits", "mode"), [(32, 4, "affine"), (64, 8, "affine"), (32, 4, "mxfp4")]
)
def test_quantized_experts_equal_their_dequantized_weights(
    group_size: int, bits: int, mode: str
) -> None:
    dense = randomised(ExpertLinear(5, 64, 12, bias=True))
    quantized = dense.to_quantized(group_size, bits, mode)
    groups = {"group_size": group_size, "bits": bits, "mode": mode}
    weight = mx.dequantize(quantized.weight, quantized.scales, quantized.get("biases"), **groups)
    x = mx.array(RNG.standard_normal((7, 1, 64)).astype(np.float32))
    chosen = mx.array(RNG.integers(0, 5, 7))
    seen, plain = np.array(quantized(x, chosen)), np.array(dense(x, chosen))
    dense.weight = weight
    assert off(seen, np.array(dense(x, chosen))) <= 1e-4
    assert off(seen, plain) > 1e-3


def mlx_lm_logits(folder: Path) -> np.ndarray:
    return np.array(load_model(folder)[0](mx.array([IDS]))[0].astype(mx.float32))


def fused(weights: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The layout of transformers' modules: gate and up of all experts in one tensor."""
    out = {name: array for name, array in weights.items() if ".experts." not in name}
    for path in {name.split(".experts.")[0] for name in weights if ".experts." in name}:
        gate, up, down = (
            np.stack([weights[f"{path}.experts.{i}.{p}_proj.weight"] for i in range(count)])
            for p in ("gate", "up", "down")
        )
        out[f"{path}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{path}.experts.down_proj"] = down
    return out


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_with_a_tensor_an_expert_load(tmp_path: Path, tied: bool, shards: int) -> None:
    config = tiny_config("qwen3_moe", tie_word_embeddings=tied)
    folder = write_folder(tmp_path / "m", config, shards=shards)
    seen = plain_logits(load_target(folder, "float32"), IDS)
    assert off(seen, plain_logits(target_of(config), IDS)) == 0.0
    assert off(seen, mlx_lm_logits(folder)) <= TOLERANCE


def test_fused_checkpoints_load(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    expected = plain_logits(target_of(config), IDS)
    weights = fused(tiny_weights(config), config["num_experts"])
    config["num_local_experts"] = config.pop("num_experts")  # as transformers 5 writes it
    target = load_target(write_folder(tmp_path / "m", config, weights), "float32")
    assert off(plain_logits(target, IDS), expected) == 0.0


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantized"])
@pytest.mark.parametrize(
    "settings",
    [{"bits": 4}, {"bits": 8, "tied": True}, {"bits": 4, "predicate": mixed_bits}],
    ids=["4bit", "8bit-tied", "mixed"],
)
def test_mlx_quantized_checkpoints_equal_mlx_lm(
    tmp_path: Path, settings: dict[str, Any], keep: bool
) -> None:
    folder = write_quantized(tmp_path / "q", "qwen3_moe", moe_intermediate_size=64, **settings)
    target = load_target_as(folder, Precision(mx.float32, keep))
    kinds = {type(m).__name__ for _, m in target.named_modules()}  # type: ignore[attr-defined]
    assert ("QuantizedExpertLinear" in kinds) == keep
    expected = mlx_lm_logits(folder)
    assert off(plain_logits(target, IDS), expected) <= TOLERANCE
    assert off(expected, mlx_lm_logits(tmp_path / "plain")) > 0.005


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    weights = tiny_weights(config)
    del weights["model.layers.2.mlp.experts.4.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.experts\.4\.up_proj"):
        load_target(write_folder(tmp_path / "m", config, weights))


@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_no_second_copy_of_the_experts_is_held(tmp_path: Path, layout: str) -> None:
    config = tiny_config("qwen3_moe", **WIDE, moe_intermediate_size=256, mlp_only_layers=[])
    config.update(num_hidden_layers=8, num_experts=16)
    weights = tiny_weights(config)
    size = sum(array.nbytes for array in weights.values())
    if layout == "fused":
        weights = fused(weights, 16)
    folder = write_folder(tmp_path / "m", config, weights)
    del weights
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    target = load_target(folder, "float32")
    held = mx.get_active_memory() - before
    assert size <= held <= 1.02 * size
    # Beside the model, the parts of one layer's stacks.
    assert mx.get_peak_memory() - before <= 1.25 * size
    assert target.num_layers == 8


@pytest.mark.parametrize(
    "fault",
    [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"rope_theta": 15000.0},
    ],
    ids=str,
)
def test_a_wrong_setting_is_seen(fault: dict[str, Any]) -> None:
    config = tiny_config("qwen3_moe")
    weights = tiny_weights(config)
    right = plain_logits(target_with(config, weights), IDS)
    wrong = plain_logits(target_with({**config, **fault}, weights), IDS)
    assert off(wrong, right) > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("settings", "sparse"),
    [
        ({"mlp_only_layers": []}, [True] * 4),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, None),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [False, True, False, True]),
    ],
    ids=str,
)
def test_which_layers_are_sparse(settings: dict[str, Any], sparse: list[bool] | None) -> None:
    config = {k: v for k, v in tiny_config("qwen3_moe", **settings).items() if v is not None}
    target = build_target(config)
    kinds = [isinstance(layer.mlp, SparseMLP) for layer in target.model.layers]
    assert kinds == (sparse or [True] * 4)


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok 7 exceeds its 6 experts"):
        build_target(tiny_config("qwen3_moe", num_experts_per_tok=7))
    with pytest.raises(CheckpointError, match="no num_local_experts"):
        build_target(tiny_config("qwen3_moe", num_experts=None))


# As Qwen3-Coder-30B-A3B-Instruct states it, generation and file keys left out.
PUBLISHED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_configs_are_read_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = build_target(PUBLISHED)  # lazy: no weight is ever made
    assert not caplog.records
    assert target.num_layers == 48
    assert target.model.layers[0].mlp.switch_mlp.down_proj.weight.shape == (128, 2048, 768)


@pytest.mark.parametrize(
    "change", [{"use_qk_norm": False}, {"shared_expert_intermediate_size": 64}], ids=str
)
def test_what_the_family_does_not_compute_is_refused(change: dict[str, Any]) -> None:
    (key, value), *_ = change.items()
    with pytest.raises(CheckpointError, match=f"{key} = {value} is not supported"):
        build_target({**PUBLISHED, **change})
