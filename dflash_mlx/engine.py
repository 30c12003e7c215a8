"""The public face: a loaded target and drafter that turn messages into text and statistics."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# This one comes first: it has to act before MLX is imported.
from dflash_mlx.fast_blas import CHOICE as BLAS

# isort: split
import mlx.core as mx

from dflash_mlx import hub, registry
from dflash_mlx.chat import Chat
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Drafter
from dflash_mlx.draft.checkpoint import open_drafter
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.generate import Chunk, Completion, Message, Prompt, Transcript, answer, refuse_empty
from dflash_mlx.loader import load_target
from dflash_mlx.machine import versions
from dflash_mlx.models.base import Target
from dflash_mlx.tokenizer import Tokenizer, load_tokenizer

Input = str | Sequence[Message] | Sequence[int]

#: cycles a generation needs before its speed is compared with plain decoding
COMPARED_CYCLES = 4


class Engine:
    """A target, its tokenizer and, unless decoding is plain, a drafter. Made by `load`.

    Usable from any thread; several generations at once take turns step by step. Nothing is
    shared with another engine in the process.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: Drafter | None,
        *,
        reason: str,
        model: str,
        drafter_name: str | None = None,
        block_size: int | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.reason = reason
        self.model = model
        self.drafter_name = drafter_name
        self.warnings = list(warnings)
        self.block_size = _checked_block_size(block_size, drafter)
        self._versions = versions()  # reading them takes milliseconds
        self._lock = threading.RLock()
        # MLX's default streams belong to their thread; this one serves whichever thread calls.
        self._stream = mx.new_thread_unsafe_stream(mx.default_device())
        self._plain_seconds: dict[int, float] = {}  # by context length, in powers of two

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with self._lock, mx.stream(self._stream):
            yield

    def stream(
        self,
        messages_or_prompt: Input,
        *,
        max_tokens: int = 2048,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        thinking: bool | str | None = None,
        system: str | None = None,
    ) -> Generator[Chunk, None, None]:
        """Answer, chunk by chunk; the last chunk carries the statistics.

        messages_or_prompt: a user's message, a conversation ([{"role", "content"}, ...]), or
        token ids that go to the target as they are. Without a chat template a message is plain
        text to continue.
        sampling: None is greedy. stop: strings before which the text ends.
        thinking: switches the template's reasoning on or off, or names its level ("low"); None
        leaves it to the template.
        Raises UsageError for arguments that cannot be honoured, before anything runs. Closing
        the generator stops the work and frees what it held.
        """
        prompt = self.prompt(messages_or_prompt, thinking, system)
        limit = self.limit(prompt, max_tokens)
        session = self.new_session()
        return self._alone(session, self.answer(session, prompt, limit, sampling, stop))

    def generate(self, messages_or_prompt: Input, **options: Any) -> Completion:
        """`stream` collected into one result; takes the same options."""
        text, reasoning, ids, stats = "", "", [], None
        for chunk in self.stream(messages_or_prompt, **options):
            text += chunk.text
            reasoning += chunk.reasoning
            ids += chunk.token_ids
            stats = chunk.stats
        assert stats is not None
        return Completion(text, reasoning, ids, stats)

    def chat(self, *, system: str | None = None, thinking: bool | str | None = None) -> Chat:
        """A conversation whose turns share one kept cache."""
        return Chat(self, system, thinking)

    def new_session(self) -> Session:
        """An empty sequence for `answer`; its caches live until `free`."""
        return Session(self.target, self.drafter, self._guard, block_size=self.block_size)

    def _alone(
        self, session: Session, answer: Generator[Chunk, None, None]
    ) -> Generator[Chunk, None, None]:
        """Run an answer whose session nobody needs afterwards."""
        try:
            yield from answer
        finally:
            answer.close()
            self.free(session)

    def free(self, session: Session) -> None:
        """Drop a session's caches and give their memory back."""
        with self._guard():
            session.reset()
            mx.clear_cache()

    def prompt(self, given: Input, thinking: bool | str | None, system: str | None) -> Prompt:
        if isinstance(given, str):
            refuse_empty(given)
            if not self.tokenizer.has_template:
                return self._bare_prompt(given, thinking, system)
            given = [{"role": "user", "content": given}]
        if not given:
            raise UsageError("The conversation is empty. Give at least one message.")
        if isinstance(given[0], int):
            return Prompt(self._checked_ids(given), None)
        messages = [dict(m) for m in given if isinstance(m, dict)]
        if system is not None:
            if messages[0].get("role") == "system":
                raise UsageError("A system message is given twice. Drop one of the two.")
            messages = [{"role": "system", "content": system}, *messages]
        text = self.tokenizer.render(messages, thinking=thinking)
        ids = self.tokenizer.chat_ids(messages, thinking=thinking)
        return Prompt(ids, text, self.tokenizer.opens_thinking(text))

    def _bare_prompt(self, text: str, thinking: bool | str | None, system: str | None) -> Prompt:
        if system is not None or thinking is not None:
            raise UsageError(
                f"{self.model} has no chat template, so it knows neither system messages nor "
                "thinking. Leave these options out."
            )
        return Prompt(self.tokenizer.encode(text), text)

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        vocab = self.target.vocab_size
        for index, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise UsageError(
                    f"Token {index} of the prompt is {token!r}. "
                    f"Token ids of {self.model} are whole numbers from 0 to {vocab - 1}."
                )
        return list(ids)

    def limit(self, prompt: Prompt, max_tokens: int) -> int:
        """max_tokens, or less where the model's context ends first."""
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens!r}. Give a whole number above 0.")
        room = self.target.context_length - len(prompt.ids)
        if room < 1:
            raise UsageError(
                f"The prompt has {len(prompt.ids)} tokens and {self.model} was made for a context "
                f"of {self.target.context_length}. Shorten the prompt."
            )
        return min(max_tokens, room)

    def _new_stats(self) -> GenerationStats:
        return GenerationStats(
            engine="dflash" if self.block_size > 1 else "plain",
            engine_reason=self.reason,
            model=self.model,
            drafter=self.drafter_name,
            versions=dict(self._versions),
            blas=f"{BLAS.name}: {BLAS.reason}",
            warnings=list(self.warnings),
        )

    def answer(
        self,
        session: Session,
        prompt: Prompt,
        max_tokens: int,
        sampling: SamplingParams | None,
        stop: Sequence[str],
        transcript: Transcript | None = None,
    ) -> Generator[Chunk, None, None]:
        """Chunks of an answer in a session of this engine."""
        if isinstance(stop, str):
            raise UsageError("stop is a string. Give a list of strings.")
        return answer(
            session,
            self.tokenizer,
            prompt,
            sampling or SamplingParams(),
            max_tokens,
            stop,
            self._new_stats(),
            transcript if transcript is not None else Transcript(),
            self._compare_with_plain,
        )

    def _compare_with_plain(self, session: Session, stats: GenerationStats) -> None:
        """Say plainly when drafting cost time; plain steps are timed once a context size."""
        speed = stats.generation_tps
        if stats.cycles < COMPARED_CYCLES or speed is None or not session.ids:
            return
        bucket = len(session.ids).bit_length()
        if bucket not in self._plain_seconds:
            self._plain_seconds[bucket] = session.time_plain_step()
        stats.plain_tps = 1 / self._plain_seconds[bucket]
        if speed < stats.plain_tps:
            stats.warn(
                f"DFlash was slower here: {speed:.1f} tok/s, where plain decoding makes about "
                f"{stats.plain_tps:.1f} tok/s. Use --no-draft for text like this."
            )


def load(
    name: str,
    *,
    draft: str | None = "auto",
    draft_bits: int | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    block_size: int | None = None,
    progress: bool = True,
) -> Engine:
    """Load a model by name and make it ready to answer.

    name: an alias of models.toml, a hub id, a folder or a GGUF file.
    draft: "auto" takes the drafter the registry knows and falls back to plain decoding with the
    reason in the statistics; None decodes plainly; anything else is a drafter's hub id or
    folder, and an error when it does not serve.
    draft_bits: 4 or 8 quantizes the drafter's linear layers.
    dtype: auto, bfloat16, float16 or float32 (see loader.resolve_dtype).
    revision: of the target's hub repo. block_size: rows a cycle verifies, at most as trained.
    Raises DFlashError with a sentence to show.
    """
    if draft_bits not in (None, 4, 8):
        raise UsageError(f"draft_bits is {draft_bits!r}. Drafters are quantized to 4 or 8 bits.")
    given = draft if draft not in (None, "auto") else None
    found = registry.load_registry().resolve(name, drafter=given)
    wanted = revision or found.target_revision
    fetched = hub.fetch(found.target_spec, revision=wanted, kind="model", progress=progress)
    target = load_target(fetched.path, dtype)
    tokenizer = load_tokenizer(fetched.path)
    model = found.label

    def open_draft() -> Drafter:
        assert found.drafter_spec is not None
        folder = hub.fetch(
            found.drafter_spec, revision=found.drafter_revision, kind="drafter", progress=progress
        ).path
        # float16 overflows in the fused features, so a drafter is bfloat16 beside such a target.
        kind = mx.float32 if target.dtype == mx.float32 else mx.bfloat16
        return open_drafter(folder, target, dtype=kind, bits=draft_bits)

    drafter, reason, warnings = None, "", []
    if draft is None:
        reason = "drafting is switched off"
    elif found.drafter_spec is None:
        reason = f"no drafter is known for {model}"
        if offer := registry.offer(model, hub.base_models(fetched.path)):
            reason += f"; {offer}"
            warnings = [f"Decoding plainly: {reason}."]
    elif given is not None:
        drafter, reason = open_draft(), "the drafter given"
    else:
        try:
            drafter, reason = open_draft(), f"the registry's drafter for {model}"
            assert found.pair is not None
            warnings = found.pair.disagreements(drafter.taps, drafter.block_size)
        except DFlashError as error:
            reason = f"the drafter {found.drafter_spec} could not be used: {error}"
            warnings = [f"Decoding plainly, since {reason}"]
    if drafter is not None and block_size == 1:
        reason = "a block of one row leaves nothing to draft"
    return Engine(
        target,
        tokenizer,
        drafter,
        reason=reason,
        model=model,
        drafter_name=found.drafter_spec if drafter is not None else None,
        block_size=block_size,
        warnings=warnings,
    )


def _checked_block_size(block_size: int | None, drafter: Drafter | None) -> int:
    """Rows a cycle verifies: 1 without a drafter, else at most the trained block."""
    if drafter is None:
        return 1
    if block_size is None:
        return drafter.block_size
    if not 1 <= block_size <= drafter.block_size:
        raise UsageError(
            f"Block size {block_size} does not fit this drafter, which was trained for blocks of "
            f"{drafter.block_size}. Give 1 (plain decoding) to {drafter.block_size}."
        )
    return block_size
