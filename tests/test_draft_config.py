"""Reading a drafter's config.json: every variant of it understood, everything else refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_drafter as tiny

from dflash_mlx.draft.config import DFlash2Parts, DFlashConfig, parse_config
from dflash_mlx.errors import CheckpointError
from dflash_mlx.paths import assets_dir

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def nested(**changes: Any) -> dict[str, Any]:
    """dflash_config with changed keys; None takes a key away."""
    merged = {**tiny.drafter_config()["dflash_config"], **changes}
    return {key: value for key, value in merged.items() if value is not None}


def parsed(variant: str = "full", **overrides: Any) -> DFlashConfig:
    return parse_config(tiny.drafter_config(variant, **overrides))


def test_embedded_drafter() -> None:
    file = assets_dir() / "smollm2-135m-dflash2-b8" / "config.json"
    config = parse_config(json.loads(file.read_text()))
    assert (config.block_size, config.mask_token_id) == (8, 3)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert config.feature_size == 5 * 576
    assert (config.windows, config.causal) == ((None, None), (False, False))
    assert abs(config.rope.periods[1].item() - 100000.0 ** (2 / 64)) < 1e-5


def test_keys_may_stand_at_the_top_level() -> None:
    config = parsed(
        dflash_config=None, block_size=6, mask_token_id=7, target_layer_ids=[2, 0], causal=None
    )
    assert (config.block_size, config.mask_token_id) == (6, 7)
    assert config.target_layer_ids == (2, 0)  # order of the list, not sorted


def test_nested_keys_win() -> None:
    config = parsed(block_size=9, mask_token_id=1, final_logit_softcapping=30.0)
    assert (config.block_size, config.mask_token_id) == (tiny.BLOCK, 5)
    assert config.final_logit_softcapping == 30.0
    assert (
        parsed(
            final_logit_softcapping=30.0, dflash_config=nested(final_logit_softcapping=20.0)
        ).final_logit_softcapping
        == 20.0
    )


def test_scales_default_to_one_and_a_soft_cap_below_zero_is_none() -> None:
    config = parsed(dflash_config=nested(final_logit_softcapping=0))
    assert (config.input_embedding_scale, config.output_multiplier) == (1.0, 1.0)
    assert config.final_logit_softcapping is None
    assert parsed(output_multiplier=0.5).output_multiplier == 0.5


@pytest.mark.parametrize(
    ("is_causal", "causal"),
    [(None, (True, False, True)), (True, (True,) * 3), (False, (False,) * 3)],
)
def test_in_block_order(is_causal: bool | None, causal: tuple[bool, ...]) -> None:
    assert parsed("mixed", is_causal=is_causal).causal == causal
    other_key = {"dflash_config": nested(causal=is_causal)}
    assert parsed("mixed", **other_key).causal == causal


def test_windows() -> None:
    assert parsed("mixed").windows == (6, None, 6)
    assert parsed("mixed", use_sliding_window=None).windows == (6, None, 6)
    # A window that no layer uses, as many configs carry.
    unused = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    assert parsed(**unused).windows == (None, None, None)
    by_depth = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    assert parsed(**by_depth).windows == (None, 8, 8)


def test_rope_theta_may_be_in_rope_parameters() -> None:
    plain = parsed().rope
    moved = parsed(
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}
    ).rope
    assert plain.periods.tolist() == moved.periods.tolist()
    assert parsed("yarn").rope.magnitude > 1.1
    # A factor for the longest period, none for the shortest.
    stretched = parsed("llama3").rope.periods / plain.periods
    assert stretched[0].item() == pytest.approx(1.0)
    assert stretched[-1].item() == pytest.approx(8.0)


def test_bookkeeping_keys_are_ignored() -> None:
    inert = {"torch_dtype": "bfloat16", "transformers_version": "5.1", "auto_map": {"a": "b"}}
    assert parsed(**inert, use_cache=True, initializer_range=0.02).block_size == tiny.BLOCK
    assert parsed(draft_vocab_size=tiny.VOCAB, attention_sink_bias=False).hidden_size == 32


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no block size": ({"dflash_config": nested(block_size=None)}, "has no block_size"),
    "no mask id": ({"dflash_config": nested(mask_token_id=None)}, "has no mask_token_id"),
    "no taps": ({"dflash_config": nested(target_layer_ids=None)}, "has no target_layer_ids"),
    "empty taps": ({"dflash_config": nested(target_layer_ids=[])}, "target_layer_ids is "),
    "negative tap": ({"dflash_config": nested(target_layer_ids=[1, -1])}, "target_layer_ids is -1"),
    "tap as text": ({"dflash_config": nested(target_layer_ids=["1"])}, "target_layer_ids is '1'"),
    "block of one": ({"dflash_config": nested(block_size=1)}, "block_size is 1, not"),
    "true as a number": ({"dflash_config": nested(block_size=True)}, "block_size is True"),
    "no head_dim": ({"head_dim": None}, "has no head_dim"),
    "odd head_dim": ({"head_dim": 15}, "head_dim is 15"),
    "no eps": ({"rms_norm_eps": None}, "has no rms_norm_eps"),
    "no vocabulary": ({"vocab_size": None}, "has no vocab_size"),
    "no rope theta": ({"rope_theta": None}, "no rope_theta"),
    "heads": ({"num_attention_heads": 3}, "num_attention_heads is 3.*num_key_value_heads 2"),
    "layer_types too short": ({"layer_types": SLIDING[:2]}, "a list of 3 entries"),
    "layer type": ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    "no window": ({"layer_types": SLIDING}, "has no sliding_window"),
    "window switched off": (
        {"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": False},
        "use_sliding_window is false",
    ),
    "window of unknown layers": (
        {"sliding_window": 6, "use_sliding_window": True},
        "has no max_window_layers",
    ),
    "is_causal as text": ({"is_causal": "yes"}, "is_causal is 'yes'"),
    "causal twice": (
        {"is_causal": True, "dflash_config": nested(causal=False)},
        "is_causal is True and its dflash_config.causal False",
    ),
    "scale": ({"dflash_config": nested(output_multiplier=0)}, "output_multiplier is 0"),
    "soft-cap": ({"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "unknown rope key": ({"rope_scaling": {"type": "linear", "factor": 2, "s": 1}}, "sets s = 1"),
    "unknown nested key": ({"dflash_config": nested(anchor_shift=1)}, "anchor_shift = 1"),
    "unknown top key": ({"residual_scale": 0.5}, "residual_scale = 0.5"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "logit_scale": ({"logit_scale": 0.2}, "logit_scale = 0.2"),
    "interleaved rope": ({"is_neox_style": False}, "is_neox_style = False"),
    "speculators": ({"speculators_model_type": "dflash"}, "has no transformer_layer_config"),
    "speculators' other kinds": (
        {"speculators_model_type": "dflash2"},
        "speculators_model_type = 'dflash2'",
    ),
    "speculators' taps": ({"aux_hidden_state_layer_ids": [2]}, "aux_hidden_state_layer_ids"),
    "draft vocabulary": ({"draft_vocab_size": 49}, "draft_vocab_size = 49"),
    "sinks": ({"dflash_config": nested(attention_sink_bias=True)}, "attention_sink_bias"),
    "window on all layers": ({"dflash_config": nested(use_swa=True)}, "has no sliding_window"),
    "mask embedding": ({"mask_embedding": True}, "mask_embedding"),
    "anchor row sampled": ({"sample_from_anchor": True}, "sample_from_anchor"),
    "selector": ({"dflash_config": nested(selector_rank=256)}, "selector_rank = 256"),
    "quantized checkpoint": ({"quantization": {"bits": 4}}, "quantization"),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, "has no conv_kernel_size"),
    "other architecture": ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
    "dflash_config": ({"dflash_config": [1]}, r"dflash_config is \[1\], not an object"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str) -> None:
    overrides, message = REFUSED[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        parsed(**overrides)
    assert "; " in caught.value.args[0], "what to do is missing"


def test_every_required_key_is_required() -> None:
    config = tiny.drafter_config()
    optional = {"architectures", "model_type", "num_target_layers", "attention_bias"}
    for key in config.keys() - optional - {"dflash_config"}:
        with pytest.raises(CheckpointError, match=key):
            parse_config({k: v for k, v in config.items() if k != key})
    for key in optional:
        assert parse_config({k: v for k, v in config.items() if k != key}).hidden_size == 32


def test_dflash2_as_released() -> None:
    config = parse_config(
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "hidden_size": 5120,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 17408,
            "vocab_size": 248320,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_target_layers": 64,
            "rope_theta": 10000000,
            "layer_types": ["sliding_attention"] * 5,
            "sliding_window": 2048,
            "use_sliding_window": True,
            "is_causal": False,
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        }
    )
    assert (config.windows, config.causal) == ((2048,) * 5, (False,) * 5)
    assert config.parts == DFlash2Parts(2, 16, 256, 16)
    assert config.feature_size == 5 * 5120
    assert parsed().parts is None


@pytest.mark.parametrize(
    "key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
)
def test_dflash2_needs_the_sizes_of_its_parts(key: str) -> None:
    inside = tiny.drafter_config("second")["dflash_config"]
    for value, message in ((None, f"has no {key}"), (0, f"{key} is 0")):
        with pytest.raises(CheckpointError, match=message):
            parsed("second", dflash_config={**inside, key: value})
