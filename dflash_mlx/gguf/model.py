"""A GGUF model as the rest of the program knows models: HF-style config and weights by HF names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf.file import GGUFFile, RawTensor, read_gguf
from dflash_mlx.gguf.quants import GROUP, NATIVE_BITS, to_affine, to_dense
from dflash_mlx.gguf.vocabulary import end_ids

ARCHITECTURES = ("llama", "qwen3")

# GGUF metadata below "<architecture>." that config() reads.
_READ_KEYS = {
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
# Keys that say nothing when zero or false, and that no supported model sets otherwise.
_ZERO_KEYS = {"expert_count", "expert_used_count", "attention.sliding_window"}

_PARTS = ("weight", "scales", "biases")
_ROPE_FREQS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def open_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file of a supported architecture; weights stay on disk until asked for.

    Raises CheckpointError for a broken or split file, another architecture, metadata that is
    missing or not understood, and tensors that are missing, unknown or of the wrong shape.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of architecture {architecture!r}, which is not supported from "
            f"GGUF. Supported are {', '.join(ARCHITECTURES)}."
        )
    model = GGUFModel(file, architecture)
    model.check()
    return model


@dataclass(frozen=True)
class GGUFModel:
    """An opened GGUF file of architecture `llama` or `qwen3`."""

    file: GGUFFile
    architecture: str

    def config(self) -> dict[str, Any]:
        """HF-style config. Llama 3's rope scaling comes as `rope_freq_factors`: one divisor per
        rotary frequency [head_dim/2], as the file's rope_freqs tensor has them."""
        config = dict(self._config)
        if (freqs := self.file.tensors.get(_ROPE_FREQS)) is not None:
            config["rope_freq_factors"] = to_dense(freqs, mx.float32).tolist()
        return config

    def weights(self, keep_quantized: bool, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
        """All weights by HF name, in `dtype`.

        With `keep_quantized`, Q4_0, Q4_1 and Q8_0 matrices come as MLX's affine triples (`.weight`
        uint32, `.scales`, `.biases` in `dtype`) and `quantization()` describes them. The llama
        architecture's interleaved q and k rows are put back into HF's order.
        """
        out: dict[str, mx.array] = {}
        for name, tensor in self.file.tensors.items():
            if name == _ROPE_FREQS:
                continue
            if keep_quantized and _is_native(tensor):
                out.update(self.affine(name, dtype))
            else:
                out[self.hf_name(name)] = self.dense(name, dtype)
        return out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by GGUF name, without reading any."""
        return {n: t.shape for n, t in self.file.tensors.items() if n != _ROPE_FREQS}

    def dense(self, name: str, dtype: mx.Dtype) -> mx.array:
        """One weight by GGUF name, dequantized, its rows in HF's order."""
        return to_dense(self.file.tensors[name], dtype, self._row_order(name))

    def affine(self, name: str, dtype: mx.Dtype) -> dict[str, mx.array]:
        """One matrix that `quantization()` describes: packed weight, scales and biases by name."""
        module = self.hf_name(name).removesuffix(".weight")
        triple = to_affine(self.file.tensors[name], dtype, self._row_order(name))
        return dict(zip((f"{module}.{p}" for p in _PARTS), triple, strict=True))

    def quantization(self) -> dict[str, dict[str, int]]:
        """Module path -> group size and bits of every matrix that `keep_quantized` keeps."""
        return {
            self.hf_name(name).removesuffix(".weight"): {
                "group_size": GROUP,
                "bits": NATIVE_BITS[tensor.kind],
            }
            for name, tensor in self.file.tensors.items()
            if _is_native(tensor)
        }

    def hf_name(self, name: str) -> str:
        """The HF name of a GGUF tensor."""
        return self._names[name]

    def check(self) -> None:
        """Demand that metadata and tensors are exactly those of the architecture."""
        unknown = []
        prefix = f"{self.architecture}."
        for key, value in self.file.metadata.items():
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                if name not in _READ_KEYS and not (name in _ZERO_KEYS and not value):
                    unknown.append(f"{key} = {value!r}")
        if unknown:
            raise self._error(f"has metadata that is not understood: {_some(unknown)}")
        self._check_tensors()

    def _check_tensors(self) -> None:
        shapes = self._shapes()
        tensors = self.file.tensors
        if missing := [n for n in shapes if n not in tensors and n != "output.weight"]:
            raise self._error(f"lacks the tensors {_some(missing)}")
        if extra := [n for n in tensors if n not in shapes and n != _ROPE_FREQS]:
            raise self._error(f"has tensors that are not understood: {_some(extra)}")
        shapes[_ROPE_FREQS] = (self._config["head_dim"] // 2,)
        for name, tensor in tensors.items():
            if tensor.shape != shapes[name]:
                raise self._error(
                    f"has tensor {name} of shape {tensor.shape} where its metadata ask for "
                    f"{shapes[name]}"
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor the architecture has, by GGUF name."""
        c = self._config
        hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        if self.architecture == "qwen3":
            layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (c["vocab_size"], hidden),
            "output_norm.weight": (hidden,),
            "output.weight": (c["vocab_size"], hidden),
        }
        for index in range(c["num_hidden_layers"]):
            shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        return shapes

    @cached_property
    def _names(self) -> dict[str, str]:
        """GGUF name -> HF name."""
        layer = _LAYER_NAMES | (_QWEN3_NAMES if self.architecture == "qwen3" else {})
        names = dict(_TOP_NAMES)
        for index in range(self._config["num_hidden_layers"]):
            for name, hf_name in layer.items():
                names[f"blk.{index}.{name}.weight"] = f"model.layers.{index}.{hf_name}.weight"
        return names

    def _row_order(self, name: str) -> np.ndarray | None:
        """Rows of a q or k matrix in HF's order, None when they are in order already.

        llama.cpp rotates neighbouring pairs where HF rotates halves, so its converter interleaves
        the two halves of every head, for the llama architecture only.
        """
        part = name.split(".")[-2]
        if self.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return None
        key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        heads, head = self._config[key], self._config["head_dim"]
        rows = np.arange(heads * head).reshape(heads, head // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    @cached_property
    def _config(self) -> dict[str, Any]:
        hidden = self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        head = self._integer("attention.key_length", default=hidden // heads)
        kv_heads = self._integer("attention.head_count_kv", default=heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, default=head) != head:
                raise self._error(f"has {key} other than its head length of {head}")
        return {
            "model_type": self.architecture,
            "hidden_size": hidden,
            "num_hidden_layers": self._integer("block_count"),
            "intermediate_size": self._integer("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "vocab_size": self._tensor("token_embd.weight").shape[0],
            "max_position_embeddings": self._integer("context_length"),
            "rope_theta": _shortest(self._number("rope.freq_base", default=10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "eos_token_id": sorted(end_ids(self.file)),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._value("rope.scaling.type", default="none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self._error(f"has the rope scaling {kind!r}; known are none, linear and yarn")
        scaling = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            original = self._integer("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _tensor(self, name: str) -> RawTensor:
        if name not in self.file.tensors:
            raise self._error(f"lacks the tensors {name}")
        return self.file.tensors[name]

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self._error(f"lacks the metadata {self.architecture}.{key}")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < 1:
            raise self._error(f"has {self.architecture}.{key} = {value!r}, not one count")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)):
            raise self._error(f"has {self.architecture}.{key} = {value!r}, not a number")
        return float(value)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} {what}. Use a file of a plain llama or qwen3 model."
        )


def _is_native(tensor: RawTensor) -> bool:
    return tensor.kind in NATIVE_BITS and len(tensor.shape) == 2


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.99999974e-06 was 1e-05 before conversion."""
    return float(str(np.float32(value)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
