"""Where features come from during training: the cache on disk, or the target itself, run again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_mlx.errors import UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.features import FeatureCache, FeatureSpec, Seen, bytes_a_token, compute


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
        return compute(self.target, self.spec, texts)


def offline(
    folder: Path,
    spec: FeatureSpec,
    target: Target,
    texts: Sequence[Text],
    limit_bytes: int | None,
    announce: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Offline:
    """A cache that holds all `texts`; its size is announced, and checked, before anything runs."""
    cache = FeatureCache(folder, spec)
    missing = [text for text in texts if text not in cache]
    size = bytes_a_token(spec, target.hidden_size) * sum(text.length for text in missing)
    if missing:
        announce(
            f"Features of {len(missing)} texts will take {size / 1e9:.2f} GB in {cache.folder}."
        )
    if limit_bytes is not None and size + cache.size > limit_bytes:
        raise UsageError(
            f"The features take {(size + cache.size) / 1e9:.2f} GB, more than the limit of "
            f"{limit_bytes / 1e9:.2f} GB. Raise --cache-limit, give fewer taps, or use --online."
        )
    free = shutil.disk_usage(cache.folder).free
    if size > 0.95 * free:
        raise UsageError(
            f"The features take {size / 1e9:.2f} GB and {cache.folder} has {free / 1e9:.2f} GB "
            "free. Free some, put --work elsewhere, or use --online."
        )
    cache.add(target, missing, progress)
    return Offline(cache)
