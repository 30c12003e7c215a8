"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 layer", "2 layers": for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown_bytes(count: float) -> str:
    """Bytes in the unit that leaves a person something to read, MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
