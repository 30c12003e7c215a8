"""Planned bytes against bytes really allocated, published sizes, and what is advised."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import WIDE, write_folder
from gguf import GGMLQuantizationType
from gguf_files import tiny_gguf
from mlx.utils import tree_flatten
from tiny import target_of, tiny_config
from tiny_drafter import BorrowedTarget, drafter_config, write_drafter

from dflash_mlx import hub
from dflash_mlx.cache import context as context_cache
from dflash_mlx.cache import kv
from dflash_mlx.decode import session
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import CheckpointError, SourceError
from dflash_mlx.models import build_target
from dflash_mlx.plan import Memory, find_model, mac_memory, memory, part_bytes, plan, target_bytes
from dflash_mlx.plan.shape import read_draft_shape, read_shape
from dflash_mlx.registry import find, load_registry
from dflash_mlx.segment import Segment

CPU = Memory(10**12, 10**12, False, "a test")
FAMILIES = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gemma4",
]
#: positions around the sizes at which buffers grow
CONTEXTS = [1, 30, 257, 600, 1100]
BLOCK = 7


def arrays(module: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(module.parameters())  # type: ignore[return-value]


def allocated(config: dict[str, Any], context: int) -> tuple[int, Any]:
    """The most bytes of a real target's caches, of a prompt and a block that fill `context`."""
    target = target_of(config)
    cache = target.make_cache()
    left, held = context - min(BLOCK, context), 0
    while left:
        rows = min(left, session.PREFILL_CHUNK)
        hidden, _ = target.forward([Segment(mx.zeros(rows, mx.int32), cache)])
        cache.commit(rows)
        mx.eval(hidden, cache.arrays())
        held = max(held, cache.nbytes)
        left -= rows
    ids = mx.zeros(min(BLOCK, context), mx.int32)
    hidden, features = target.forward([Segment(ids, cache)], [0, 1])
    mx.eval(hidden, features, cache.arrays())
    return max(held, cache.nbytes), features


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_exactly(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    wanted = sum(array.size for _, array in arrays(target_of(config)))
    assert read_shape(config).parameters == wanted


def test_biases_and_wrapped_configs_are_counted() -> None:
    config = tiny_config("llama", attention_bias=True, mlp_bias=True)
    wanted = sum(array.size for _, array in arrays(target_of(config)))
    assert read_shape(config).parameters == wanted
    text = tiny_config("qwen3_5")
    wrapped = {"model_type": "qwen3_5", "text_config": text}
    assert read_shape(wrapped) == read_shape(text)


@pytest.mark.parametrize(
    ("family", "window"), [("llama", 0), ("gpt_oss", 7), ("gpt_oss", 700), ("qwen3_5", 0)]
)
@pytest.mark.parametrize("context", CONTEXTS)
def test_caches_take_the_bytes_planned(family: str, window: int, context: int) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    config = tiny_config(family, num_hidden_layers=2, **(kinds if window else {}))
    held, features = allocated(config, context)
    parts = memory.cache_bytes(read_shape(config), context, min(BLOCK, context), 4)
    assert sum(parts.values()) == held
    assert features.nbytes == features.shape[1] * 2 * config["hidden_size"] * 4


@pytest.mark.parametrize("variant", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("window", [6, 300, 700])
@pytest.mark.parametrize("context", [*CONTEXTS, 2500])
def test_a_drafter_takes_the_bytes_planned(
    tmp_path: Path, variant: str, window: int, context: int
) -> None:
    config = drafter_config(variant)
    if "sliding_window" in config:
        config["sliding_window"] = window
    drafter = open_drafter(
        write_drafter(tmp_path / "drafter", config), BorrowedTarget(), dtype=mx.float32
    )
    shape = read_draft_shape(config, 3, config["vocab_size"])
    assert shape.parameters == sum(array.size for _, array in arrays(drafter.model))
    cache, left, block, held = drafter.make_cache(), context, drafter.block_size, 0
    while left > block:
        rows = min(left - block, session.PREFILL_CHUNK)
        drafter.observe(mx.zeros((1, rows, 3 * config["hidden_size"])), cache)
        held = max(held, cache.nbytes)
        left -= rows
    mx.eval(drafter.propose(mx.array([1]), block - 1, None, cache).tokens, cache.arrays())
    if context > block:
        held = max(held, cache.nbytes)
        assert memory.draft_cache_bytes(shape, context, block, 4) == held


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_take_the_bytes_planned(bits: int) -> None:
    config = tiny_config("llama", **WIDE)
    target = target_of(config)
    target.apply(lambda array: array.astype(mx.bfloat16))
    nn.quantize(target, group_size=64, bits=bits)
    held = sum(array.nbytes for _, array in arrays(target))
    shape = read_shape(config)
    asked = memory.precision(shape, metal=True, bits=bits, quantization=None)
    stored = memory.precision(
        shape, metal=True, bits=None, quantization={"group_size": 64, "bits": bits}
    )
    assert asked.weight_bytes(shape) == pytest.approx(held, rel=0.05)
    assert stored.weight_bytes(shape) == pytest.approx(held, rel=0.05)
    assert memory.precision(shape, metal=False, bits=bits, quantization=None).weight_bytes(
        shape
    ) == pytest.approx(4 * shape.parameters)


def test_growth_is_planned_with_the_caches_own_steps() -> None:
    assert memory.GROWTH_ROWS == kv.GROWTH_ROWS == context_cache.GROWTH_ROWS
    for name in ("REWIND_ROWS", "SPARE_ROWS", "SPARE_SHARE"):
        assert getattr(memory, name) == getattr(context_cache, name)
    assert memory.PREFILL_CHUNK == session.PREFILL_CHUNK


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Llama-3.1-8B-Instruct", 8.030),
        ("Qwen3-Coder-30B-A3B-Instruct", 30.532),
        ("Qwen3-Coder-Next", 79.674),
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
        ("MiniMax-M2.5", 228.69),
    ],
)
def test_registry_models_have_their_published_size(name: str, billions: float) -> None:
    assert find_model(name).target.parameters / 1e9 == pytest.approx(billions, rel=2e-4)


def test_conversions_have_their_published_size() -> None:
    """Sizes on disk as their cards state them; text models without vision parts."""
    mac = mac_memory(512)
    for name, gigabytes in [
        ("mlx-community/Qwen3.5-122B-A10B-8bit", 130),
        ("mlx-community/Qwen3.5-397B-A17B-4bit", 223),
    ]:
        target = part_bytes(find_model(name), mac, 1024, None)["target"]
        assert target / 1e9 == pytest.approx(gigabytes, rel=0.01)
    drafter = part_bytes(find_model("Qwen3.8-27B"), mac, 1024, None)["drafter"]
    assert drafter / 1e9 == pytest.approx(3.85, rel=0.001)


def test_sizes_of_a_pair_at_16_8_and_4_bits() -> None:
    pair = find("Qwen3-8B")
    assert pair is not None
    sizes = target_bytes(pair)
    assert sizes is not None
    assert [round(sizes[bits] / 1e9, 2) for bits in (16, 8, 4)] == [16.38, 8.70, 4.61]
    unknown = find("MiniMax-M2.7")
    assert unknown is not None
    assert target_bytes(unknown) is None


def test_every_pair_with_sizes_can_be_planned() -> None:
    for pair in load_registry().pairs:
        if pair.config is not None:
            fit = plan(find_model(pair.name), mac_memory(512), bits=4)
            assert fit.parts["target"] > 0
            assert fit.fits == (fit.largest_context is not None)


def test_advice_is_true() -> None:
    model, mac = find_model("Qwen3.5-27B"), mac_memory(36)
    fit = plan(model, mac)
    assert not fit.fits
    assert fit.largest_context is None
    told = " ".join(fit.advice)
    assert "Quantize the target to 5 bits: then it fits." in told
    assert plan(model, mac, bits=5).fits
    assert not plan(model, mac, bits=6).fits
    assert "mlx-community/Qwen3.5-27B-4bit is ready, with 4 bits." in told
    assert "A Mac with 96 GB" in told
    assert plan(model, mac_memory(96)).fits
    assert not plan(model, mac_memory(64)).fits


def test_a_drafter_of_unknown_size_is_not_counted_as_nothing(capsys) -> None:
    from dflash_mlx.cli import main

    model = find_model("gemma-4-12B-it")
    assert model.draft is None
    fit = plan(model, mac_memory(64))
    assert fit.unknown == ("drafter", "draft_cache")
    assert not fit.parts.keys() & {"drafter", "draft_cache"}
    assert "the total lacks its weights and context" in " ".join(model.remarks)
    with pytest.raises(SystemExit):
        main(["plan", "gemma-4-12B-it", "--memory", "64"])
    shown = capsys.readouterr().out
    lines = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    assert lines["draft cache"].strip() == "unknown"
    assert lines["total"].strip().endswith("GB, without the unknown")
    assert shown.endswith("It fits without the drafter; whether it fits with it is not known.\n")
    with pytest.raises(SystemExit):
        main(["plan", "gemma-4-12B-it", "--memory", "64", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["parts"]["drafter"] is None
    assert document["unknown_parts"] == ["drafter", "draft_cache"]
    assert plan(find_model("gemma-4-12B-it", drafted=False), mac_memory(64)).unknown == ()
    assert plan(find_model("Qwen3-8B"), mac_memory(64)).unknown == ()


def test_the_largest_context_is_where_it_stops_fitting() -> None:
    model, mac = find_model("Qwen3.5-27B"), mac_memory(36)
    fit = plan(model, mac, context=200_000, bits=4)
    assert not fit.fits
    assert fit.largest_context is not None
    assert f"Keep to a context of {fit.largest_context}" in " ".join(fit.advice)
    assert plan(model, mac, context=fit.largest_context, bits=4).fits
    assert not plan(model, mac, context=fit.largest_context + 256, bits=4).fits
    assert plan(model, mac_memory(512)).largest_context == 262_144
    assert "made for 262144 positions" in plan(model, mac_memory(512), context=300_000).advice[0]


def test_without_the_drafter_it_may_fit() -> None:
    mac = mac_memory(24)
    assert any("--no-draft" in line for line in plan(find_model("Qwen3-8B"), mac, 2048).advice)
    alone = find_model("Qwen3-8B", drafted=False)
    assert plan(alone, mac, 2048).fits
    assert alone.draft is alone.drafter is None


def test_a_folder_a_config_and_a_gguf_file(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=300, **WIDE)
    folder = write_folder(tmp_path / "Tiny", config)
    by_folder, by_file = find_model(str(folder)), find_model(str(folder / "config.json"))
    assert by_folder.target == by_file.target == read_shape(config)
    assert by_folder.context == 2048
    assert "No drafter is known" in by_folder.remarks[0]
    kinds = {"blk.0.ffn_up.weight": GGMLQuantizationType.Q8_0}
    file = find_model(str(tiny_gguf(tmp_path / "m.gguf", kinds=kinds)))
    assert file.target.context == 512
    assert file.quantization is not None
    own = dict(file.quantization)
    assert (own.pop("group_size"), own.pop("bits")) == (32, 8)
    assert set(own) == file.target.modules.keys() - {"model.layers.0.mlp.up_proj"}
    assert set(own.values()) == {False}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no JSON object"),
        ('{"model_type": "mamba"}', "sizes of the model_type 'mamba' are not known"),
        ('{"model_type": "llama"}', "hidden_size is None"),
        ('{"model_type": "llama", "hidden_size": true}', "hidden_size is True"),
    ],
)
def test_bad_configs(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((SourceError, CheckpointError), match=message):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/Qwen3-8B-ft", "Nothing is known .* Did you mean Qwen3-8B"),
        ("Quen3-8B", "Did you mean Qwen3-8B"),
        ("MiniMax-M2.7", "sizes of MiniMax-M2.7 are not known yet"),
    ],
)
def test_what_is_not_known_is_not_guessed(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        find_model(name)


def test_a_whole_session_of_smollm2_takes_the_bytes_planned() -> None:
    """Its shape and its drafter; the weights are zeros, which are as large."""
    pair, context = find("SmolLM2-135M"), 12
    assert pair is not None
    assert pair.config is not None
    rest = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 1e5}
    sizes = {key: value for key, value in pair.config.items() if key != "quantization"}
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    target = build_target({**sizes, **rest})
    mx.eval(target.parameters())
    drafter = open_drafter(hub.fetch(pair.drafter).path, target, dtype=mx.float32)
    fit = plan(find_model(pair.name), CPU, context)
    held = mx.get_active_memory() - before
    assert fit.parts["target"] + fit.parts["drafter"] == pytest.approx(held, rel=0.001)
    made, stats = session.Session(target, drafter, nullcontext), GenerationStats()
    assert list(made.run([5, 6], SamplingParams(), 2, (), stats))
    caches = fit.parts["kv_cache"] + fit.parts["draft_cache"]
    assert caches == pytest.approx(made.nbytes, rel=0.05)
    assert stats.peak_memory_gb * 1e9 - before == pytest.approx(fit.total, rel=0.05)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from dflash_mlx.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", *arguments])
        return int(str(caught.value.code)), *capsys.readouterr()

    code, out, _ = run("Qwen3-8B", "--memory", "64", "--json")
    document = json.loads(out)
    assert (code, document["fits"], document["metal"]) == (0, True, True)
    assert document["total_bytes"] == sum(document["parts"].values()) <= document["limit_bytes"]
    assert document["limit_bytes"] == 48 * 2**30
    code, out, _ = run("Qwen3-8B", "--memory", "16", "--context", "4096")
    assert code == 1
    assert "It does not fit." in out
    assert "mlx-community/Qwen3-8B-4bit is ready" in out
    assert run("Qwen3-8B", "--memory", "16", "--bits", "4", "--no-draft")[0] == 0
    code, _, err = run("Qwen3-8B", "--bits", "7")
    assert code == 2
    assert "--bits is 7. Give one of 16, 8" in err
    assert run("nothing/here")[0] == 2
