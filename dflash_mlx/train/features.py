"""What the target knows about every text, computed once and kept in safetensors shards.

Shards are mapped and read text by text on demand, so memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import UsageError
from dflash_mlx.loader import DTYPES
from dflash_mlx.models.base import Target
from dflash_mlx.segment import Segment, packed
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.files import make_folder, write_tensors, write_text
from dflash_mlx.train.shards import Shard, damaged

#: tokens of one forward pass of the target
PASS_ROWS = 1024
#: texts of one shard, and about how many bytes: all of it is in memory before it is written
SHARD_TEXTS = 64
SHARD_BYTES = 256e6


@dataclass(frozen=True)
class FeatureSpec:
    """What is kept of the target: part of the name of the cache."""

    target: str  # the target's own name and revision
    taps: tuple[int, ...]
    top_k: int  # most likely tokens kept of each answer position; 0 without soft labels
    dtype: str

    def key(self) -> str:
        """A short name for this kind of features."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Seen:
    """The target's view of one text of L tokens.

    features [L, T·H]. The most likely tokens at each answer position, given what stands before it:
    ids [answer, K] int32 and their log-probabilities [answer, K] float32, over the vocabulary.
    """

    features: mx.array
    ids: mx.array
    logprobs: mx.array


def bytes_a_token(spec: FeatureSpec, hidden_size: int) -> int:
    """Bytes that one token of a text takes in the cache."""
    return len(spec.taps) * hidden_size * DTYPES[spec.dtype].size + spec.top_k * 8


def compute(target: Target, spec: FeatureSpec, texts: Sequence[Text]) -> list[Seen]:
    """Run the target over `texts`, as many in one pass as PASS_ROWS allow."""
    seen: list[Seen] = []
    for batch in packed(texts, lambda text: text.length, PASS_ROWS):
        hidden, features = _forward(target, spec, batch)
        stop = 0
        for text in batch:
            start, stop = stop, stop + text.length
            rows = features[start:stop].astype(DTYPES[spec.dtype])
            if spec.dtype == "float16" and not mx.isfinite(rows).all():
                raise UsageError(
                    "Hidden states of this target are too large for float16; give --cache-dtype "
                    "bfloat16, or --dtype bfloat16 for a target in float16."
                )
            # Row p - 1 gives the distribution of the token at p.
            first = start + len(text.prompt_ids) - 1
            ids, logprobs = _most_likely(target, hidden[first : stop - 1], spec.top_k)
            seen.append(Seen(rows, ids, logprobs))
        mx.eval([(s.features, s.ids, s.logprobs) for s in seen[-len(batch) :]])
    return seen


def _forward(target: Target, spec: FeatureSpec, batch: Sequence[Text]) -> tuple[mx.array, mx.array]:
    """Hidden states [ΣL, H] and features [ΣL, T·H] of the texts; a long one goes in pieces."""
    stacks = [target.make_cache() for _ in batch]
    hidden, features = [], []
    longest = max(text.length for text in batch)
    for at in range(0, longest, PASS_ROWS):
        # Only a text alone is longer than one pass.
        segments = [
            Segment(mx.array(text.ids[at : at + PASS_ROWS], mx.int32), stack)
            for text, stack in zip(batch, stacks, strict=True)
        ]
        outcome, tapped = target.forward(segments, spec.taps)
        assert tapped is not None
        hidden.append(outcome[0])
        features.append(tapped[0].astype(DTYPES[spec.dtype]))
        if at + PASS_ROWS < longest:
            (stack,) = stacks
            stack.commit(stack.pending)
            # Layers above the last tap are not run where nothing is read behind them.
            read = len(stack) if spec.top_k else max(spec.taps) + 1
            states = [array for cache in stack.layers[:read] for array in cache.arrays()]
            mx.eval(features[-1], hidden[-1] if spec.top_k else [], states)
    return mx.concatenate(hidden), mx.concatenate(features)


def _most_likely(target: Target, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
    if k == 0:
        return mx.zeros((hidden.shape[0], 0), mx.int32), mx.zeros((hidden.shape[0], 0))
    logits = target.logits(hidden).astype(mx.float32)
    ids = mx.argpartition(-logits, min(k, logits.shape[-1]) - 1, axis=-1)[:, :k]
    logprobs = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, -1, keepdims=True)
    return ids.astype(mx.int32), logprobs


class FeatureCache:
    """Features of texts on disk, found by the text's ids. Made in shards; a killed run goes on."""

    def __init__(self, folder: Path, spec: FeatureSpec) -> None:
        self.folder = folder / spec.key()
        self.spec = spec
        self._where: dict[str, Shard] = {}  # by the text's key
        make_folder(self.folder)
        for file in sorted(self.folder.glob("features-*.safetensors")):
            self._take(Shard(file))

    def _take(self, shard: Shard) -> None:
        for name in shard.names():
            if name.endswith(".features"):
                self._where[name.removesuffix(".features")] = shard

    def __contains__(self, text: Text) -> bool:
        return _key(text) in self._where

    def add(
        self,
        target: Target,
        texts: Sequence[Text],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Compute what is missing, shard by shard; each is complete on disk or not there.

        Shards are planned from all texts: behind a kill the same ones share a pass as without it.
        """
        every = list({_key(text): text for text in texts}.values())
        count = sum(text not in self for text in every)
        if not count:
            return
        each = bytes_a_token(self.spec, target.hidden_size)
        done = 0
        for full in packed(every, lambda text: text.length * each, int(SHARD_BYTES)):
            for start in range(0, len(full), SHARD_TEXTS):
                shard = [text for text in full[start : start + SHARD_TEXTS] if text not in self]
                if not shard:
                    continue
                progress(done, count)
                self._write(shard, target)
                done += len(shard)
                mx.clear_cache()
        progress(count, count)

    def _write(self, texts: Sequence[Text], target: Target) -> None:
        arrays: dict[str, mx.array] = {}
        for text, seen in zip(texts, compute(target, self.spec, texts), strict=True):
            key = _key(text)
            arrays[f"{key}.features"] = seen.features
            if self.spec.top_k:
                arrays[f"{key}.ids"], arrays[f"{key}.logprobs"] = seen.ids, seen.logprobs
        name = hashlib.sha256("".join(sorted(arrays)).encode()).hexdigest()[:12]
        shard = self.folder / f"features-{name}.safetensors"
        # For whoever looks into the folder: its name is a hash of this.
        write_text(self.folder / "features.json", json.dumps(asdict(self.spec), indent=2) + "\n")
        write_tensors(shard, arrays)
        self._take(Shard(shard))

    def read(self, text: Text) -> Seen:
        """One text's features, read from its shard now. CheckpointError when it is damaged."""
        key, rows = _key(text), len(text.answer_ids)
        shard = self._where[key]
        features = shard.read(f"{key}.features")
        ids, logprobs = mx.zeros((rows, 0), mx.int32), mx.zeros((rows, 0))
        if self.spec.top_k:
            try:
                ids, logprobs = (shard.read(f"{key}.{part}") for part in ("ids", "logprobs"))
            except KeyError as missing:
                raise damaged(shard.file, f"{missing} is not there") from None
        whole = features.ndim == 2 and len(features) == text.length
        labelled = not self.spec.top_k or (ids.ndim == 2 and ids.size > 0)
        if not (whole and labelled and ids.shape == logprobs.shape and len(ids) == rows):
            raise damaged(shard.file, f"those of {text.name} have other shapes than its text")
        mx.eval(features, ids, logprobs)
        return Seen(features, ids, logprobs)


def _key(text: Text) -> str:
    ids = np.array([len(text.prompt_ids), *text.ids], np.int32)
    return hashlib.sha256(ids.tobytes()).hexdigest()[:24]
