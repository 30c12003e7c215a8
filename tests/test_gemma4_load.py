"""Gemma 4 checkpoints as Hugging Face and MLX publish them, and DFlash drafters on top of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import write_folder
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from oracle import plain_greedy, plain_logits
from tiny import target_of, tiny_prompt, tiny_target
from tiny_drafter import drafter_config, write_drafter
from tiny_gemma import gemma_config, gemma_weights

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loader import Precision, load_target, load_target_as
from dflash_mlx.models import build_target, family_of
from dflash_mlx.segment import Segment

IDS = tiny_prompt(96, 20)
# Widths that quantization groups divide. mlx-lm takes what a config leaves out for E2B's values.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "hidden_size_per_layer_input": 0,
    "attention_bias": False,
}
# As released checkpoints call them; transformers renames the unified model's vision_embedder.
_OTHER_MODALITIES = (
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "multi_modal_projector.",
    "vision_embedder.",
    "vision_tower.",
)
LAYOUTS = ["gemma4", "gemma4_shared", "gemma4_moe", "gemma4_untied", "gemma4_unified"]


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def wide_config(variant: str) -> dict[str, Any]:
    moe = {"moe_intermediate_size": 64} if variant == "gemma4_moe" else {}
    config = gemma_config(variant, **WIDE, **moe)
    return {"final_logit_softcapping": None, **config}


def multimodal(text: dict[str, Any], model_type: str = "gemma4") -> dict[str, Any]:
    """The config of a whole model; mlx-lm reads the size of the vocabulary at its top level."""
    return {
        "model_type": model_type,
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 16},
        "vocab_size": text["vocab_size"],
        "image_token_id": 90,
    }


def multimodal_weights(text: dict[str, Any]) -> dict[str, np.ndarray]:
    """HF's names of a whole model with a piece of each other modality."""
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in gemma_weights(text).items()
    }
    for part in _OTHER_MODALITIES:
        name = f"{part}piece.weight"
        weights[f"model.{name}"] = np.ones((2, 2), np.float32)
    return weights


def write_hf(folder: Path, variant: str, *, whole: bool) -> dict[str, Any]:
    """A HF checkpoint of the text model alone or of a whole model; returns the text's config."""
    text = wide_config(variant)
    if whole:
        kind = "gemma4_unified" if variant == "gemma4_unified" else "gemma4"
        write_folder(folder, multimodal(text, kind), multimodal_weights(text))
    else:
        write_folder(folder, text, gemma_weights(text))
    return text


def mlx_lm_logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


def convert(source: Path, folder: Path, bits: int | None) -> Path:
    """What mlx-lm makes of a checkpoint, with its own choice of what to quantize how."""
    model, config = load_model(source)
    if bits is not None:
        model, config = quantize_model(model, config, 32, bits)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


# mlx-lm knows the unified model only as a whole, and whole models only with tied heads.
CASES = [
    (v, w)
    for v in LAYOUTS
    for w in (False, True)
    if (v, w) not in {("gemma4_unified", False), ("gemma4_untied", True)}
]


@pytest.mark.parametrize(("variant", "whole"), CASES)
def test_hugging_face_and_mlx_checkpoints_equal_mlx_lm(
    tmp_path: Path, variant: str, whole: bool
) -> None:
    text = write_hf(tmp_path / "hf", variant, whole=whole)
    target = load_target(tmp_path / "hf", "float32")
    seen = plain_logits(target, IDS)
    assert off(seen, plain_logits(target_of(text), IDS)) == 0.0
    assert off(seen, mlx_lm_logits(tmp_path / "hf")) <= 1e-4
    converted = convert(tmp_path / "hf", tmp_path / "mlx", None)
    assert off(plain_logits(load_target(converted, "float32"), IDS), seen) == 0.0


@pytest.mark.parametrize(("variant", "whole"), [c for c in CASES if c[0] != "gemma4_untied"])
def test_quantized_mlx_checkpoints_equal_mlx_lm(tmp_path: Path, variant: str, whole: bool) -> None:
    write_hf(tmp_path / "hf", variant, whole=whole)
    folder = convert(tmp_path / "hf", tmp_path / "mlx", 4)
    expected = mlx_lm_logits(folder)
    assert off(expected, mlx_lm_logits(tmp_path / "hf")) > 0.01
    kept = load_target_as(folder, Precision(mx.float32, True))
    assert off(plain_logits(kept, IDS), expected) <= 1e-4
    assert off(plain_logits(load_target(folder, "float32"), IDS), expected) <= 1e-4
    if variant == "gemma4_moe":
        layer = kept.model.layers[0]
        assert (layer.router.proj.bits, layer.experts.switch_glu.up_proj.bits) == (8, 4)


def test_mlx_checkpoints_that_kept_the_other_modalities_load(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "gemma4", whole=True)
    folder = convert(tmp_path / "hf", tmp_path / "mlx", None)
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))
    assert "language_model.model.norm.weight" in weights
    before = plain_logits(load_target(folder, "float32"), IDS)
    weights |= {"vision_tower.x.weight": mx.ones(2), "embed_audio.y.scales": mx.ones(2)}
    (folder / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert off(plain_logits(load_target(folder, "float32"), IDS), before) == 0.0


@pytest.mark.parametrize(("kind", "others"), [("gemma4", 50), ("gemma4_unified", 5)])
def test_a_whole_model_of_transformers_leaves_the_text_models_names(kind: str, others: int) -> None:
    stored = json.loads((Path(__file__).parent / "goldens/gemma4/multimodal.json").read_text())
    config, names = stored[kind]["config"], stored[kind]["names"]
    weights = {name: mx.zeros((2, 2, 2)) for name in names}
    family_of(config).remap_hf(weights, config)
    parameters = tree_flatten(build_target(config).parameters())
    assert sorted(weights) == sorted(name for name, _ in parameters)
    assert (
        len([n for n in names if not n.startswith(("model.language_model.", "lm_head"))]) > others
    )


def test_projections_that_borrowing_layers_do_not_use_are_dropped(tmp_path: Path) -> None:
    text = wide_config("gemma4_shared")
    weights = gemma_weights(text)
    for part in ("k_proj", "v_proj", "k_norm"):
        own = weights.get(f"model.layers.2.self_attn.{part}.weight")
        weights[f"model.layers.4.self_attn.{part}.weight"] = np.full_like(own, 7.0)
    write_folder(tmp_path / "m", text, weights)
    target = load_target(tmp_path / "m", "float32")
    assert off(plain_logits(target, IDS), plain_logits(target_of(text), IDS)) == 0.0


def test_an_unknown_tensor_of_the_text_model_is_named(tmp_path: Path) -> None:
    text = wide_config("gemma4")
    weights = {**multimodal_weights(text), "model.language_model.layers.0.extra.weight": np.ones(2)}
    write_folder(tmp_path / "m", multimodal(text), weights)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.extra\.weight, which"):
        load_target(tmp_path / "m")


class Stand:
    """A target as a drafter sees it, with tables of its own."""

    dtype = mx.float32

    def __init__(self, scale: float, cap: float | None = None) -> None:
        table = gemma_weights(gemma_config())["model.embed_tokens.weight"]
        self.num_layers, self.hidden_size, self.vocab_size, self.context_length = 4, 48, 96, 2048
        self._table, self._scale, self._cap = mx.array(table), scale, cap

    def embed(self, ids: mx.array) -> mx.array:
        return self._table[ids] * self._scale

    def head(self, rows: mx.array) -> mx.array:
        logits = rows @ self._table.T
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap


def write_gemma_drafter(folder: Path) -> Path:
    """As Gemma's drafters are: sliding layers, the target's soft-cap on the draft logits."""
    dflash = {
        "target_layer_ids": [0, 1, 3],
        "mask_token_id": 5,
        "block_size": 5,
        "final_logit_softcapping": 6.0,
    }
    config = drafter_config(
        "mixed", hidden_size=48, vocab_size=96, num_target_layers=4, dflash_config=dflash
    )
    return write_drafter(folder, config)


def test_a_drafter_embeds_with_the_scale_and_caps_its_logits_once(tmp_path: Path) -> None:
    target, folder = tiny_target("gemma4"), write_gemma_drafter(tmp_path / "d")
    segment = Segment(mx.array(IDS), target.make_cache())
    logits = []
    for seen in (target, Stand(48**0.5), Stand(1.0), Stand(48**0.5, cap=6.0)):
        drafter = open_drafter(folder, seen, dtype=mx.float32)
        _, features = target.forward([segment], drafter.taps)
        cache = drafter.make_cache()
        drafter.observe(features, cache)
        logits.append(np.array(drafter.draft_logits(mx.array([7]), 4, cache)))
    assert off(logits[0], logits[1]) <= 1e-5
    assert min(off(logits[0], logits[2]), off(logits[0], logits[3])) > 0.1


@pytest.mark.parametrize("variant", ["gemma4", "gemma4_moe"])
def test_a_drafter_drafts_and_the_text_is_the_targets(tmp_path: Path, variant: str) -> None:
    target, prompt = tiny_target(variant), tiny_prompt(96, 21)
    truth = plain_greedy(target, prompt, 24)
    drafter = open_drafter(write_gemma_drafter(tmp_path / "d"), target, dtype=mx.float32)
    stats = GenerationStats()
    session = Session(target, drafter, nullcontext, prefill_chunk=16)
    steps = session.run(prompt, SamplingParams(), 24, (), stats)
    assert [token for step in steps for token in step] == truth
    assert stats.cycles > 0
    assert stats.drafted >= 4 * (stats.cycles - 4)
    assert not [warning for warning in stats.warnings if "NaN" in warning]


@pytest.mark.parametrize("variant", ["gemma4", "gemma4_shared", "gemma4_moe"])
def test_bfloat16_stays_bfloat16_and_near(tmp_path: Path, variant: str) -> None:
    write_hf(tmp_path / "m", variant, whole=False)
    rough = load_target(tmp_path / "m", "bfloat16")
    hidden, features = rough.forward([Segment(mx.array(IDS), rough.make_cache())], [0, 3])
    logits = rough.logits(hidden)
    kinds = {array.dtype for array in (hidden, features, logits, rough.embed(mx.array(IDS)))}
    assert kinds == {rough.dtype} == {mx.bfloat16}
    if variant == "gemma4_moe" and not mx.metal.is_available():
        return  # MLX multiplies gathered experts in float32 only on the CPU
    wanted = plain_logits(load_target(tmp_path / "m", "float32"), IDS)
    seen = np.array(logits[0].astype(mx.float32))
    assert np.abs(seen - wanted).mean() < 0.1 * wanted.std()
