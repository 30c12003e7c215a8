"""A conversation on one kept cache: a turn feeds the target only its new tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.errors import UsageError
from dflash_mlx.generate import Chunk, Transcript
from dflash_mlx.prompt import Message, Prompt, refuse_empty

if TYPE_CHECKING:
    from dflash_mlx.engine import Engine


class Chat:
    """A conversation on one kept cache: a turn feeds the target only its new tokens."""

    def __init__(self, engine: Engine, system: str | None, thinking: bool | str | None) -> None:
        self._engine = engine
        self._system = system
        self._thinking = thinking
        self._session = engine.new_session()
        self._open: Generator[Chunk, None, None] | None = None  # the last answer's stream
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays. An open answer is closed."""
        self._close()
        system = self._system
        self.messages: list[Message] = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self.stats: GenerationStats | None = None
        self._shown: str | None = None  # the text that self._ids spell, None when unsure
        self._ids: list[int] = []
        self._engine.free(self._session)

    def send(
        self,
        text: str,
        *,
        max_tokens: int = 2048,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[Chunk, None, None]:
        """Answer the next user message; options and chunks as in `Engine.stream`.

        Closing the generator keeps what was said so far in the conversation. One answer runs at
        a time: an earlier one that is still open is closed.
        """
        refuse_empty(text)
        self._close()
        user: Message = {"role": "user", "content": text}
        prompt = self._prompt([*self.messages, user])
        limit = self._engine.limit(prompt, max_tokens)
        self._open = self._turn(user, prompt, limit, sampling, stop)
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            try:
                self._open.close()
            except ValueError:  # it is running: its thread holds the caches
                raise UsageError(
                    "An answer of this chat is running in another thread. Wait for it to end."
                ) from None
            self._open = None

    def _prompt(self, messages: list[Message]) -> Prompt:
        """The conversation as tokens, those already run kept as they were generated.

        Text can have several spellings in tokens; encoding the history again could differ from
        what the target generated, and the kept cache would be lost.
        """
        engine = self._engine
        prompt = engine.prompt(messages, self._thinking, None)
        if self._shown is None or prompt.text is None or not prompt.text.startswith(self._shown):
            return prompt
        news = engine.tokenizer.encode_plain(prompt.text[len(self._shown) :])
        return Prompt(self._ids + news, prompt.text, prompt.thinking)

    def _turn(
        self,
        user: Message,
        prompt: Prompt,
        limit: int,
        sampling: SamplingParams | None,
        stop: Sequence[str],
    ) -> Generator[Chunk, None, None]:
        said, stats = Transcript(), self._engine.new_stats()
        answer = self._engine.answer(self._session, prompt, limit, sampling, stop, said, stats)
        self.stats = stats  # from the start, so that an answer that was stopped has some
        visible = ""
        try:
            for chunk in answer:
                visible += chunk.text
                yield chunk
        finally:
            answer.close()
            if said.ids:
                self.messages += [user, {"role": "assistant", "content": visible}]
                self._remember(prompt, said, visible)

    def _remember(self, prompt: Prompt, said: Transcript, visible: str) -> None:
        tokenizer = self._engine.tokenizer
        self._ids = prompt.ids + said.ids
        self._shown = None
        # Text held back by a stop string or a tag could look like the start of the template's
        # next mark; the history is encoded anew then.
        if prompt.text is not None and said.text == visible:
            ended = said.ids[-1] in tokenizer.end_ids
            end = tokenizer.token_text(said.ids[-1]) if ended else ""
            self._shown = prompt.text + said.text + end
