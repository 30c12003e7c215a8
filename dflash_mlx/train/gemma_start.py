"""A Gemma 4 layer's weights said as those of a drafter's layer: each part by what it does.

Gemma norms what a branch adds, its values and its queries without a scale, and has gelu for silu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.draft.config import DFlashConfig

#: gelu(x) is nearly silu(a · x) / a for this a
_GELU_SLOPE = 1.702
#: random rows that tell how large what a branch adds is before its norm
_PROBES = 128

Dense = Callable[[nn.Module], mx.array | None]


def is_gemma(layer: nn.Module) -> bool:
    """Whether it is a layer of Gemma 4, with a norm at either end of both branches."""
    return "pre_feedforward_layernorm" in layer


def gemma_parts(
    layer: Any, config: DFlashConfig, stream: float, dense: Dense
) -> dict[str, mx.array]:
    """float32 weights by their names in a drafter's layer.

    stream: what the layers before have multiplied the residual stream by, which a drafter does
    not. The norms behind the branches become factors of o_proj and down_proj: their weights over
    the size that a branch has on random rows. What has no counterpart (routed experts, borrowed
    keys, heads of other sizes than the drafter's) is left out.
    """
    before, between = _norm(layer.input_layernorm), _norm(layer.pre_feedforward_layernorm)
    parts = {"input_layernorm": before, "post_attention_layernorm": between}
    probes = np.random.default_rng(0).normal(size=(_PROBES, config.hidden_size))
    probes /= np.sqrt((probes**2).mean(axis=1, keepdims=True))
    parts |= _attention(layer, config, probes * before, stream, dense)
    weights = {name: _array(getattr(layer.mlp, name), dense) for name in _MLP}
    added = layer.mlp(mx.array(probes * between, layer.input_layernorm.weight.dtype))
    behind = _norm(layer.post_feedforward_layernorm)
    if "post_feedforward_layernorm_1" in layer:  # beside routed experts
        own, routed = (_norm(layer[f"post_feedforward_layernorm_{branch}"]) for branch in (1, 2))
        behind = behind * own / np.sqrt((own**2 + routed**2).mean())
    gain = behind / (stream * _size(added) * _GELU_SLOPE)
    parts |= {
        "mlp.gate_proj": weights["gate_proj"] * _GELU_SLOPE,
        "mlp.up_proj": weights["up_proj"],
        "mlp.down_proj": weights["down_proj"] * gain[:, None],
    }
    return {name: mx.array(value.astype(np.float32)) for name, value in parts.items()}


_MLP = ("gate_proj", "up_proj", "down_proj")


def _attention(
    layer: Any, config: DFlashConfig, rows: np.ndarray, stream: float, dense: Dense
) -> dict[str, np.ndarray]:
    """`rows` [N, H] as they come out of the layer's first norm."""
    attention = layer.self_attn
    sizes = (attention.heads, attention.kv_heads, attention.head_dim)
    ours = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    if sizes != ours or attention.borrows:
        return {}
    heads, kv_heads, dim = sizes
    values = _array(attention.v_proj if "v_proj" in attention else attention.k_proj, dense)
    # The norm of the values has no weights: they become as large as it makes them.
    made = (rows @ values.T).reshape(_PROBES, kv_heads, dim)
    values = values / np.repeat(np.sqrt((made**2).mean(axis=(0, 2))), dim)[:, None]
    made = made / np.sqrt((made**2).mean(axis=-1, keepdims=True))
    seen = np.repeat(made, heads // kv_heads, axis=1).reshape(_PROBES, heads * dim)
    output = _array(attention.o_proj, dense)
    gain = _norm(layer.post_attention_layernorm) / (stream * _size(seen @ output.T))
    return {
        "self_attn.q_proj": _array(attention.q_proj, dense),
        "self_attn.k_proj": _array(attention.k_proj, dense),
        "self_attn.v_proj": values,
        "self_attn.o_proj": output * gain[:, None],
        # Scores are not scaled there, and by 1/√D in the drafter.
        "self_attn.q_norm": _norm(attention.q_norm) * np.sqrt(dim),
        "self_attn.k_norm": _norm(attention.k_norm),
    }


def _norm(module: nn.Module) -> np.ndarray:
    return np.array(module["weight"].astype(mx.float32), np.float64)


def _array(module: nn.Module, dense: Dense) -> np.ndarray:
    weight = dense(module)
    assert weight is not None
    return np.array(weight, np.float64)


def _size(rows: mx.array | np.ndarray) -> float:
    """Root mean square."""
    values = np.array(rows.astype(mx.float32) if isinstance(rows, mx.array) else rows, np.float64)
    return float(np.sqrt((values**2).mean()))
