"""Tiny GGUF files for tests, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, VOCAB = 64, 96, 2, 300
HEADS, KV_HEADS = 4, 2


def byte_chars() -> list[str]:
    """The 256 characters that stand for bytes, in byte order, as GPT-2 defined them."""
    plain = {b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174}
    chars, extra = [], 256
    for byte in range(256):
        chars.append(chr(byte) if byte in plain else chr(extra))
        extra += byte not in plain
    return chars


# Every byte, then "in", " t" and "'s" by merges, then special tokens, then an unused id.
TOKENS = [*byte_chars(), "in", "Ġt", "'s", "<s>", "</s>", "<turn>", "<tool>", "[PAD263]"]
MERGES = ["i n", "Ġ t", "' s"]
KINDS = [
    *[TokenType.NORMAL] * 259,
    *[TokenType.CONTROL] * 3,
    TokenType.USER_DEFINED,
    TokenType.UNUSED,
]
BOS, EOS, TURN, TOOL, UNUSED = range(259, 264)


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` metadata of a byte-level BPE; a change to None leaves the key away."""
    fields = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": TOKENS,
        "token_type": [int(kind) for kind in KINDS],
        "merges": MERGES,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "eot_token_id": TURN,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def model_fields(arch: str, **changes: Any) -> dict[str, Any]:
    """`<arch>.*` metadata; dots of a key are written as double underscores."""
    fields = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **{k.replace("__", "."): v for k, v in changes.items()},
    }
    return {f"{arch}.{k}": v for k, v in fields.items() if v is not None}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """HF's q or k rows in llama.cpp's order: halves of a head become neighbours, row by row."""
    out = np.empty_like(rows)
    head = len(rows) // heads
    for h in range(heads):
        for j in range(head // 2):
            out[h * head + 2 * j] = rows[h * head + j]
            out[h * head + 2 * j + 1] = rows[h * head + head // 2 + j]
    return out


def tiny_weights(arch: str, head: int = HIDDEN // HEADS, tied: bool = False) -> dict[str, Any]:
    """Random HF-named float32 weights."""
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    if not tied:
        shapes["lm_head"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * head, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * head),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        if arch == "qwen3":
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


_RENAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """HF-named weights as llama.cpp's converter names and orders them."""
    out = {}
    for name, value in weights.items():
        if arch == "llama" and "q_proj" in name:
            value = interleave(value, HEADS)
        if arch == "llama" and "k_proj" in name:
            value = interleave(value, KV_HEADS)
        for old, new in _RENAMES.items():
            name = name.replace(old, new)
        out[name] = value
    return out


def encode(value: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The values in a GGUF type; random blocks of finite scale where the package only decodes."""
    try:
        return quantize(value, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(11)
        blocks = rng.integers(0, 256, (*value.shape[:-1], value.shape[-1] // block, size), np.uint8)
        half = np.array([0.01], np.float16).view(np.uint8)
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]  # float16 scales
        for place in places:
            blocks[..., place : place + 2] = half
        return blocks.reshape(*value.shape[:-1], -1)


def write_gguf(
    path: Path,
    arch: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file; tensors named in `kinds` in that type, the others as float32."""
    writer = GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, encode(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    head: int = HIDDEN // HEADS,
    tied: bool = False,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A complete random model with a byte-level tokenizer."""
    tensors = gguf_tensors(arch, tiny_weights(arch, head, tied))
    tensors |= extra or {}
    tensors.pop(drop, None)
    fields = model_fields(arch, **changes) | (tokenizer or tokenizer_fields())
    return write_gguf(path, arch, fields, tensors, kinds)
