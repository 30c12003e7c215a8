"""How large the parts of a model are, read from its config.json: counts, no arrays.

Follows the parameters of the families in models/ and of drafters in draft/; knows no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

_GATED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "muse_glimmer")  # an output gate as wide as q
_HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_EXPERTS_ALONE = ("gpt_oss", "minimax_m2")  # intermediate_size is an expert's
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma4")
_TIED_BY_DEFAULT = ("gemma4",)
_FAMILIES = ("llama", "qwen3", "qwen3_moe", *_HYBRID, "gpt_oss", "gemma4", "minimax_m2")
MODEL_TYPES = (*_FAMILIES, "muse_glimmer")
_PATTERNS = {"gemma4": 6, "gpt_oss": 2, "muse_glimmer": 4}  # one of so many layers sees everything

Counts = Counter[str]  # elements by kind: linear, experts, router, embedding, head, fixed


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its parameters, and what it keeps of a sequence."""

    weights: Counts
    query_width: int  # elements of all queries of one position
    heads: int
    active_width: int  # MLP elements computed for one position
    kv_width: int = 0  # elements of K and V of one position
    window: int | None = None  # positions a query sees, None: all
    state: int = 0  # float32 elements of a recurrent state
    channels: int = 0  # of the convolution's inputs
    conv_tail: int = 0  # rows of these inputs kept
    row: int = 0  # float32 elements a row not yet committed adds to the state's


@dataclass(frozen=True)
class Shape:
    """A target or, with `taps`, a drafter."""

    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    weights: Counts  # of the whole model
    context: int | None  # positions it was made for
    experts_mxfp4: bool = False  # the checkpoint's experts are published in MXFP4

    @property
    def parameters(self) -> int:
        return sum(self.weights.values())


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The target of a config.json, the text part of a multimodal one.

    CheckpointError for a model_type whose sizes are not known here and for a missing key.
    """
    inner = config.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise CheckpointError(
            f"The config's text_config is {inner!r:.80}, not an object; use a complete config.json."
        )
    text = _Config({**config, **inner})
    kind = text.model_type
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"The sizes of the model_type {kind!r} are not known; known are "
            f"{', '.join(MODEL_TYPES)}. Plan with a model of one of these."
        )
    hidden, vocab = text.size("hidden_size"), text.size("vocab_size")
    count = text.size("num_hidden_layers")
    shared = text.get("num_kv_shared_layers") or 0
    layers = tuple(_layer(text, index, shared=index >= count - shared) for index in range(count))
    weights = Counter(embedding=vocab * hidden, fixed=hidden)
    if not text.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT):
        weights["head"] = vocab * hidden
    for layer in layers:
        weights.update(layer.weights)
    limit = text.get("max_position_embeddings")
    return Shape(hidden, vocab, layers, weights, limit, experts_mxfp4=kind == "gpt_oss")


def read_draft_shape(
    draft: Mapping[str, Any], taps: int, vocab: int, tables: Sequence[str] = ()
) -> Shape:
    """A drafter with `taps` features, of the sizes of its own config.json or of [pair.draft].

    tables: which of embed_tokens and lm_head it does not borrow from the target.
    """
    config = _Config({**draft, "model_type": "qwen3"})
    hidden, count = config.size("hidden_size"), config.size("num_hidden_layers")
    kinds = config.get("layer_types") or []
    sliding = draft.get("num_sliding_layers", kinds.count("sliding_attention"))
    layers = []
    for index in range(count):
        weights, attention = _attention(config, full=True)
        weights.update(_mlp(config, "intermediate_size"), fixed=2 * hidden)
        if taps_of_conv := config.get("conv_kernel_size"):
            groups = hidden // config.size("conv_group_size")
            # Two convolutions a layer, each with an input and an output side.
            weights.update(fixed=4 * taps_of_conv * hidden + 4 * taps_of_conv * groups * hidden)
        window = config.size("sliding_window") if index < sliding else None
        inner = config.size("intermediate_size")
        layers.append(Layer(weights, **attention, active_width=inner, window=window))
    weights = Counter(linear=taps * hidden * hidden, fixed=2 * hidden)
    if rank := config.get("selector_rank"):
        weights.update(fixed=rank * hidden + 2 * vocab * rank)
    if "embed_tokens" in tables:
        weights["embedding"] = vocab * hidden
    if "lm_head" in tables:
        weights["head"] = (draft.get("draft_vocab_size") or vocab) * hidden
    for layer in layers:
        weights.update(layer.weights)
    return Shape(hidden, vocab, tuple(layers), weights, None)


class _Config:
    """A config whose sizes are whole numbers above zero."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        kind = str(values.get("model_type"))
        self.model_type = kind.removesuffix("_text").removesuffix("_unified")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"The config's {key} is {value!r}, not a whole number above zero; use a complete "
                "config.json."
            )
        return value


def _layer(config: _Config, index: int, *, shared: bool) -> Layer:
    """Layer `index`; a `shared` one uses the K and V of an earlier layer."""
    kind, hidden = config.model_type, config.size("hidden_size")
    where = _kind_of(config, index)
    if where == "linear_attention":
        weights, sequence = _delta_net(config)
    else:
        full = where == "full_attention"
        weights, sequence = _attention(config, full=full, shared=shared)
        if not full:
            sequence["window"] = config.size("sliding_window")
    mlp, active = _mlp_of(config, index)
    if shared and config.get("use_double_wide_mlp"):
        mlp["linear"], active = 2 * mlp["linear"], 2 * active
    weights.update(mlp)
    weights["fixed"] += (4 * hidden + 1) if kind == "gemma4" else 2 * hidden
    if kind == "muse_glimmer":
        weights["fixed"] += 2 * hidden
    return Layer(weights, **sequence, active_width=active)


def _kind_of(config: _Config, index: int) -> str:
    if kinds := config.get("layer_types"):
        return str(kinds[index])
    if config.model_type in _HYBRID:
        interval, other = config.size("full_attention_interval", 4), "linear_attention"
    elif config.model_type in _PATTERNS:
        usual = _PATTERNS[config.model_type]
        interval, other = config.size("sliding_window_pattern", usual), "sliding_attention"
    else:
        return "full_attention"
    return other if (index + 1) % interval else "full_attention"


def _attention(
    config: _Config, *, full: bool, shared: bool = False
) -> tuple[Counts, dict[str, int]]:
    """Parameters, and the sizes of Layer that depend on attention; `shared` has no K and V."""
    kind, hidden = config.model_type, config.size("hidden_size")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    dim = config.size("head_dim", hidden // heads)
    one_projection = False
    if kind == "gemma4" and full:
        dim = config.size("global_head_dim", dim)
        one_projection = bool(config.get("attention_k_eq_v"))
        if one_projection:
            kv_heads = config.size("num_global_key_value_heads", kv_heads)
    query, key = heads * dim, kv_heads * dim
    projections = 0 if shared else 1 if one_projection else 2
    inputs = query * (2 if kind in _GATED else 1) + key * projections
    weights = Counter(linear=hidden * (inputs + query))
    if config.get("attention_bias"):
        weights["fixed"] += inputs + hidden
    if kind in _QK_NORM:
        weights["fixed"] += dim if shared else 2 * dim
    if kind == "minimax_m2":
        weights["fixed"] += query + key
    if kind == "gpt_oss":
        weights["fixed"] += heads  # sinks
    kv_width = 0 if shared else 2 * key
    return weights, {"query_width": query, "heads": heads, "kv_width": kv_width}


def _delta_net(config: _Config) -> tuple[Counts, dict[str, int]]:
    hidden = config.size("hidden_size")
    value_heads, value_dim = (
        config.size("linear_num_value_heads"),
        config.size("linear_value_head_dim"),
    )
    key_dim = config.size("linear_key_head_dim")
    keys = config.size("linear_num_key_heads") * key_dim
    values, taps = value_heads * value_dim, config.size("linear_conv_kernel_dim", 4)
    channels = 2 * keys + values
    weights = Counter(
        linear=hidden * (channels + 2 * values + 2 * value_heads),
        fixed=channels * taps + 2 * value_heads + value_dim,
    )
    return weights, {
        "query_width": channels + values,
        "heads": 0,
        "state": value_heads * value_dim * key_dim,
        "channels": channels,
        "conv_tail": taps - 1,
        "row": channels + 2 * value_heads,
    }


def _mlp_of(config: _Config, index: int) -> tuple[Counts, int]:
    """Parameters of a layer's MLP, and the width computed for one position."""
    kind, hidden = config.model_type, config.size("hidden_size")
    experts = config.get("num_experts") or config.get("num_local_experts")
    is_sparse = (
        experts
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and index not in (config.get("mlp_only_layers") or ())
    )
    if not is_sparse:
        return _mlp(config, "intermediate_size"), config.size("intermediate_size")
    inner_key = "intermediate_size" if kind in _EXPERTS_ALONE else "moe_intermediate_size"
    inner = config.size(inner_key)
    chosen = config.size("top_k_experts" if kind == "gemma4" else "num_experts_per_tok")
    weights = Counter(experts=3 * experts * hidden * inner, router=experts * hidden)
    active = chosen * inner
    if kind in _HYBRID:
        weights += _mlp(config, "shared_expert_intermediate_size")
        weights["router"] += hidden
        active += config.size("shared_expert_intermediate_size")
    if kind == "gemma4":  # beside a dense MLP, with norms and scales of its own
        weights += _mlp(config, "intermediate_size")
        weights["fixed"] += 4 * hidden + experts
        active += config.size("intermediate_size")
    if kind == "gpt_oss":
        weights["fixed"] += experts * (2 * inner + hidden + 1)
    if kind == "minimax_m2":
        weights["fixed"] += experts
    return weights, active


def _mlp(config: _Config, inner_key: str) -> Counts:
    hidden, inner = config.size("hidden_size"), config.size(inner_key)
    weights = Counter(linear=3 * hidden * inner)
    if config.get("mlp_bias"):
        weights["fixed"] += 2 * inner + hidden
    return weights
