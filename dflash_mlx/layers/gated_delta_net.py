"""Gated DeltaNet (arXiv 2412.06464): linear attention whose state decays and corrects itself.

q, k, v = silu(causal conv(projections));  q, k of unit length, q / sqrt(Dk)
g = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b);  recurrence: cache/recurrent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.cache import DeltaRows, RecurrentCache
from dflash_mlx.segment import Segment, by_segment, rejoin

_UNIT_EPS = 1e-6  # added to the squared length of q and k, as the reference does


@dataclass(frozen=True)
class DeltaSizes:
    """Every key head serves value_heads / key_heads neighbouring value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


class Projections(NamedTuple):
    """What the input projections make of ΣT rows."""

    mixed: mx.array  # [1, ΣT, C], queries, keys and values side by side: C = 2 keys + values
    z: mx.array  # [1, ΣT, Hv, Dv], gates of the output
    b: mx.array  # [1, ΣT, Hv], beta before the sigmoid
    a: mx.array  # [1, ΣT, Hv], step sizes of the decay


class GatedDeltaNet(nn.Module):
    """All but the input projections, which families pack differently. exact: see models.exact."""

    def __init__(self, hidden_size: int, sizes: DeltaSizes, *, norm_eps: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.exact = False
        channels = 2 * sizes.keys + sizes.values
        self.conv1d = nn.Conv1d(
            channels, channels, sizes.conv_taps, groups=channels, bias=False
        )  # weight [C, taps, 1]
        self.dt_bias = mx.zeros((sizes.value_heads,))
        self.A_log = mx.zeros((sizes.value_heads,))
        self.norm = nn.RMSNorm(sizes.value_dim, eps=norm_eps)
        self.out_proj = nn.Linear(sizes.values, hidden_size, bias=False)

    def project(self, x: mx.array) -> Projections:
        """[1, ΣT, H] -> the inputs of convolution, recurrence and gates."""
        raise NotImplementedError

    def make_cache(self) -> RecurrentCache:
        return RecurrentCache(self.sizes.conv_taps, exact=self.exact)

    def __call__(
        self, x: mx.array, segments: Sequence[Segment], caches: Sequence[RecurrentCache]
    ) -> mx.array:
        """[1, ΣT, H] -> [1, ΣT, H]; `caches` holds this layer's cache of every segment."""
        mixed, z, b, a = self.project(x)
        windows = [
            cache.window(part)
            for part, cache in zip(by_segment(mixed, segments), caches, strict=True)
        ]
        rows = self._rows(rejoin([self.conv1d(window) for window in windows]), b, a)
        parts = [by_segment(part, segments) for part in rows]
        out = rejoin(
            [
                cache.advance(DeltaRows(*of_segment))
                for *of_segment, cache in zip(*parts, caches, strict=True)
            ]
        )
        gated = _gated(self.norm(out), z)
        return self.out_proj(gated.reshape(1, x.shape[1], -1))

    def _rows(self, convolved: mx.array, b: mx.array, a: mx.array) -> DeltaRows:
        """The recurrence's rows from the convolution's output [1, ΣT, C], b and a [1, ΣT, Hv]."""
        sizes, count = self.sizes, convolved.shape[1]
        active = nn.silu(convolved).astype(mx.float32)
        queries, keys, values = mx.split(active, [sizes.keys, 2 * sizes.keys], axis=-1)
        scale = sizes.key_dim**-0.5
        return DeltaRows(
            scale * _unit(queries.reshape(1, count, sizes.key_heads, sizes.key_dim)),
            _unit(keys.reshape(1, count, sizes.key_heads, sizes.key_dim)),
            values.reshape(1, count, sizes.value_heads, sizes.value_dim),
            _decay(self.A_log, a, self.dt_bias),
            mx.sigmoid(b.astype(mx.float32)),
        )


class SplitDeltaNet(GatedDeltaNet):
    """One projection a purpose: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a (qwen3_5)."""

    def __init__(self, hidden_size: int, sizes: DeltaSizes, *, norm_eps: float) -> None:
        super().__init__(hidden_size, sizes, norm_eps=norm_eps)
        self.in_proj_qkv = nn.Linear(hidden_size, 2 * sizes.keys + sizes.values, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, sizes.values, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, sizes.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, sizes.value_heads, bias=False)

    def project(self, x: mx.array) -> Projections:
        z = self.in_proj_z(x).reshape(1, x.shape[1], self.sizes.value_heads, -1)
        return Projections(self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x))


class FusedDeltaNet(GatedDeltaNet):
    """Two projections, in_proj_qkvz and in_proj_ba, grouped by key head (qwen3_next).

    The outputs of one key head stand together: its q and k, then v and z of the value heads it
    serves; likewise their b and a.
    """

    def __init__(self, hidden_size: int, sizes: DeltaSizes, *, norm_eps: float) -> None:
        super().__init__(hidden_size, sizes, norm_eps=norm_eps)
        self.in_proj_qkvz = nn.Linear(hidden_size, 2 * sizes.keys + 2 * sizes.values, bias=False)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * sizes.value_heads, bias=False)

    def project(self, x: mx.array) -> Projections:
        sizes, count = self.sizes, x.shape[1]
        qkvz = self.in_proj_qkvz(x).reshape(1, count, sizes.key_heads, -1)
        served = sizes.values // sizes.key_heads
        cuts = [sizes.key_dim, 2 * sizes.key_dim, 2 * sizes.key_dim + served]
        *qkv, z = mx.split(qkvz, cuts, axis=-1)
        ba = self.in_proj_ba(x).reshape(1, count, sizes.key_heads, -1)
        b, a = (part.reshape(1, count, -1) for part in mx.split(ba, 2, axis=-1))
        return Projections(
            mx.concatenate([part.reshape(1, count, -1) for part in qkv], axis=-1),
            z.reshape(1, count, sizes.value_heads, -1),
            b,
            a,
        )


@partial(mx.compile, shapeless=True)
def _decay(log_rate: mx.array, a: mx.array, bias: mx.array) -> mx.array:
    """g = exp(-exp(A_log) softplus(a + dt_bias)) in float32, as one fused kernel."""
    step = nn.softplus(a.astype(mx.float32) + bias.astype(mx.float32))
    return mx.exp(-mx.exp(log_rate.astype(mx.float32)) * step)


@partial(mx.compile, shapeless=True)
def _gated(normed: mx.array, z: mx.array) -> mx.array:
    """normed · silu(z), multiplied in float32, in z's type, as one fused kernel."""
    gate = z.astype(mx.float32)
    return (normed * (gate * mx.sigmoid(gate))).astype(z.dtype)


def _unit(x: mx.array) -> mx.array:
    """x / sqrt(|x|² + eps) over the last axis, by the one kernel that norms by a mean instead."""
    dim = x.shape[-1]
    return dim**-0.5 * mx.fast.rms_norm(x, None, _UNIT_EPS / dim)
