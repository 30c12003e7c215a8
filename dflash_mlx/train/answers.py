"""The target's answers to prompts, many at once, kept on disk as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_mlx.errors import UsageError
from dflash_mlx.models.base import Target
from dflash_mlx.tokenizer import Tokenizer
from dflash_mlx.train.answer_file import AnswerFile, AnswerSettings
from dflash_mlx.train.conversation import Conversation
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.decoding import Decoder, Job, cache_bytes
from dflash_mlx.train.prompts import Prompt
from dflash_mlx.train.wording import counted, shown_bytes

#: called after every step: (answers there, answers in all, tokens a second of this run)
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Answered:
    """What a run has. texts: in the order of prompts and turns, also those made before."""

    texts: list[Text]
    skipped: int  # answers not asked for: their prompts are too long
    made: int  # answers of this run
    tokens: int  # of these answers, the end tokens included
    places: int  # sequences that ran at once
    seconds: float

    def pace(self) -> str:
        """A sentence on the answers of this run, of which there is one at least."""
        return (
            f"{counted(self.made, 'answer')} of {counted(self.tokens, 'token')}, "
            f"{self.tokens / self.seconds:.1f} tokens/s, {self.places} at a time at most."
        )


def answer_prompts(
    target: Target,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    path: Path,
    settings: AnswerSettings,
    *,
    max_length: int | None = None,
    places: int,
    cache_limit: int | None = None,
    given: Sequence[Text] = (),
    progress: Progress = lambda done, total, speed: None,
) -> Answered:
    """Answer every prompt that has no answer in the file `path` yet, and append the answers.

    max_length: a prompt that leaves no room for an answer below it, or in the target's context,
    is skipped. places: sequences decoded at once. cache_limit: bytes that the caches may take;
    fewer sequences run at once then. given: answers that are there; their prompts, found by their
    tokens, are not asked for again, and they come back with the prompts' names.
    UsageError when a file's answer belongs to another prompt, and when not one sequence fits.
    """
    with AnswerFile(path, settings, target.vocab_size) as file:
        work = _Work(target, tokenizer, prompts, file, settings, max_length, given)
        count = _fitting(target, work, places, cache_limit) if work.queue else 0
        started = time.perf_counter()
        tokens = made = 0
        if work.queue:
            decoder = Decoder(
                target,
                count,
                temp=settings.temp,
                seed=settings.seed,
                end_ids=tokenizer.end_ids,
            )
            while work.queue or decoder.running:
                new = [work.queue.popleft() for _ in range(min(decoder.free, len(work.queue)))]
                done = decoder.start(new) if new else decoder.step()
                for job, answer in done:
                    work.take(job, answer)
                    made += 1
                tokens = decoder.tokens
                speed = tokens / (time.perf_counter() - started)
                progress(len(work.texts), work.total - work.skipped, speed)
        seconds = time.perf_counter() - started
        texts = [
            replace(work.texts[name], source=prompt.source)
            for prompt in prompts
            for name in prompt.answer_names
            if name in work.texts
        ]
    return Answered(texts, work.skipped, made, tokens, count, seconds)


class _Work:
    """Jobs to do and answers there; an answer in the middle of a conversation brings a new job."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        file: AnswerFile,
        settings: AnswerSettings,
        max_length: int | None,
        given: Sequence[Text],
    ) -> None:
        self._given = {text.prompt_ids: text for text in given}
        self._file, self._max_answer = file, settings.max_answer
        self._end_ids = tokenizer.end_ids
        self._context = target.context_length
        self._longest = min(max_length or self._context, self._context)
        self.queue: deque[Job] = deque()
        self.texts: dict[str, Text] = {}
        self.skipped = 0
        self.total = sum(len(prompt.answer_names) for prompt in prompts)
        self._open: dict[str, Conversation] = {}  # by the answer that comes next
        for prompt in prompts:
            self._follow(Conversation(prompt, tokenizer, settings.thinking), self.queue.append)

    def take(self, job: Job, answer: Sequence[int]) -> None:
        """Keep an answer; the conversation's next turn is first in the queue."""
        text = Text(job.name, job.prompt_ids, tuple(answer))
        self._file.add(text)
        self.texts[text.name] = text
        conversation = self._open.pop(job.name)
        if conversation.answer(answer):
            self._follow(conversation, self.queue.appendleft)

    def _follow(self, conversation: Conversation, put: Callable[[Job], None]) -> None:
        """Go through the answers that are in the file, and ask for the first that is not."""
        prompt = conversation.prompt
        while True:
            name, ids = conversation.name, tuple(conversation.ids)
            if len(ids) >= self._longest:
                self.skipped += len(prompt.answer_names) - conversation.turn
                return
            given = self._given.get(ids)
            known = given or self._file.texts.get(name)
            if known is None:
                break
            if given is None:
                self._check(known, ids, prompt)
            self.texts[name] = replace(known, name=name)
            if not conversation.answer(known.answer_ids):
                return
        self._open[name] = conversation
        put(Job(name, ids, self._limit(prompt, ids)))

    def _limit(self, prompt: Prompt, ids: Sequence[int]) -> int:
        """Most tokens of the answer to `ids`."""
        return min(prompt.limit or self._max_answer, self._max_answer, self._context - len(ids))

    def _check(self, known: Text, ids: Sequence[int], prompt: Prompt) -> None:
        """UsageError unless this is what the file would get now."""
        if known.prompt_ids != tuple(ids):
            raise UsageError(
                f"{self._file.path} has an answer {known.name!r} to another prompt than the one "
                "given now. Use another file, or other ids."
            )
        count, limit = len(known.answer_ids), self._limit(prompt, ids)
        if count > limit or (count < limit and known.answer_ids[-1] not in self._end_ids):
            raise UsageError(
                f"{self._file.path} has an answer {known.name!r} that was made with another max: "
                f"it has {counted(count, 'token')}, and {limit} are asked for now. Use another "
                "file, or other ids."
            )

    def longest(self) -> int:
        """Most tokens that a sequence may come to have."""
        own = max(len(job.prompt_ids) + job.limit for job in self.queue)
        further = any(conversation.prompt.further for conversation in self._open.values())
        # A later turn's prompt is not known yet.
        return min(self._context, self._longest + self._max_answer) if further else own


def _fitting(target: Target, work: _Work, places: int, limit: int | None) -> int:
    """Sequences that run at once: as many as asked for, as there are jobs, and as fit."""
    wanted = min(places, len(work.queue))
    if limit is None:
        return wanted
    longest = work.longest()
    each = cache_bytes(target, longest)
    if each > limit:
        raise UsageError(
            f"The caches of one sequence of {longest} tokens take {shown_bytes(each)}, and "
            f"{shown_bytes(limit)} are free for them. Give more --memory, or less --max-answer."
        )
    return min(wanted, limit // each)
