"""Which tensors a GGUF architecture has: their names and shapes there, and what the model expects.

Orders are those of llama.cpp's converters, whose kernels want rows otherwise than Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

ROPE_FREQS = "rope_freqs.weight"
HYBRIDS = ("qwen35", "qwen35moe")

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}


@dataclass(frozen=True)
class Entry:
    """One tensor: the model's name for it, its shape in the file, and how it becomes the model's.

    rows, columns: the order in which to take the file's rows and the elements within a row.
    finish: what makes the model's array of the dense float32 values; such a tensor is no matrix.
    """

    name: str
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    finish: Callable[[mx.array], mx.array] | None = None


def tensor_table(architecture: str, config: Mapping[str, Any]) -> dict[str, Entry]:
    """Every tensor the architecture has at the sizes of an HF-style config, by GGUF name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table = {
        "token_embd.weight": Entry("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": Entry("model.norm.weight", (hidden,)),
        "output.weight": Entry("lm_head.weight", (vocab, hidden)),
    }
    for index in range(config["num_hidden_layers"]):
        layer = _norms(architecture, hidden)
        if architecture in HYBRIDS and config["layer_types"][index] == "linear_attention":
            layer |= _delta_net(config)
        else:
            layer |= _attention(architecture, config)
        layer |= _sparse_mlp(config) if config.get("num_experts") else _dense_mlp(config)
        for name, entry in layer.items():
            table[f"blk.{index}.{name}"] = Entry(
                f"model.layers.{index}.{entry.name}",
                entry.shape,
                entry.rows,
                entry.columns,
                entry.finish,
            )
    return table


def is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    """Blocks behind the model's layers predict several tokens at once, which is not used here."""
    layers, extra = config["num_hidden_layers"], config.get("mtp_num_hidden_layers", 0)
    return any(name.startswith(f"blk.{index}.") for index in range(layers, layers + extra))


def _norms(architecture: str, hidden: int) -> dict[str, Entry]:
    second = "post_attention_norm" if architecture in HYBRIDS else "ffn_norm"
    return {
        "attn_norm.weight": Entry("input_layernorm.weight", (hidden,)),
        f"{second}.weight": Entry("post_attention_layernorm.weight", (hidden,)),
    }


def _attention(architecture: str, config: Mapping[str, Any]) -> dict[str, Entry]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    gated = 2 if architecture in HYBRIDS else 1
    shapes = {
        "attn_q": (gated * heads * head, hidden),
        "attn_k": (kv_heads * head, hidden),
        "attn_v": (kv_heads * head, hidden),
        "attn_output": (hidden, heads * head),
    }
    orders = {}
    if architecture == "llama":
        orders = {"attn_q": _halves(heads, head), "attn_k": _halves(kv_heads, head)}
    entries = {
        f"{name}.weight": Entry(f"{_ATTENTION[name]}.weight", shape, orders.get(name))
        for name, shape in shapes.items()
    }
    if architecture != "llama":
        entries |= {
            f"attn_{name}.weight": Entry(f"self_attn.{name}.weight", (head,))
            for name in ("q_norm", "k_norm")
        }
    return entries


def _halves(heads: int, head: int) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs where HF rotates halves, so its converter interleaves
    the two halves of every head, for the llama architecture only."""
    return np.arange(heads * head).reshape(heads, head // 2, 2).swapaxes(1, 2).reshape(-1)


def _delta_net(config: Mapping[str, Any]) -> dict[str, Entry]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    dim, key_heads = config["linear_value_head_dim"], config["linear_num_key_heads"]
    keys, values = key_heads * config["linear_key_head_dim"], heads * dim
    by_head = _grouped(key_heads, heads, 1)
    by_value = _grouped(key_heads, heads, dim)
    mixed = np.concatenate([np.arange(2 * keys), 2 * keys + by_value])
    channels, taps = 2 * keys + values, config["linear_conv_kernel_dim"]

    def entry(name: str, *shape: int, **how: Any) -> Entry:
        return Entry(f"linear_attn.{name}", shape, **how)

    return {
        "attn_qkv.weight": entry("in_proj_qkv.weight", channels, hidden, rows=mixed),
        "attn_gate.weight": entry("in_proj_z.weight", values, hidden, rows=by_value),
        "ssm_beta.weight": entry("in_proj_b.weight", heads, hidden, rows=by_head),
        "ssm_alpha.weight": entry("in_proj_a.weight", heads, hidden, rows=by_head),
        "ssm_out.weight": entry("out_proj.weight", hidden, values, columns=by_value),
        "ssm_conv1d.weight": entry(
            "conv1d.weight", channels, taps, rows=mixed, finish=lambda a: a[..., None]
        ),
        "ssm_dt.bias": entry("dt_bias", heads, columns=by_head, finish=lambda a: a),
        # The file holds -exp(A_log).
        "ssm_a": entry("A_log", heads, columns=by_head, finish=lambda a: mx.log(-a)),
        "ssm_norm.weight": entry("norm.weight", dim),
    }


def _grouped(key_heads: int, value_heads: int, dim: int) -> np.ndarray:
    """Value heads beside those of the same key head, as HF has them.

    The file repeats all key heads in turn, so that a value head's key head is its index modulo
    their number.
    """
    served = value_heads // key_heads
    order = np.arange(value_heads * dim).reshape(served, key_heads, dim)
    return order.swapaxes(0, 1).reshape(-1)


def _dense_mlp(config: Mapping[str, Any]) -> dict[str, Entry]:
    return _gated("ffn_{}", "mlp", config["hidden_size"], config["intermediate_size"])


def _sparse_mlp(config: Mapping[str, Any]) -> dict[str, Entry]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    inner = config["moe_intermediate_size"]
    entries = _gated("ffn_{}_exps", "mlp.switch_mlp", hidden, inner, experts)
    entries["ffn_gate_inp.weight"] = Entry("mlp.gate.weight", (experts, hidden))
    if shared := config.get("shared_expert_intermediate_size"):
        entries |= _gated("ffn_{}_shexp", "mlp.shared_expert", hidden, shared)
        entries["ffn_gate_inp_shexp.weight"] = Entry(
            "mlp.shared_expert_gate.weight", (1, hidden), finish=lambda a: a.reshape(1, -1)
        )
    return entries


def _gated(pattern: str, name: str, hidden: int, inner: int, *stack: int) -> dict[str, Entry]:
    """gate, up and down of one MLP, or of a stack of them."""
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        f"{pattern.format(part)}.weight": Entry(f"{name}.{part}_proj.weight", (*stack, *shape))
        for part, shape in shapes.items()
    }
