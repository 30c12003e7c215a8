"""What goes beside the weights: tokenizer, chat template, generation config, licence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.convert.write import write_json
from dflash_mlx.tokenizer import Tokenizer

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "generation_config.json",
    "chat_template.json",
    "preprocessor_config.json",
)
_PATTERNS = ("*.jinja", "additional_chat_templates/*.jinja", "LICENSE*", "LICENCE*", "NOTICE*")


def write_companions(
    source: Path, destination: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> list[str]:
    """Copy them from a folder, or make them of a GGUF file's metadata; the names written.

    A GGUF's end ids go into generation_config.json, where other programs look for them.
    """
    if not source.is_dir():
        before = {file.name for file in destination.iterdir()}
        tokenizer.save(destination)
        write_json(
            destination / "generation_config.json", {"eos_token_id": sorted(tokenizer.end_ids)}
        )
        return sorted({file.name for file in destination.iterdir()} - before)
    written = []
    for name in _present(source):
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)
        written.append(name)
    return written


def _present(folder: Path) -> Iterator[str]:
    for name in _NAMES:
        if (folder / name).is_file():
            yield name
    for pattern in _PATTERNS:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                yield str(file.relative_to(folder))
