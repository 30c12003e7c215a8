"""GGUF files: container, config and weights, held to the gguf package's reader and to mx.load."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files as tiny
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import tiny_gguf

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf import open_gguf
from dflash_mlx.gguf.file import RawTensor, read_gguf
from dflash_mlx.gguf.quants import to_dense
from dflash_mlx.gguf.vocabulary import read_vocabulary

K = GGMLQuantizationType
NATIVE = {K.Q4_0: 4, K.Q4_1: 4, K.Q8_0: 8}
DOWN = "blk.1.ffn_down.weight"  # rows of INNER values
HF_DOWN = "model.layers.1.mlp.down_proj"


def test_the_container_is_what_the_package_reads(tmp_path: Path) -> None:
    fields = {"general.note": "é\n", "general.flag": True, "general.count": 7}
    fields |= {"general.list": [1, -2], "general.names": ["a", "", "b c"], "general.number": 0.1}
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer=fields, kinds={DOWN: K.Q8_0})
    ours, theirs = read_gguf(path), GGUFReader(path)
    named = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == named
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert mine.rows.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_config(tmp_path: Path, arch: str, tied: bool) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch, tied=tied)
    assert open_gguf(path).config() == {
        "model_type": arch,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "eos_token_id": [tiny.EOS, tiny.TURN],
    }


def test_config_with_its_own_head_size_and_rope_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 12, dtype=np.float32)
    changes = {"attention__key_length": 24, "attention__value_length": 24}
    path = tiny_gguf(tmp_path / "m.gguf", head=24, extra={"rope_freqs.weight": factors}, **changes)
    model = open_gguf(path)
    assert model.config()["head_dim"] == 24
    assert model.config()["rope_freq_factors"] == factors.tolist()
    assert "rope_freqs.weight" not in model.weights(False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "none"}, None),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 2.0,
                "rope__scaling__original_context_length": 256,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: Any) -> None:
    assert open_gguf(tiny_gguf(tmp_path / "m.gguf", **changes)).config()["rope_scaling"] == expected


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_as_they_were_converted(tmp_path: Path, arch: str, tied: bool) -> None:
    expected = tiny.tiny_weights(arch, tied=tied)
    weights = open_gguf(tiny_gguf(tmp_path / "m.gguf", arch, tied=tied)).weights(False)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.array(weights[name]), value), name


def test_interleaving_turns_half_rotation_into_pair_rotation() -> None:
    """Why the rows are reordered: rotating pairs of interleaved rows is rotating halves."""
    x, head = np.random.default_rng(0).normal(size=16), 16
    angle = np.arange(1, 9) * 0.3
    halves = np.concatenate(
        [
            x[:8] * np.cos(angle) - x[8:] * np.sin(angle),
            x[8:] * np.cos(angle) + x[:8] * np.sin(angle),
        ]
    )
    pairs = tiny.interleave(x[:, None], 1)[:, 0].reshape(8, 2)
    turned = np.stack(
        [
            pairs[:, 0] * np.cos(angle) - pairs[:, 1] * np.sin(angle),
            pairs[:, 1] * np.cos(angle) + pairs[:, 0] * np.sin(angle),
        ],
        axis=1,
    )
    assert np.allclose(tiny.interleave(halves[:, None], 1)[:, 0], turned.reshape(head))


@pytest.mark.parametrize("kind", [K.F16, K.BF16, K.Q4_0, K.Q4_1, K.Q8_0])
def test_types_against_mlx(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    names = ["token_embd.weight", "blk.0.attn_q.weight", DOWN]
    path = tiny_gguf(tmp_path / "m.gguf", kinds=dict.fromkeys(names, kind))
    model, reference = open_gguf(path), mx.load(str(path))
    assert isinstance(reference, dict)
    dense, kept = model.weights(False), model.weights(True, mx.float16)
    for name in names:
        hf = model.hf_name(name).removesuffix(".weight")
        order = mx.arange(64)
        if "attn_q" in name:  # from pairs back to halves, head by head of 16 rows
            order = order.reshape(4, 8, 2).swapaxes(1, 2).flatten()
        stem = name.removesuffix(".weight")
        parts = ["weight", "scales", "biases"] if kind in NATIVE else ["weight"]
        theirs = [reference[f"{stem}.{part}"] for part in parts]
        if "attn_q" in name:
            theirs = [part[order] for part in theirs]
        if kind in NATIVE:
            for part, array in zip(parts, theirs, strict=True):
                assert mx.array_equal(kept[f"{hf}.{part}"], array).item(), (name, part)
            floats = [array.astype(mx.float32) for array in theirs[1:]]
            plain = mx.dequantize(theirs[0], *floats, group_size=32, bits=NATIVE[kind])
            assert model.quantization()[hf] == {"group_size": 32, "bits": NATIVE[kind]}
        else:
            plain = theirs[0].astype(mx.float32)
            assert hf not in model.quantization()
        tolerance = 1e-3 if kind == K.BF16 else 0.0  # mx.load narrows bfloat16 to float16
        assert mx.allclose(dense[f"{hf}.weight"], plain, rtol=tolerance, atol=1e-6).item(), name
    assert mx.std(dense[f"{HF_DOWN}.weight"]).item() > 0.5


@pytest.mark.parametrize("kind", sorted(quants._type_traits))
def test_every_type_of_the_package_is_dequantized(kind: GGMLQuantizationType) -> None:
    """Whatever the package can dequantize we can, in the order of rows asked for."""
    values, size = GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(7).integers(0, 256, (4, 2 * size), dtype=np.uint8)
    tensor = RawTensor("t", kind, (4, 2 * values), rows)
    order = np.array([2, 0, 3, 1])
    with np.errstate(all="ignore"):  # random bytes make infinite scales, too
        ours = np.array(to_dense(tensor, mx.float32, order))
        theirs = quants.dequantize(rows, kind)[order]
    assert ours.shape == (4, 2 * values)
    assert np.array_equal(ours, theirs.astype(np.float32), equal_nan=True)
    assert np.isfinite(ours).any()


@pytest.mark.parametrize("kind", [K.Q5_0, K.Q5_1, K.Q4_K, K.Q6_K])
def test_other_types_are_dequantized(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    wide = {"feed_forward_length": 256}
    rng = np.random.default_rng(3)
    weights = {
        f"blk.{i}.{name}.weight": rng.normal(size=shape).astype(np.float32)
        for i in range(2)
        for name, shape in {
            "ffn_gate": (256, 64),
            "ffn_up": (256, 64),
            "ffn_down": (64, 256),
        }.items()
    }
    path = tiny_gguf(tmp_path / "m.gguf", kinds={DOWN: kind}, extra=weights, **wide)
    model = open_gguf(path)
    assert model.quantization() == {}
    ours = model.weights(True)[f"{HF_DOWN}.weight"]
    if kind == K.Q4_K:  # mx.load misreads the packed scales of the upper four groups
        blocks = tiny.encode(weights[DOWN], kind)
        expected, tolerance = mx.array(np.stack([q4_k(row) for row in blocks])), 1e-6
    elif kind == K.Q6_K:
        reference = mx.load(str(path))
        assert isinstance(reference, dict)
        expected, tolerance = reference[DOWN].astype(mx.float32), 2e-3
    else:  # mx.load cannot; a few bits of the original remain
        expected, tolerance = mx.array(weights[DOWN]), 0.15
    assert mx.abs(ours - expected).max().item() < tolerance * mx.abs(expected).max().item()


def q4_k(block: np.ndarray) -> np.ndarray:
    """One Q4_K block of 144 bytes, value by value: d, dmin, 8 packed scales and minima, nibbles."""
    d, dmin = (float(x) for x in block[:4].copy().view(np.float16))
    packed, nibbles = [int(x) for x in block[4:16]], [int(x) for x in block[16:]]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            byte = nibbles[group // 2 * 32 + i]
            q = byte >> 4 if group % 2 else byte & 15
            values.append(d * scale * q - dmin * minimum)
    return np.array(values, np.float32)


def test_dtype_is_the_callers(tmp_path: Path) -> None:
    model = open_gguf(tiny_gguf(tmp_path / "m.gguf", kinds={DOWN: K.Q4_0}))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        kinds = {k: v.dtype for k, v in model.weights(True, dtype).items()}
        assert kinds.pop(f"{HF_DOWN}.weight") == mx.uint32
        assert set(kinds.values()) == {dtype}


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3', which is not supported from GGUF. Supported are"),
        ("llama", {"block_count": None}, "lacks the metadata llama.block_count"),
        ("llama", {"block_count": 0}, "has llama.block_count = 0, not one count"),
        ("llama", {"attention__head_count": [4, 4]}, r"llama.attention.head_count = \[4, 4\]"),
        ("llama", {"block_count": 3}, "lacks the tensors blk.2.attn_norm.weight, .* and 4 more"),
        ("llama", {"block_count": 1}, "tensors that are not understood: blk.1"),
        ("llama", {"drop": "blk.1.attn_k.weight"}, "lacks the tensors blk.1.attn_k.weight"),
        ("llama", {"drop": "token_embd.weight"}, "lacks the tensors token_embd.weight"),
        ("llama", {"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "blk.0.attn_q.bias"),
        ("llama", {"expert_count": 8}, "metadata that is not understood: llama.expert_count = 8"),
        ("llama", {"rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ("llama", {"rope__dimension_count": 8}, "rope.dimension_count other than"),
        ("llama", {"feed_forward_length": 128}, r"ffn_gate.weight of shape \(96, 64\) .* \(128,"),
        ("qwen3", {"drop": "blk.0.attn_q_norm.weight"}, "lacks .*blk.0.attn_q_norm.weight"),
    ],
)
def test_what_is_not_understood_is_named(
    tmp_path: Path, arch: str, changes: dict[str, Any], message: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_zero_experts_are_no_experts(tmp_path: Path) -> None:
    open_gguf(tiny_gguf(tmp_path / "m.gguf", expert_count=0))


def patched(path: Path, at: int, code: str, value: int) -> Path:
    content = bytearray(path.read_bytes())
    struct.pack_into(code, content, at, value)
    path.write_bytes(content)
    return path


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    header = content.index(b"token_embd.weight")
    cuts = [*range(4, 1200, 7), header, header + 40, len(content) // 2, len(content) - 40]
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"is truncated: .* Download it again\."):
            read_gguf(path)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"PK\3\4" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a GGUF file"):
            read_gguf(path)
    for version, shown in ((1, "0x1"), (0x03000000, "0x3000000")):
        with pytest.raises(CheckpointError, match=f"GGUF version {shown}, and only little-endian"):
            read_gguf(patched(tiny_gguf(path), 4, "<I", version))
    tiny_gguf(path)
    name = path.read_bytes().index(b"token_embd.weight") + len("token_embd.weight")
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' has the unknown GGML type 99"):
        read_gguf(patched(path, name + 20, "<I", 99))
    with pytest.raises(CheckpointError, match=r"damaged: .*'token_embd.weight' has 9 dimensions"):
        read_gguf(patched(tiny_gguf(path), name, "<I", 9))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("split.count", ["x", [3], 1.5]),
        ("tokenizer.chat_template", [["x"], 3]),
        ("tokenizer.ggml.pre", [["x"], 3]),
        ("tokenizer.ggml.tokens", ["x", [1, 2], 3]),
        ("tokenizer.ggml.merges", ["x", [1, 2]]),
        ("tokenizer.ggml.token_type", [1, "x", ["x"], [1.5]]),
        ("tokenizer.ggml.bos_token_id", ["x", [1], 1.5, True]),
        ("tokenizer.ggml.eos_token_id", ["x", [1], 1.5, True]),
        ("tokenizer.ggml.eot_token_id", ["x", [1], 1.5, True]),
    ],
)
def test_metadata_of_another_type(tmp_path: Path, key: str, values: list[Any]) -> None:
    for value in values:
        path = tiny_gguf(tmp_path / "m.gguf", tokenizer=tiny.tokenizer_fields() | {key: value})
        with pytest.raises(CheckpointError, match=rf"m\.gguf .*{key.rpartition('.')[2]}|pre-token"):
            read_vocabulary(open_gguf(path).file)


def test_nested_arrays(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    nested = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    key = struct.pack("<Q1sI", 1, b"k", 9)
    (count,) = struct.unpack_from("<Q", content, 16)
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + key + nested + content[24:])
    with pytest.raises(CheckpointError, match="arrays are nested deeper than 8"):
        read_gguf(path)


def test_parts_of_a_split_file(tmp_path: Path) -> None:
    message = "one part of a GGUF split into 3. Join the parts with"
    with pytest.raises(CheckpointError, match=message):
        open_gguf(tiny_gguf(tmp_path / "m-00001-of-00003.gguf"))
    with pytest.raises(CheckpointError, match=message):
        open_gguf(
            tiny_gguf(tmp_path / "m.gguf", tokenizer={"split.count": 3, **tiny.tokenizer_fields()})
        )


def test_types_that_cannot_be_dequantized(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    name = path.read_bytes().index(b"output_norm.weight") + len("output_norm.weight")
    model = open_gguf(patched(path, name + 12, "<I", K.I32))  # as wide as float32
    with pytest.raises(CheckpointError, match=re.escape("'output_norm.weight' has the GGUF type")):
        model.weights(False)


@pytest.mark.smollm2
def test_smollm2_against_mlx(smollm2_gguf: Path) -> None:
    names = ("token_embd", "blk.0.attn_v", "blk.0.attn_q", "blk.29.ffn_down", "output_norm")
    model, reference = open_gguf(smollm2_gguf), mx.load(str(smollm2_gguf))
    assert isinstance(reference, dict)
    few = {f"{name}.weight": model.file.tensors[f"{name}.weight"] for name in names}
    table = few["token_embd.weight"]
    few["token_embd.weight"] = replace(table, shape=(500, 576), rows=table.rows[:500])
    config = model._config  # of all layers, for which the few tensors have no room
    model = replace(model, file=replace(model.file, tensors=few))  # all of it takes seconds
    vars(model)["_config"] = config
    kept, dense, groups = (
        model.weights(True, mx.float16),
        model.weights(False),
        model.quantization(),
    )
    for name in names:
        hf = model.hf_name(f"{name}.weight").removesuffix(".weight")
        if hf not in groups:
            assert mx.array_equal(dense[f"{hf}.weight"], reference[f"{name}.weight"]).item()
            continue
        triple = [reference[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
        if "attn_q" in name:
            order = mx.arange(576).reshape(9, 32, 2).swapaxes(1, 2).flatten()
            triple = [part[order] for part in triple]
        triple = [part[:500] for part in triple] if name == "token_embd" else triple
        for part, array in zip(("weight", "scales", "biases"), triple, strict=True):
            assert mx.array_equal(kept[f"{hf}.{part}"], array).item(), (name, part)
        floats = [part.astype(mx.float32) for part in triple[1:]]
        plain = mx.dequantize(triple[0], *floats, **groups[hf])
        assert mx.allclose(dense[f"{hf}.weight"], plain, rtol=0, atol=1e-6).item(), name
