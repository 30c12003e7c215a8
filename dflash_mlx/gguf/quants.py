"""GGUF tensor types to MLX arrays: dequantized, or as affine triples where the formats agree."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf.file import RawTensor

GROUP = 32  # values that share one scale in Q4_0, Q4_1 and Q8_0

# Bits of the types MLX can hold without change: value = scale·q + bias, q unsigned.
NATIVE_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}
_INTEGERS = {
    GGMLQuantizationType.I8,
    GGMLQuantizationType.I16,
    GGMLQuantizationType.I32,
    GGMLQuantizationType.I64,
}
_PLAIN = {GGMLQuantizationType.F16: np.float16, GGMLQuantizationType.F64: np.float64}


def to_dense(
    tensor: RawTensor,
    dtype: mx.Dtype,
    order: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> mx.array:
    """The tensor's values in `dtype`, rows in `order` and their elements as `columns`, if given.

    Has the shape tensor.shape.
    Raises CheckpointError for a type that the `gguf` package cannot dequantize.
    """
    rows = tensor.rows if order is None else tensor.rows[order]
    if tensor.kind in _INTEGERS:
        raise _unsupported(tensor)
    if (plain := _PLAIN.get(tensor.kind)) is not None:
        values = rows.view(plain)
        if plain is np.float64:
            values = values.astype(np.float32)
    else:
        if tensor.kind == GGMLQuantizationType.F32:
            rows = rows.view(np.float32)
        try:
            values = dequantize(rows, tensor.kind)
        except NotImplementedError:
            raise _unsupported(tensor) from None
    values = values.reshape(tensor.shape)
    dense = mx.array(values if columns is None else values[..., columns]).astype(dtype)
    mx.eval(dense)  # frees the float32 copy of this tensor before the next one is read
    return dense


def to_affine(
    tensor: RawTensor,
    dtype: mx.Dtype,
    order: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """MLX's packed weight uint32 [..., N, K·bits/32], scales and biases [..., N, K/32].

    For native types. `columns` moves whole groups of 32 elements only.
    Scales are float16 in the file; a `dtype` of bfloat16 rounds them.
    """
    rows = tensor.rows if order is None else tensor.rows[order]
    n, groups = rows.shape[0], tensor.shape[-1] // GROUP
    blocks = rows.reshape(n, groups, -1)
    if columns is not None:
        blocks = blocks[:, columns[::GROUP] // GROUP]
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    if tensor.kind == GGMLQuantizationType.Q8_0:
        packed = blocks[..., 2:] ^ 0x80  # q + 128 of a signed byte
        biases = -128.0 * scales
    elif tensor.kind == GGMLQuantizationType.Q4_0:
        packed, biases = _nibbles(blocks[..., 2:]), -8.0 * scales
    else:
        packed = _nibbles(blocks[..., 4:])
        biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32)
    weight = np.ascontiguousarray(packed).reshape(n, -1).view(np.uint32)
    weight, scales, biases = (a.reshape(*tensor.shape[:-1], -1) for a in (weight, scales, biases))
    triple = mx.array(weight), mx.array(scales).astype(dtype), mx.array(biases).astype(dtype)
    mx.eval(triple)
    return triple


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., 16]: GGUF pairs values i and i+16 in a byte, MLX values 2i and 2i+1."""
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)  # [..., 32]
    return values[..., 0::2] | (values[..., 1::2] << 4)


def _unsupported(tensor: RawTensor) -> CheckpointError:
    return CheckpointError(
        f"Tensor {tensor.name!r} has the GGUF type {tensor.kind.name}, which cannot be "
        "dequantized. Use a file with another quantization, for example Q8_0."
    )
