"""Where features come from during training: the cache on disk, or the target itself, run again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_mlx.errors import UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import FeatureCache, FeatureSpec, Seen, bytes_a_token, compute
from dflash_mlx.train.memory import explained
from dflash_mlx.train.wording import counted, shown_bytes


class Offline:
    """Features read from the cache; all texts have been added to it before."""

    def __init__(self, cache: FeatureCache) -> None:
        self.cache = cache

    def read_all(self, texts: Sequence[Text]) -> list[Seen]:
        """In the order of `texts`, each read from disk now."""
        return [self.cache.read(text) for text in texts]


class Online:
    """Features computed when they are asked for; nothing is kept."""

    def __init__(self, target: Target, spec: FeatureSpec) -> None:
        self.target, self.spec = target, spec

    def read_all(self, texts: Sequence[Text]) -> list[Seen]:
        """In the order of `texts`, from as few passes of the target as their lengths allow."""
        with explained("Computing features", "--max-length, and give another folder"):
            return compute(self.target, self.spec, texts)


def offline(
    folder: Path,
    wanted: Sequence[tuple[FeatureSpec, Sequence[Text]]],
    target: Target,
    limit_bytes: int | None,
    announce: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> list[Offline]:
    """For every kind of features in `wanted` a cache that holds those of all its texts.

    What all of them will take is announced, and checked, before any are computed.
    """
    caches: dict[str, FeatureCache] = {}
    kinds = [caches.setdefault(spec.key(), FeatureCache(folder, spec)) for spec, _ in wanted]
    pairs = zip(kinds, wanted, strict=True)
    missing = [[text for text in texts if text not in cache] for cache, (_, texts) in pairs]
    size = sum(
        bytes_a_token(spec, target.hidden_size) * sum(text.length for text in texts)
        for (spec, _), texts in zip(wanted, missing, strict=True)
    )
    if count := sum(map(len, missing)):
        announce(f"Features of {counted(count, 'text')} will take {shown_bytes(size)} in {folder}.")
    there = sum(shard.stat().st_size for shard in folder.glob("*/features-*.safetensors"))
    if limit_bytes is not None and size + there > limit_bytes:
        raise UsageError(
            f"The features take {shown_bytes(size + there)}, more than the limit of "
            f"{shown_bytes(limit_bytes)}. Raise --cache-limit, give fewer taps, or use --online."
        )
    free = shutil.disk_usage(folder).free
    if size > 0.95 * free:
        raise UsageError(
            f"The features take {shown_bytes(size)} and {folder} has {shown_bytes(free)} free. "
            "Free some, put --work elsewhere, or use --online."
        )
    for cache, (_, texts) in zip(kinds, wanted, strict=True):
        cache.add(target, texts, progress)
    return [Offline(cache) for cache in kinds]
