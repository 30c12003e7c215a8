"""Tokens to words: the detokenizer, then stop strings, then reasoning apart from the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.errors import UsageError
from dflash_mlx.text import Channels, Reasoning, StopStrings
from dflash_mlx.tokenizer import Tokenizer

Message = dict[str, str]


@dataclass(frozen=True)
class Chunk:
    """What one step added. Text and reasoning are whole characters; the last chunk has stats."""

    text: str
    reasoning: str
    token_ids: list[int]
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation."""

    text: str
    reasoning: str
    token_ids: list[int]
    stats: GenerationStats

    def to_json(self) -> dict[str, Any]:
        head = {"text": self.text, "reasoning": self.reasoning, "token_ids": self.token_ids}
        return head | self.stats.to_json()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target sees it. text is None for a prompt given as tokens."""

    ids: list[int]
    text: str | None
    thinking: bool = False  # the template left a think block open, or a message's header


@dataclass
class Transcript:
    """What a generation has emitted so far, end token included, for a chat's next turn."""

    ids: list[int] = field(default_factory=list)
    text: str = ""


def refuse_empty(text: str) -> None:
    """UsageError for a message of nothing but white space."""
    if not text.strip():
        raise UsageError("The prompt is empty. Give some text to answer.")


def answer(
    session: Session,
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams,
    max_tokens: int,
    stop: Sequence[str],
    stats: GenerationStats,
    transcript: Transcript,
    conclude: Callable[[Session, GenerationStats], None],
) -> Generator[Chunk, None, None]:
    """Run the session and yield chunks; the last one carries `stats`.

    conclude: called once after the last token, for what belongs into the statistics.
    """
    started = time.perf_counter()
    ends = tokenizer.end_ids
    detokenizer = tokenizer.detokenizer()
    stops = StopStrings(stop)
    split = (
        Channels(prompt.thinking)
        if tokenizer.has_channels
        else Reasoning(tokenizer.think_tags, prompt.thinking)
    )
    run = session.run(prompt.ids, params, max_tokens, ends, stats)
    try:
        for tokens in run:
            text, kept = "", []
            for token in tokens:
                kept.append(token)
                piece = "" if token in ends else detokenizer.add([token])
                transcript.text += piece
                text += stops.feed(piece)
                if stops.stopped:
                    break
            transcript.ids += kept
            if stops.stopped:
                stats.retract(len(tokens) - len(kept))
            reasoning, shown = split.feed(text)
            yield Chunk(shown, reasoning, kept)
            if stops.stopped:
                stats.finish_reason = "stop_string"
                break
    finally:
        run.close()
    rest = ""
    if stops.stopped:  # nothing behind the stop string stays in the caches
        session.rewind(len(prompt.ids) + len(transcript.ids) - 1)
    else:
        tail = detokenizer.finish()
        transcript.text += tail
        rest = stops.feed(tail) + stops.finish()
    reasoning, shown = (a + b for a, b in zip(split.feed(rest), split.finish(), strict=True))
    stats.total_seconds = time.perf_counter() - started
    conclude(session, stats)
    yield Chunk(shown, reasoning, [], stats)
