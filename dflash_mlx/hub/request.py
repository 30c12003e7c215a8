"""What was asked of a source, and the two ways a source speaks: a line on stderr, a small file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """A spec with the circumstances of its fetch."""

    spec: str
    revision: str | None
    kind: str  # "model", "drafter" or "dataset", the word for it in messages
    progress: bool
    offline: bool

    def say(self, line: str) -> None:
        """A line of progress, where it is wanted."""
        if self.progress:
            say(line)


def say(line: str) -> None:
    """One line of progress on stderr; stdout belongs to the answer."""
    print(line, file=sys.stderr, flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, "utf-8")
    part.replace(path)
