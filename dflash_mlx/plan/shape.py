"""How large the parts of a model are, read from its config.json: counts, no arrays.

Follows the parameters of the families in models/ and of drafters in draft/; knows no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.plan.quantization import is_mxfp4

_GATED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "muse_glimmer")  # an output gate as wide as q
_HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_EXPERTS_ALONE = ("gpt_oss", "minimax_m2")  # intermediate_size is an expert's
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma4")
_TIED_BY_DEFAULT = ("gemma4",)
_FAMILIES = ("llama", "qwen3", "qwen3_moe", *_HYBRID, "gpt_oss", "gemma4", "minimax_m2")
MODEL_TYPES = (*_FAMILIES, "muse_glimmer")
_PATTERNS = {"gemma4": 6, "gpt_oss": 2, "muse_glimmer": 4}  # one of so many layers sees everything

Counts = Counter[str]  # elements by module path, and under "fixed" those never quantized
#: kinds of modules that a quantization takes
QUANTIZED = ("linear", "experts", "router", "embedding", "head")
_KINDS = ("full_attention", "sliding_attention", "linear_attention")
# Larger numbers are broken ones, with which counting would not end.
_MOST = {"num_hidden_layers": 10_000, "max_position_embeddings": 100_000_000}
_MOST_OF_ANY = 10**12
_ENDS = {"fixed": "fixed", "model.embed_tokens": "embedding", "lm_head": "head"}
_ROUTERS = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate", "router.proj")
# Where a family differs from the others in the names of its experts.
_EXPERTS = {"gpt_oss": "mlp.experts", "gemma4": "experts.switch_glu"}
_PROJECTIONS = ("gate", "up", "down")
_ROUTER = {"gpt_oss": "mlp.router", "gemma4": "router.proj"}


def kind_of(path: str) -> str:
    """The kind of a module: one of QUANTIZED, or fixed."""
    if path in _ENDS:
        return _ENDS[path]
    if ".experts." in path or ".switch_mlp." in path:
        return "experts"
    return "router" if path.endswith(_ROUTERS) else "linear"


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
    outer: Counts  # outside of the layers
    context: int | None  # positions it was made for
    experts_mxfp4: bool = False  # the checkpoint's experts are published in MXFP4

    @property
    def parameters(self) -> int:
        return sum(self.weights.values())

    @cached_property
    def modules(self) -> dict[str, int]:
        """Weights of every module that can be quantized, by its path."""
        inner = {
            f"model.layers.{index}.{path}": count
            for index, layer in enumerate(self.layers)
            for path, count in layer.weights.items()
            if path != "fixed"
        }
        return inner | {path: count for path, count in self.outer.items() if path != "fixed"}

    @cached_property
    def weights(self) -> Counter[str]:
        """Weights by kind."""
        kinds = Counter(fixed=self.outer["fixed"] + sum(a.weights["fixed"] for a in self.layers))
        for path, count in self.modules.items():
            kinds[kind_of(path)] += count
        return kinds


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
    shared = text.optional("num_kv_shared_layers")
    layers = tuple(_layer(text, index, shared=index >= count - shared) for index in range(count))
    outer = Counter({"model.embed_tokens": vocab * hidden, "fixed": hidden})
    if not text.flag("tie_word_embeddings", kind in _TIED_BY_DEFAULT):
        outer["lm_head"] = vocab * hidden
    limit = text.optional("max_position_embeddings") or None
    return Shape(hidden, vocab, layers, outer, limit, experts_mxfp4=is_mxfp4(config))


def read_draft_shape(
    draft: Mapping[str, Any], taps: int, vocab: int, tables: Sequence[str] = ()
) -> Shape:
    """A drafter with `taps` features, of the sizes of its own config.json or of [pair.draft].

    tables: which of embed_tokens and lm_head it does not borrow from the target.
    """
    config = _Config({**draft, "model_type": "qwen3"})
    hidden, count = config.size("hidden_size"), config.size("num_hidden_layers")
    kinds = draft.get("layer_types") or []
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
    outer = Counter({"fc": taps * hidden * hidden, "fixed": 2 * hidden})
    if rank := config.get("selector_rank"):
        outer["fixed"] += rank * hidden + 2 * vocab * rank
    if "embed_tokens" in tables:
        outer["model.embed_tokens"] = vocab * hidden
    if "lm_head" in tables:
        outer["lm_head"] = (draft.get("draft_vocab_size") or vocab) * hidden
    return Shape(hidden, vocab, tuple(layers), outer, None)


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
        value, most = self.get(key, default), _MOST.get(key, _MOST_OF_ANY)
        if type(value) is not int or not 0 < value <= most:
            limit = f"from 1 to {most}" if type(value) is int and value > 0 else "above zero"
            raise _wrong(key, value, f"a whole number {limit}")
        return value

    def optional(self, key: str) -> int:
        """A size that may be absent, null or 0: then 0."""
        value = self.get(key, 0)
        return self.size(key) if type(value) is not int or value else 0

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true, false or null")
        return value

    def indices(self, key: str) -> list[int]:
        value = self.get(key, [])
        if not isinstance(value, list) or any(type(index) is not int for index in value):
            raise _wrong(key, value, "a list of whole numbers")
        return value

    @cached_property
    def layer_types(self) -> list[str]:
        """The kind of every layer; empty when the config does not state them."""
        kinds, count = self.get("layer_types", []), self.size("num_hidden_layers")
        if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
            raise _wrong("layer_types", kinds, f"a list of {', '.join(_KINDS)}")
        if kinds and len(kinds) != count:
            raise _wrong("layer_types", kinds, f"a list of {count} layers but of {len(kinds)}")
        return kinds


def _wrong(key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"The config's {key} is {value!r:.80}, not {wanted}; use a complete config.json."
    )


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
    if shared and config.flag("use_double_wide_mlp"):
        mlp = Counter({path: count * (1 if path == "fixed" else 2) for path, count in mlp.items()})
        active *= 2
    weights.update(mlp)
    weights["fixed"] += (4 * hidden + 1) if kind == "gemma4" else 2 * hidden
    if kind == "muse_glimmer":
        weights["fixed"] += 2 * hidden
    return Layer(weights, **sequence, active_width=active)


def _kind_of(config: _Config, index: int) -> str:
    if kinds := config.layer_types:
        return kinds[index]
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
        one_projection = config.flag("attention_k_eq_v")
        if one_projection:
            kv_heads = config.size("num_global_key_value_heads", kv_heads)
    query, key = heads * dim, kv_heads * dim
    projections = 0 if shared else 1 if one_projection else 2
    queries = query * (2 if kind in _GATED else 1)
    inputs = queries + key * projections
    weights = Counter(
        {"self_attn.q_proj": hidden * queries, "self_attn.o_proj": hidden * query}
        | {f"self_attn.{name}_proj": hidden * key for name in "kv"[:projections]}
    )
    if config.flag("attention_bias"):
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
    if config.model_type == "qwen3_next":
        inputs = {"qkvz": channels + values, "ba": 2 * value_heads}
    else:
        inputs = {"qkv": channels, "z": values, "a": value_heads, "b": value_heads}
    weights = Counter(
        {f"linear_attn.in_proj_{name}": hidden * width for name, width in inputs.items()}
        | {"linear_attn.out_proj": hidden * values}
        | {"fixed": channels * taps + 2 * value_heads + value_dim}
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
    experts = config.optional("num_experts") or config.optional("num_local_experts")
    is_sparse = (
        experts
        and (index + 1) % (config.optional("decoder_sparse_step") or 1) == 0
        and index not in config.indices("mlp_only_layers")
    )
    if not is_sparse:
        return _mlp(config, "intermediate_size"), config.size("intermediate_size")
    inner_key = "intermediate_size" if kind in _EXPERTS_ALONE else "moe_intermediate_size"
    inner = config.size(inner_key)
    chosen = config.size("top_k_experts" if kind == "gemma4" else "num_experts_per_tok")
    path = _EXPERTS.get(kind, "mlp.switch_mlp")
    weights = Counter({f"{path}.{name}_proj": experts * hidden * inner for name in _PROJECTIONS})
    weights[_ROUTER.get(kind, "mlp.gate")] = experts * hidden
    active = chosen * inner
    if kind in _HYBRID:
        weights += _mlp(config, "shared_expert_intermediate_size", "mlp.shared_expert")
        weights["mlp.shared_expert_gate"] = hidden
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


def _mlp(config: _Config, inner_key: str, path: str = "mlp") -> Counts:
    hidden, inner = config.size("hidden_size"), config.size(inner_key)
    weights = Counter({f"{path}.{name}_proj": hidden * inner for name in _PROJECTIONS})
    if config.flag("mlp_bias"):
        weights["fixed"] += 2 * inner + hidden
    return weights
