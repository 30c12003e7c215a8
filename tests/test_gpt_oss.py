"""gpt_oss: MXFP4 checkpoints against transformers and mlx-lm, its own settings, bounded windows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import WIDE, mixed_bits, write_folder, write_quantized
from mlx_lm.utils import load_model
from oracle import plain_logits
from tiny import target_of, target_with, tiny_config, tiny_prompt, tiny_weights
from tiny_engine import write_tokenizer
from tiny_experts import mxfp4_experts

from dflash_mlx.cache import KVCache, WindowCache
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.generate import Prompt, Transcript, answer
from dflash_mlx.loader import Precision, load_target_as
from dflash_mlx.models import build_target, gpt_oss
from dflash_mlx.segment import Segment
from dflash_mlx.text import CHANNEL_MARKS
from dflash_mlx.tokenizer import load_tokenizer

TOLERANCE = 1e-4
TEETH = 20 * TOLERANCE
GOLDENS = Path(__file__).parent / "goldens"
IDS = tiny_prompt(96, 24)
# transformers with `truncate`, the only way that mlx-lm computes YaRN.
TRUNCATED = {**tiny_config("gpt_oss")["rope_scaling"], "truncate": True}
HF_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def golden(name: str) -> tuple[dict[str, Any], np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as stored:
        return json.loads(str(stored["config"])), stored["logits"]


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def mlx_lm_logits(folder: Path) -> np.ndarray:
    return np.array(load_model(folder)[0](mx.array([IDS]))[0].astype(mx.float32))


def mlx_names(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tiny weights as converted checkpoints name them."""
    arrays = {name: mx.array(array) for name, array in tiny_weights(config).items()}
    gpt_oss.remap_hf(arrays, config)
    return {name: np.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "fault",
    [
        {"sliding_window": 7},
        {"sliding_window": 9},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"swiglu_limit": 6.0},
        {"swiglu_alpha": 1.6},
        {"rope_scaling": {**TRUNCATED, "factor": 4.5}},
    ],
    ids=str,
)
def test_a_wrong_setting_is_seen(fault: dict[str, Any]) -> None:
    config, logits = golden("targets/gpt_oss_untied")
    assert off(plain_logits(target_of(config), IDS), logits) <= TOLERANCE
    target = target_with({**config, **fault}, tiny_weights(config))
    assert off(plain_logits(target, IDS), logits) > TEETH


def test_yarn_without_truncation_is_another_one() -> None:
    """The two differ by less than the teeth at 24 positions, and by more than the tolerance."""
    config, logits = golden("targets/gpt_oss_untied")
    target = target_with({**config, "rope_scaling": TRUNCATED}, tiny_weights(config))
    assert off(plain_logits(target, IDS), logits) > 5 * TOLERANCE


@pytest.mark.parametrize("part", ["sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias"])
def test_a_part_left_out_is_seen(part: str) -> None:
    config, logits = golden("targets/gpt_oss_untied")
    nothing = -1e9 if part == "sinks" else 0.0
    weights = {
        name: np.full_like(array, nothing) if name.endswith(part) else array
        for name, array in tiny_weights(config).items()
    }
    assert off(plain_logits(target_with(config, weights), IDS), logits) > TEETH


def test_gate_and_up_are_interleaved() -> None:
    config, logits = golden("targets/gpt_oss_untied")
    weights = tiny_weights(config)
    for name, array in weights.items():
        if name.endswith("gate_up_proj"):
            weights[name] = np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
    assert off(plain_logits(target_with(config, weights), IDS), logits) > TEETH


@pytest.fixture
def openai(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A checkpoint as OpenAI publishes it, and transformers' logits of it."""
    config, logits = golden("mxfp4/gpt_oss")
    weights = mxfp4_experts(tiny_weights(config))
    config["quantization_config"] = HF_MXFP4
    return write_folder(tmp_path / "openai", config, weights, shards=2), logits


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantized"])
def test_mxfp4_checkpoints_equal_transformers(openai: tuple[Path, np.ndarray], keep: bool) -> None:
    folder, logits = openai
    target = load_target_as(folder, Precision(mx.float32, keep))
    experts = target.model.layers[0].mlp.experts  # type: ignore[attr-defined]
    assert type(experts.gate_proj).__name__ == ("Quantized" if keep else "") + "ExpertLinear"
    assert experts.up_proj.weight.dtype == (mx.uint32 if keep else mx.float32)
    assert off(plain_logits(target, IDS), logits) <= TOLERANCE
    assert off(mlx_lm_logits(folder), logits) <= TOLERANCE


def test_a_changed_block_or_scale_is_seen(tmp_path: Path) -> None:
    config, logits = golden("mxfp4/gpt_oss")
    packed = mxfp4_experts(tiny_weights(config))
    config["quantization_config"] = HF_MXFP4
    changes = {
        "blocks": lambda a: (a << 4) | (a >> 4),  # the two numbers of a byte exchanged
        "scales": lambda a: np.roll(a, 1, axis=1),
    }
    for suffix, change in changes.items():
        weights = {k: change(v) if k.endswith(f"_proj_{suffix}") else v for k, v in packed.items()}
        folder = write_folder(tmp_path / suffix, config, weights)
        target = load_target_as(folder, Precision(mx.float32, False))
        assert off(plain_logits(target, IDS), logits) > TEETH, suffix


def test_mlx_conversions_of_mxfp4_load(openai: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """MXFP4 experts kept and other layers in 8 bits, affine: exceptions without a mode."""
    from mlx_lm.utils import quantize_model, save_config, save_model

    folder, logits = openai
    model, config = load_model(folder)

    def others(path: str, module: Any) -> bool | dict[str, Any]:
        wanted = "experts" not in path and hasattr(module, "to_quantized")
        return {"group_size": 64, "bits": 8} if wanted else False

    model, config = quantize_model(model, config, 32, 4, mode="mxfp4", quant_predicate=others)
    config["quantization"]["mode"] = "mxfp4"
    (tmp_path / "q").mkdir()
    save_model(tmp_path / "q", model)
    save_config(config, tmp_path / "q" / "config.json")
    expected = mlx_lm_logits(tmp_path / "q")
    assert off(expected, logits) > TEETH
    for keep in (True, False):
        target = load_target_as(tmp_path / "q", Precision(mx.float32, keep))
        kinds = {type(m).__name__ for _, m in target.named_modules()}  # type: ignore[attr-defined]
        assert ({"QuantizedLinear", "QuantizedExpertLinear"} <= kinds) == keep
        assert off(plain_logits(target, IDS), expected) <= TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [{"bits": 4}, {"bits": 4, "predicate": mixed_bits}, {"bits": 4, "mode": "mxfp4"}],
    ids=["4bit", "mixed", "mxfp4"],
)
def test_mlx_quantized_checkpoints_equal_mlx_lm(tmp_path: Path, settings: dict[str, Any]) -> None:
    overrides = {
        "rope_scaling": TRUNCATED,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    weights = mlx_names(tiny_config("gpt_oss", **WIDE, **overrides))
    folder = write_quantized(tmp_path / "q", "gpt_oss", weights=weights, **settings, **overrides)
    expected, plain = mlx_lm_logits(folder), mlx_lm_logits(tmp_path / "plain")
    for keep in (True, False):
        target = load_target_as(folder, Precision(mx.float32, keep))
        assert off(plain_logits(target, IDS), expected) <= TOLERANCE
    assert off(expected, plain) > 0.01
    unquantized = load_target_as(tmp_path / "plain", Precision(mx.float32, False))
    assert off(plain_logits(unquantized, IDS), plain) <= TOLERANCE


def test_only_sliding_layers_have_a_window_and_they_do_not_grow() -> None:
    kinds = ["sliding_attention", "full_attention"]
    target = target_of(tiny_config("gpt_oss", num_hidden_layers=2, layer_types=kinds))
    cache, held = target.make_cache(), {}
    assert [type(layer) for layer in cache] == [WindowCache, KVCache]
    rng = np.random.default_rng(0)
    for cycle in range(1, 501):
        ids = mx.array(rng.integers(0, 96, 4), dtype=mx.int32)
        target.forward([Segment(ids, cache)])  # lazy: only the shapes of the buffers count here
        cache.commit(cycle % 5)
        held[cycle] = sum(layer.nbytes for layer in cache if isinstance(layer, WindowCache))
    assert cache.length == 1000
    assert held[500] == held[50]


REFUSED = [
    ({"rope_scaling": None}, "no rope_scaling;"),
    ({"layer_types": ["sliding_attention"] * 3}, "names 3 layers of 4;"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types = 'chunked_attention' is not"),
    ({"sliding_window": None}, "no sliding_window;"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds its 6 experts;"),
    ({"swiglu_limit": -1.0}, "swiglu_limit is -1.0, not a number above zero;"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported;"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[s[:24] for _, s in REFUSED])
def test_unsupported_configs_are_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_target(tiny_config("gpt_oss", **change))
    assert sentence in str(caught.value)


# As gpt-oss-20b states it.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": HF_MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


@pytest.mark.parametrize("left_out", [(), ("attention_bias", "layer_types", "swiglu_limit")])
def test_published_configs_are_read_without_a_warning(
    left_out: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = {key: value for key, value in PUBLISHED.items() if key not in left_out}
    target = build_target(config)  # lazy: no weight is ever made
    assert not caplog.records
    assert [type(layer) for layer in target.make_cache()] == [WindowCache, KVCache] * 12
    assert "bias" in target.model.layers[0].self_attn.o_proj
    assert target.model.layers[0].mlp.experts.gate_proj.weight.shape == (32, 2880, 2880)


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_config("gpt_oss"))
    target = load_target_as(folder, Precision(mx.bfloat16, True))
    hidden, features = target.forward([Segment(mx.array(IDS), target.make_cache())], [0, 3])
    assert features is not None
    assert {hidden.dtype, features.dtype, target.logits(hidden).dtype} == {mx.bfloat16}


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


class Recital:
    """A session that emits given ids, three a step."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def run(self, *given: Any) -> Iterator[list[int]]:
        *_, ends, _, stopped = given
        for start in range(0, len(self._ids), 3):
            step = self._ids[start : start + 3]
            assert not any(stopped(token) for token in step if token not in ends)
            yield step


@pytest.mark.parametrize("templated", [True, False])
def test_messages_on_channels_become_reasoning_and_answer(tmp_path: Path, templated: bool) -> None:
    """From ids: the marks are tokens of the vocabulary, and never part of the text."""
    specials = [*CHANNEL_MARKS, "<|im_end|>"]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", HARMONY, specials))
    rendered = tokenizer.render([{"role": "user", "content": "hi"}])
    assert tokenizer.has_channels
    assert tokenizer.opens_thinking(rendered)
    assert not tokenizer.opens_thinking("<|start|>user<|message|>hi")
    assert not tokenizer.opens_thinking("hi")
    written = (
        "<|channel|>analysis<|message|>größer?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Ja, größer.<|im_end|>"
    )
    ids = tokenizer.encode_plain(written)
    assert len(ids) < len(written)
    prompt, said = Prompt([1], rendered if templated else None, templated), Transcript()
    chunks = list(
        answer(
            Recital(ids),  # type: ignore[arg-type]
            tokenizer,
            prompt,
            SamplingParams(),
            99,
            (),
            GenerationStats(),
            said,
            lambda *_: None,
        )
    )
    assert "".join(chunk.reasoning for chunk in chunks) == "größer?"
    assert "".join(chunk.text for chunk in chunks) == "Ja, größer."
    # The transcript spells the tokens, so that a chat can go on behind them.
    assert tokenizer.encode_plain(said.text) == ids[:-1]


def test_other_tokenizers_have_no_channels(tmp_path: Path) -> None:
    assert not load_tokenizer(write_tokenizer(tmp_path / "plain")).has_channels
    marked = write_tokenizer(tmp_path / "marked", specials=[*CHANNEL_MARKS, "<|im_end|>"])
    assert not load_tokenizer(marked).has_channels  # the template knows none


def test_a_reasoning_level_reaches_the_template(tmp_path: Path) -> None:
    template = "Reasoning: {{ reasoning_effort | default('medium') }}" + HARMONY
    levels = load_tokenizer(write_tokenizer(tmp_path / "levels", template))
    asked = [{"role": "user", "content": "hi"}]
    assert levels.render(asked).startswith("Reasoning: medium<|start|>")
    assert levels.render(asked, "high").startswith("Reasoning: high<|start|>")
    assert levels.chat_ids(asked, "high") == levels.encode_plain(levels.render(asked, "high"))
    with pytest.raises(UsageError, match="levels has no thinking mode to turn on"):
        levels.render(asked, True)
    plain = load_tokenizer(write_tokenizer(tmp_path / "plain"))
    with pytest.raises(UsageError, match="plain has no reasoning levels to set to low"):
        plain.render(asked, "low")
