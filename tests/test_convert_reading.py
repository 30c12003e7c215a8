"""What mlx-lm makes of converted configs: every spelling, and what configs leave out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import write_folder
from conversions import (
    IDS,
    mlx_lm_logits,
    off,
    our_logits,
    saved_by_transformers,
    source_config,
    tiny_families,
)
from mlx.utils import tree_flatten
from oracle import plain_logits
from tiny import target_with, tiny_weights
from tiny_engine import write_tokenizer

from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.convert.quantize import Rules, reference_model
from dflash_mlx.convert.reading import for_mlx_lm, with_llama3_scaling
from dflash_mlx.convert.source import open_source
from dflash_mlx.errors import CheckpointError
from dflash_mlx.layers.rope import rope_from_config
from dflash_mlx.models import build_target


@pytest.mark.parametrize("family", tiny_families())
def test_configs_saved_by_transformers_5_are_read_alike(tmp_path: Path, family: str) -> None:
    # Not the theta that mlx-lm takes when it finds none.
    flat = {"rope_theta": 500.0} if "rope_theta" in source_config(family) else {}
    old = source_config(family, **flat)
    config = saved_by_transformers(old)
    assert config.keys().isdisjoint({"rope_theta", "rope_scaling", "full_attention_interval"})
    source = write_folder(tmp_path / "m", config, tiny_weights(old))
    write_tokenizer(source)
    convert(Order(str(source), tmp_path / "q", Recipe(bits=8, group_size=32)))
    expected = mlx_lm_logits(tmp_path / "q")
    assert off(our_logits(tmp_path / "q"), expected) <= 1e-4
    # Both programs could misread it alike: the model is the one of the older spelling.
    write_folder(tmp_path / "m", old, tiny_weights(old))
    changed = float(np.median(np.abs(our_logits(source) - expected)))
    assert changed < 0.2 * expected.std()


_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": None, "num_key_value_heads": None}),
        ("llama", {"rope_scaling": {**_YARN, "attention_factor": 1.7}}),
        ("qwen3", {"rope_scaling": {**_YARN, "mscale": 3.0}}),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 8.0}, "max_position_embeddings": 64}),
        ("qwen3_moe", {"norm_topk_prob": None, "mlp_only_layers": [], "decoder_sparse_step": None}),
        ("qwen3_next", {"norm_topk_prob": None}),
        ("qwen3_5", {"rope_theta": 500.0, "partial_rotary_factor": 0.25, "rope_parameters": None}),
        ("gemma4", {"final_logit_softcapping": None, "num_kv_shared_layers": None}),
    ],
    ids=str,
)
def test_what_a_config_leaves_out_is_stated(family: str, changes: dict[str, Any]) -> None:
    absent = {key for key, value in changes.items() if value is None}
    config = source_config(family, **changes)
    shown = {key: value for key, value in config.items() if key not in absent}
    defaults = {"num_key_value_heads": 4, "decoder_sparse_step": 1, "num_kv_shared_layers": 0}
    weights = tiny_weights({**config, **{k: v for k, v in defaults.items() if k in absent}})
    stated = target_with(for_mlx_lm(shown), weights)
    assert off(plain_logits(stated, IDS), plain_logits(target_with(shown, weights), IDS)) <= 1e-4
    assert _off_by_mlx_lm(shown, weights) <= 1e-4


def _off_by_mlx_lm(config: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> float:
    """How far mlx-lm's logits are from ours, of the same config and weights in float32."""
    ours: Any = target_with(config, tiny_weights(config) if weights is None else weights)
    theirs: Any = reference_model(config)
    prefix = "language_model." if hasattr(theirs, "language_model") else ""
    named = {prefix + n: a for n, a in cast(Any, tree_flatten(ours.parameters()))}
    read = theirs.sanitize(named) if hasattr(theirs, "sanitize") else named
    theirs.load_weights(list(read.items()))
    return off(np.array(theirs(mx.array([IDS]))[0]), plain_logits(ours, IDS))


_DIVISORS = {"head_dim": 16, "rope_freq_factors": [1.0] * 7 + [2.0]}
_UNROUNDED = {**_YARN, "original_max_position_embeddings": 64, "truncate": False}


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("gpt_oss", {"rope_scaling": _UNROUNDED}, "positions .* in 4 layers.* t"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "activation .* in 4 layers.* read swiglu_alpha and"),
        ("gpt_oss", {}, None),
        ("qwen3_moe", {"rope_scaling": _YARN}, "does not read rope_scaling of this family;"),
        ("qwen3", {"rope_scaling": _UNROUNDED}, "not read rope_scaling.truncate"),
        ("qwen3", {"rope_scaling": {**_YARN, "attention_factor": 1.7}}, None),
        ("llama", _DIVISORS, "does not read rope_freq_factors;"),
        ("qwen3_5", {}, None),
        ("gemma4", {}, None),
    ],
    ids=str,
)
def test_what_mlx_lm_computes_otherwise_is_remarked(
    family: str, changes: dict[str, Any], sentence: str | None
) -> None:
    config = source_config(family, **changes)
    found = Rules(Recipe(), config, build_target(config)).remarks
    assert len(found) == (sentence is not None)
    if sentence is not None:
        assert re.search(sentence, found[0]), found
    # Said if and only if it is so.
    assert (_off_by_mlx_lm(config) > 1e-3) == (sentence is not None)


def test_a_whole_gemma4_keeps_its_vocabulary(tmp_path: Path) -> None:
    text = source_config("gemma4")
    config = {"model_type": "gemma4", "text_config": text, "vision_config": {"depth": 1}}
    source = write_folder(tmp_path / "m", config, tiny_weights(text))
    write_tokenizer(source)
    before = json.dumps(open_source(source).config)
    opened = open_source(source)
    build_target(opened.config)
    Rules(Recipe(), opened.config, build_target(opened.config))
    assert json.dumps(opened.config) == before
    convert(Order(str(source), tmp_path / "q", Recipe(bits=8, group_size=32)))
    assert off(our_logits(tmp_path / "q"), mlx_lm_logits(tmp_path / "q")) <= 1e-4


def test_what_mlx_lm_lacks_is_named() -> None:
    config = source_config("qwen3")
    model = build_target({**config, "attention_bias": True})
    sentence = "has no model.layers.0.self_attn.k_proj.bias like this model's, .* not converted"
    with pytest.raises(CheckpointError, match=sentence):
        Rules(Recipe(), {**config, "attention_bias": True}, model)
    with pytest.raises(CheckpointError, match=r"has no model\.layers.0.mlp.down_proj\.weight like"):
        Rules(Recipe(), {**config, "intermediate_size": 64}, model)
    del config["vocab_size"]
    with pytest.raises(CheckpointError, match=r"cannot read this config \(.*'vocab_size'\);"):
        Rules(Recipe(), config, model)


def test_llama3_divisors_get_their_name_for_mlx_lm(tmp_path: Path) -> None:
    named = {"rope_theta": 500000.0, "head_dim": 64, "max_position_embeddings": 131072}
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = np.array(rope_from_config(named, 64).periods)
    divisors = np.array(rope_from_config({**named, "rope_scaling": scaling}, 64).periods) / plain
    given = {**named, "rope_freq_factors": divisors.tolist()}
    assert with_llama3_scaling(given) == {**named, "rope_scaling": scaling}
    other = {**named, "rope_freq_factors": [1.0] * 31 + [2.0]}
    assert with_llama3_scaling(other) == other
