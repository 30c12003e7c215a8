"""An HF-style config from a GGUF file's metadata, read strictly: nothing is skipped in silence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf.file import GGUFFile, RawTensor
from dflash_mlx.gguf.tensors import HYBRIDS
from dflash_mlx.gguf.vocabulary import end_ids

# GGUF architecture -> HF model_type
ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
_EXPERTS = ("qwen3moe", "qwen35moe")

# Metadata below "<architecture>." that is read.
_READ_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "vocab_size",
    }
)
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_HYBRID_KEYS = frozenset(
    {
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
        "attention.recurrent_layers",
        "full_attention_interval",
        "nextn_predict_layers",
        # Which positions rotate which dimensions of an image; those of text are all the same.
        "rope.dimension_sections",
    }
)
# Keys that say nothing when zero or false, and that no supported model sets otherwise.
_ZERO_KEYS = frozenset({"expert_count", "expert_used_count", "attention.sliding_window"})


# What the widths of tensors are products of.
_WIDTHS = (
    ("hidden_size",),
    ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"),
    ("intermediate_size",),
    ("num_experts",),
    ("num_experts_per_tok",),
    ("moe_intermediate_size",),
    ("shared_expert_intermediate_size",),
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_conv_kernel_dim",),
)


def read_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The config; CheckpointError for metadata that is missing, malformed or not understood."""
    return _Metadata(file, architecture).config()


def file_error(file: GGUFFile, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} {what}. Use a file of a plain model of {' or '.join(ARCHITECTURES)}."
    )


class _Metadata:
    """The `<architecture>.*` metadata of a file."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def config(self) -> dict[str, Any]:
        self._refuse_unknown()
        config = self._stated()
        self._refuse_without_room(config)
        return config

    def _stated(self) -> dict[str, Any]:
        hidden = self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        head = self.integer("attention.key_length", default=hidden // heads)
        if self.integer("attention.value_length", default=head) != head:
            raise self._other_length("attention.value_length", head)
        config = {
            "model_type": ARCHITECTURES[self.architecture],
            "hidden_size": hidden,
            "num_hidden_layers": self._layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", default=heads),
            "head_dim": head,
            "rms_norm_eps": _shortest(self.number("attention.layer_norm_rms_epsilon")),
            "vocab_size": self._tensor("token_embd.weight").shape[0],
            "max_position_embeddings": self.integer("context_length"),
            "rope_theta": _shortest(self.number("rope.freq_base", default=10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "eos_token_id": sorted(end_ids(self.file)),
        }
        if self.architecture in _EXPERTS:
            config |= self._experts()
        if self.architecture != "qwen35moe":
            config["intermediate_size"] = self.integer("feed_forward_length")
        if self.architecture in HYBRIDS:
            return config | self._hybrid(config)
        if self.integer("rope.dimension_count", default=head) != head:
            raise self._other_length("rope.dimension_count", head)
        return config

    def _experts(self) -> dict[str, Any]:
        sizes = {
            "num_experts": self.integer("expert_count"),
            "num_experts_per_tok": self.integer("expert_used_count"),
            "moe_intermediate_size": self.integer("expert_feed_forward_length"),
            # llama.cpp knows these architectures so only.
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if self.architecture in HYBRIDS:
            shared = self.integer("expert_shared_feed_forward_length")
            sizes["shared_expert_intermediate_size"] = shared
        return sizes

    def _hybrid(self, config: dict[str, Any]) -> dict[str, Any]:
        value_heads, inner = self.integer("ssm.time_step_rank"), self.integer("ssm.inner_size")
        if inner % value_heads:
            raise self.error(f"has ssm.inner_size {inner}, no multiple of {value_heads} heads")
        extra, layers = self.value("nextn_predict_layers", default=0), config["num_hidden_layers"]
        if type(extra) is not int or not 0 <= extra < layers:
            raise self.error(f"has nextn_predict_layers {extra!r:.80} of {layers} layers")
        layers -= extra
        head = config["head_dim"]
        rotated = self.integer("rope.dimension_count", default=head // 4)
        return {
            "num_hidden_layers": layers,
            "mtp_num_hidden_layers": extra,
            "full_attention_interval": self.integer("full_attention_interval", default=4),
            "layer_types": self._layer_types(layers),
            "linear_num_key_heads": self.integer("ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": self.integer("ssm.state_size"),
            "linear_value_head_dim": inner // value_heads,
            "linear_conv_kernel_dim": self.integer("ssm.conv_kernel"),
            "partial_rotary_factor": rotated / head,
        }

    def _layer_types(self, layers: int) -> list[str]:
        interval = self.integer("full_attention_interval", default=4)
        recurrent = [bool((i + 1) % interval) for i in range(layers)]
        stated = self.value("attention.recurrent_layers", default=recurrent)
        if not isinstance(stated, list) or len(stated) < layers:
            raise self.error(f"has attention.recurrent_layers = {stated!r} for {layers} layers")
        return [("full_attention", "linear_attention")[bool(kind)] for kind in stated[:layers]]

    def _layers(self) -> int:
        """The number of layers, no larger than what has to be listed may be: each has tensors."""
        layers, most = self.integer("block_count"), len(self.file.tensors)
        if layers > most:
            raise self._no_room("block_count", layers, most)
        return layers

    def _refuse_without_room(self, config: dict[str, Any]) -> None:
        """Refuse widths that no tensor has: orders of rows and columns are made of their size."""
        shapes = [tensor.shape for tensor in self.file.tensors.values()]
        most = max((max(shape) for shape in shapes if 0 not in shape), default=0)
        for keys in _WIDTHS:
            width = math.prod(config.get(key) or 1 for key in keys)
            if width > most:
                raise self._no_room(" times ".join(keys), width, most)

    def _no_room(self, what: str, size: int, most: int) -> CheckpointError:
        return self.error(f"has {what} {size}, where its tensors have room for {most}")

    def _refuse_unknown(self) -> None:
        known = _READ_KEYS
        if self.architecture in _EXPERTS:
            known |= _EXPERT_KEYS
        if self.architecture in HYBRIDS:
            known |= _HYBRID_KEYS
        if self.architecture == "qwen35moe":
            known |= {"expert_shared_feed_forward_length"}
        unknown = []
        prefix = f"{self.architecture}."
        for key, value in self.file.metadata.items():
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                if name not in known and not (name in _ZERO_KEYS and not value):
                    unknown.append(f"{key} = {value!r}")
        if unknown:
            raise self.error(f"has metadata that is not understood: {some(unknown)}")

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.value("rope.scaling.type", default="none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self.error(f"has the rope scaling {kind!r}; known are none, linear and yarn")
        scaling = {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            original = self.integer("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _tensor(self, name: str) -> RawTensor:
        if name not in self.file.tensors:
            raise self.error(f"lacks the tensors {name}")
        return self.file.tensors[name]

    def value(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(f"lacks the metadata {self.architecture}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < 1:
            raise self.error(f"has {self.architecture}.{key} = {value!r:.80}, not one count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"has {self.architecture}.{key} = {value!r:.80}, not a number")
        return float(value)

    def _other_length(self, key: str, head: int) -> CheckpointError:
        return self.error(f"has {key} other than its head length of {head}")

    def error(self, what: str) -> CheckpointError:
        return file_error(self.file, what)


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.99999974e-06 was 1e-05 before conversion."""
    return float(str(np.float32(value)))
