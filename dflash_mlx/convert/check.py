"""One prompt through source and result, one matrix held at a time, compared after every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.convert.source import Source
from dflash_mlx.convert.streamed import StreamedLayer, fill
from dflash_mlx.errors import CheckpointError
from dflash_mlx.models import build_target
from dflash_mlx.segment import Segment

PROMPT = "The quick brown fox jumps over the lazy dog. One and two make three, so 12 + 30 = 42."
PROMPT_TOKENS = 16

#: how far the noise of single matrices is taken to grow through a model's layers
_GROWTH = 8.0
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Place:
    """A point of the forward pass; relative errors |result - source| / |source| of rows there."""

    where: str  # embedding, layer N, or logits
    error: float  # of the worst token's row
    median: float  # of the middle one: a token that chose other experts does not move it


@dataclass(frozen=True)
class SelfCheck:
    """Errors at every place, in the order of the forward pass.

    noise: the relative error that the settings leave in one matrix (`noise_of`).
    """

    places: list[Place]
    noise: float

    @property
    def worst(self) -> Place:
        return max(self.places, key=lambda place: place.error)

    @property
    def limit(self) -> float:
        """The largest error of the middle row that the settings explain.

        Never above 1: such an error is as large as the state it is in, whatever the bits.
        """
        return min(1.0, _GROWTH * self.noise)

    @property
    def as_expected(self) -> bool:
        return max(place.median for place in self.places) <= self.limit

    @property
    def verdict(self) -> str:
        """Whether the error is one that these settings make, as a sentence for a person."""
        middle = max(self.places, key=lambda place: place.median)
        seen = f"most tokens are off by {middle.median:.2g} at most (at {middle.where})"
        if self.as_expected:
            return f"as expected: {seen}, and these settings explain up to {self.limit:.2g}"
        return (
            f"more than expected: {seen}, and these settings explain {self.limit:.2g}; compare its "
            "answers with the source's, or take more bits"
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.record(), "places": [asdict(p) for p in self.places]}

    def record(self) -> dict[str, Any]:
        """What config.json keeps of it."""
        return {
            "worst": asdict(self.worst),
            "explained": self.limit,
            "as_expected": self.as_expected,
            "verdict": self.verdict,
        }


def compare(source: Source, result: Source, ids: Sequence[int], noise: float = 0.0) -> SelfCheck:
    """Run `ids` through both in float32. CheckpointError when the result is not finite anywhere.

    Each matrix is read, multiplied and dropped before the next, some rows in float32 at a time:
    what is held is the largest one as it is stored.
    """
    expected = dict(_run(source, ids))
    places = []
    for where, rows in _run(result, ids):
        error = np.linalg.norm(rows - expected[where], axis=-1)
        error = error / np.maximum(np.linalg.norm(expected[where], axis=-1), 1e-12)
        if not np.isfinite(error).all():
            raise CheckpointError(
                f"The self-check found numbers that are not finite at {where} of {result.path}; "
                "convert with other settings, and report it if the source answers well."
            )
        places.append(Place(where, float(error.max()), float(np.median(error))))
    return SelfCheck(places, noise)


def _run(source: Source, ids: Sequence[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Hidden states [T, H] of every place, and logits [1, V] of the last token.

    Of the logits their mean is taken off: a shift of all changes no probability.
    """
    model: Any = build_target(source.config)
    layers, caches = model.model.layers, model.make_cache()
    states: list[np.ndarray] = []

    def seen(h: mx.array) -> None:
        states.append(np.array(h[0].astype(mx.float32)))

    model.model.layers = [
        StreamedLayer(layer, source, f"model.layers.{i}.", seen) for i, layer in enumerate(layers)
    ]
    rest = [n for n in source.weights if not n.startswith((_EMBEDDING, _HEAD, "model.layers."))]
    fill(model, source, {name: name for name in rest})
    rows = source.weights[_EMBEDDING].open()
    # The embedding holds the prompt's rows alone, so the prompt is rows 0, 1, 2, ...
    model.model.embed_tokens.weight = mx.concatenate([rows(i, i + 1) for i in ids]).astype(
        mx.float32
    )
    mx.eval(model.model.embed_tokens.weight)
    del rows
    segment = Segment(mx.arange(len(ids), dtype=mx.int32), caches)
    hidden, last = model.forward([segment], [len(layers) - 1])
    assert last is not None
    seen(last.joined)
    yield "embedding", states[0]
    for index, state in enumerate(states[1:]):
        yield f"layer {index}", state
    yield "logits", _logits(model, source, hidden[:, -1:])


def _logits(model: Any, source: Source, row: mx.array) -> np.ndarray:
    own = "lm_head" in model
    module = model.lm_head if own else model.model.embed_tokens
    # A table that serves as the head, too, is read a second time: it is no small part of a model.
    head = source.weights[_HEAD] if own else source.again().weights[_EMBEDDING]
    parts = []
    for rows in head.chunks():
        module.weight = rows.astype(mx.float32)
        parts.append(np.array(model.logits(row)[0].astype(mx.float32)))
    logits = np.concatenate(parts, axis=-1)
    return logits - logits.mean(axis=-1, keepdims=True)
