"""What a model folder says about its origin: the base models of its card and config."""

from __future__ import annotations

import json
import re
from pathlib import Path

# `base_model: ORG/NAME`, or a list below it, in the YAML head of a model card.
_FIELD = re.compile(
    r"^base_model:[ \t]*(?P<one>[^\n]*)\n(?P<list>(?:[ \t]*-[^\n]*\n)*)", re.MULTILINE
)
_HEAD = re.compile(r"\A---\n(.*?\n)---", re.DOTALL)


def base_models(place: Path) -> tuple[str, ...]:
    """Names of the models that the model at `place` (folder or file) was made from, as stated.

    Read from config.json's base_model, _name_or_path and record of a conversion, and from
    README.md; empty when none says so. Nothing is checked: these are hints for a person.
    """
    folder = place if place.is_dir() else place.parent
    found = [*_of_config(folder / "config.json"), *_of_card(folder / "README.md")]
    return tuple(dict.fromkeys(name for name in found if name))


def _of_config(file: Path) -> list[str]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(config, dict):
        return []
    record = config.get("conversion")
    bases = record.get("base_models") if isinstance(record, dict) else None
    stated = [config.get(key) for key in ("base_model", "_name_or_path")]
    stated += bases if isinstance(bases, list) else []
    return [name for name in stated if isinstance(name, str)]


def _of_card(file: Path) -> list[str]:
    try:
        head = _HEAD.match(file.read_text("utf-8").replace("\r\n", "\n"))
    except (OSError, ValueError):
        return []
    field = _FIELD.search(head[1]) if head else None
    if not field:
        return []
    lines = [field["one"], *field["list"].splitlines()]
    return [line.strip().removeprefix("-").strip().strip("'\"") for line in lines]
