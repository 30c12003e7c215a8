"""Tokens to words: the detokenizer, then stop strings, then reasoning apart from the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.prompt import Prompt
from dflash_mlx.text import Channels, Reasoning, StopStrings
from dflash_mlx.tokenizer import Tokenizer


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


@dataclass
class Transcript:
    """What a generation has emitted so far, end token included, for a chat's next turn."""

    ids: list[int] = field(default_factory=list)
    text: str = ""


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
    speech = _Speech(tokenizer, StopStrings(stop))
    split = (
        Channels(prompt.thinking)
        if tokenizer.has_channels
        else Reasoning(tokenizer.think_tags, prompt.thinking)
    )
    ends = tokenizer.end_ids
    run = session.run(prompt.ids, params, max_tokens, ends, stats, speech.hear)
    try:
        for tokens in run:
            transcript.ids += tokens
            reasoning, shown = split.feed(speech.take(transcript))
            yield Chunk(shown, reasoning, tokens)
    finally:
        run.close()
        stats.total_seconds = time.perf_counter() - started  # also of an abandoned answer
    rest = speech.finish(transcript)
    if speech.stopped:
        stats.finish_reason = "stop_string"
    reasoning, shown = (a + b for a, b in zip(split.feed(rest), split.finish(), strict=True))
    stats.total_seconds = time.perf_counter() - started
    conclude(session, stats)
    yield Chunk(shown, reasoning, [], stats)


class _Speech:
    """What the tokens of a step say. The session asks while it can still drop a stopped rest."""

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self._detokenizer, self._stops = tokenizer.detokenizer(), stops
        self._said = self._shown = ""  # since the last `take`: all, and up to a stop string

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def hear(self, token: int) -> bool:
        """Whether a stop string is complete with this token."""
        piece = self._detokenizer.add([token])
        self._said += piece
        self._shown += self._stops.feed(piece)
        return self.stopped

    def take(self, transcript: Transcript) -> str:
        """What may be shown of the last step; the transcript gets all of it."""
        transcript.text += self._said
        shown, self._said, self._shown = self._shown, "", ""
        return shown

    def finish(self, transcript: Transcript) -> str:
        """The rest, once no more tokens come."""
        if self.stopped:
            return ""
        tail = self._detokenizer.finish()
        transcript.text += tail
        return self._stops.feed(tail) + self._stops.finish()
