"""A GGUF model as the rest of the program knows models: HF-style config, weights by its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf.config import ARCHITECTURES, file_error, read_config, some
from dflash_mlx.gguf.file import GGUFFile, read_gguf
from dflash_mlx.gguf.quants import GROUP, NATIVE_BITS, to_affine, to_dense
from dflash_mlx.gguf.tensors import ROPE_FREQS, Entry, is_left_out, tensor_table


def open_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file of a supported architecture; weights stay on disk until asked for.

    Raises CheckpointError for a broken or split file, another architecture, metadata that is
    missing or not understood, and tensors that are missing, unknown or of the wrong shape.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of architecture {architecture!r:.80}, which is not supported "
            f"from GGUF. Supported are {', '.join(ARCHITECTURES)}."
        )
    model = GGUFModel(file, architecture)
    model.check()
    return model


@dataclass(frozen=True)
class GGUFModel:
    """An opened GGUF file of one of ARCHITECTURES."""

    file: GGUFFile
    architecture: str

    def config(self) -> dict[str, Any]:
        """HF-style config. Llama 3's rope scaling comes as `rope_freq_factors`: one divisor per
        rotary frequency [head_dim/2], as the file's rope_freqs tensor has them."""
        config = dict(self._config)
        if (freqs := self.file.tensors.get(ROPE_FREQS)) is not None:
            config["rope_freq_factors"] = to_dense(freqs, mx.float32).tolist()
        return config

    def weights(self, keep_quantized: bool, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
        """All weights by the model's names and in its layouts, in `dtype`.

        With `keep_quantized`, Q4_0, Q4_1 and Q8_0 matrices come as MLX's affine triples (`.weight`
        uint32, `.scales`, `.biases` in `dtype`) and `quantization()` describes them. A tensor that
        is computed from the file's values comes in float32.
        """
        out: dict[str, mx.array] = {}
        for name, entry in self._used.items():
            if keep_quantized and self._is_native(name):
                out.update(self.affine(name, dtype))
            else:
                out[entry.name] = self.dense(name, dtype)
        return out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape in the model of every weight, by GGUF name, without reading any."""
        shapes = {}
        for name, entry in self._used.items():
            stored = self.file.tensors[name].shape
            shapes[name] = entry.finish(mx.zeros(stored)).shape if entry.finish else stored
        return shapes

    def dense(self, name: str, dtype: mx.Dtype) -> mx.array:
        """One weight by GGUF name, dequantized, in the model's order and layout."""
        tensor, entry = self.file.tensors[name], self._used[name]
        if entry.finish is None:
            return to_dense(tensor, dtype, entry.rows, entry.columns)
        values = entry.finish(to_dense(tensor, mx.float32, entry.rows, entry.columns))
        mx.eval(values)
        return values

    def rows(self, name: str, dtype: mx.Dtype) -> Callable[[int, int], mx.array]:
        """What dequantizes rows start .. stop - 1 of one weight: [stop - start, in].

        The model's rows, all leading axes counted as one.
        """
        tensor, entry = self.file.tensors[name], self._used[name]
        if entry.finish is not None:
            whole = self.dense(name, dtype)
            flat = whole.reshape(-1, whole.shape[-1])
            return lambda start, stop: flat[start:stop]

        def part(start: int, stop: int) -> mx.array:
            taken = slice(start, stop) if entry.rows is None else entry.rows[start:stop]
            rows = tensor.rows[taken]
            shape = (len(rows), tensor.shape[-1])
            return to_dense(replace(tensor, shape=shape, rows=rows), dtype, columns=entry.columns)

        return part

    def affine(self, name: str, dtype: mx.Dtype) -> dict[str, mx.array]:
        """One matrix that `quantization()` describes: packed weight, scales and biases by name."""
        tensor, entry = self.file.tensors[name], self._used[name]
        module = entry.name.removesuffix(".weight")
        triple = to_affine(tensor, dtype, entry.rows, entry.columns)
        names = (entry.name, f"{module}.scales", f"{module}.biases")
        return dict(zip(names, triple, strict=True))

    def quantization(self) -> dict[str, dict[str, int]]:
        """Module path -> group size and bits of every matrix that `keep_quantized` keeps."""
        return {
            entry.name.removesuffix(".weight"): {
                "group_size": GROUP,
                "bits": NATIVE_BITS[self.file.tensors[name].kind],
            }
            for name, entry in self._used.items()
            if self._is_native(name)
        }

    def hf_name(self, name: str) -> str:
        """The model's name of a GGUF tensor."""
        return self._table[name].name

    def check(self) -> None:
        """Demand that metadata and tensors are exactly those of the architecture."""
        tensors, table = self.file.tensors, self._table
        if missing := [n for n in table if n not in tensors and n != "output.weight"]:
            raise file_error(self.file, f"lacks the tensors {some(missing)}")
        expected = {name: entry.shape for name, entry in self._used.items()}
        if ROPE_FREQS in tensors:
            expected[ROPE_FREQS] = (self._config["head_dim"] // 2,)
        extra = [n for n in tensors if n not in expected and not is_left_out(n, self._config)]
        if extra:
            raise file_error(self.file, f"has tensors that are not understood: {some(extra)}")
        for name, shape in expected.items():
            if not _same_shape(tensors[name].shape, shape):
                raise file_error(
                    self.file,
                    f"has tensor {name} of shape {tensors[name].shape} where its metadata ask for "
                    f"{shape}",
                )

    def _is_native(self, name: str) -> bool:
        """Whether MLX holds the tensor as it is: by its type, and its order keeps groups whole."""
        tensor, entry = self.file.tensors[name], self._table[name]
        if tensor.kind not in NATIVE_BITS or len(tensor.shape) < 2 or entry.finish:
            return False
        if entry.columns is None:
            return True
        if len(entry.columns) % GROUP:
            return False
        groups = entry.columns.reshape(-1, GROUP)
        whole = groups == groups[:, :1] + np.arange(GROUP)
        return bool(whole.all()) and not (groups[:, 0] % GROUP).any()

    @cached_property
    def _used(self) -> dict[str, Entry]:
        return {name: self._table[name] for name in self._table if name in self.file.tensors}

    @cached_property
    def _table(self) -> dict[str, Entry]:
        return tensor_table(self.architecture, self._config)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_config(self.file, self.architecture)


def _same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal but for axes of length one in front, which converters write or not."""
    return found == wanted or (1, *found) == wanted
