"""The public face: a loaded target and drafter that turn messages into text and statistics."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

# This one comes first: it has to act before MLX is imported.
from dflash_mlx.fast_blas import CHOICE as BLAS

# isort: split
import mlx.core as mx

from dflash_mlx import hub, kernels, registry
from dflash_mlx.calibration import Say
from dflash_mlx.chat import Chat
from dflash_mlx.decode.costs import Costs
from dflash_mlx.decode.pace import Trace
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft.base import Drafter
from dflash_mlx.drafting import Drafting, check_loading, checked_block_size, choose_drafter
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.generate import Chunk, Completion, Transcript, answer
from dflash_mlx.hub.request import say
from dflash_mlx.loader import load_target
from dflash_mlx.machine import versions
from dflash_mlx.models.base import Target
from dflash_mlx.models.exact import MAX_ROWS as EXACT_ROWS
from dflash_mlx.models.exact import make_exact
from dflash_mlx.pacing import Pacing
from dflash_mlx.prompt import (
    Message,
    Prompt,
    as_items,
    checked_ids,
    checked_messages,
    checked_stops,
    refuse_empty,
)
from dflash_mlx.tokenizer import Tokenizer, load_tokenizer

Input = str | Sequence[Message] | Sequence[int]


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
        block_size: int | Literal["auto"] | None = None,
        trace: Trace | None = None,
        warnings: Sequence[str] = (),
        revisions: tuple[str | None, str | None] = (None, None),
        exact: bool = False,
        path: Path | None = None,
        say: Say | None = None,
    ) -> None:
        self.exact = exact
        self.path = path  # of the target: a folder or a GGUF file
        self.revisions = revisions  # of target and drafter, as the hub names them
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.reason = reason
        self.model = model
        self.drafter_name = drafter_name
        self._warnings = list(warnings)
        #: the policy chooses the drafts of each step, up to block_size - 1
        self.automatic = block_size == "auto" and drafter is not None
        self.block_size = checked_block_size(block_size, drafter)
        if self.automatic and exact:
            self.block_size = min(self.block_size, EXACT_ROWS)
        if exact and self.block_size > EXACT_ROWS:
            raise UsageError(
                f"Exact mode verifies at most {EXACT_ROWS} rows and a block has {self.block_size}. "
                f"Give --block-size {EXACT_ROWS}."
            )
        self._versions = versions()  # reading them takes milliseconds
        self._lock = threading.RLock()
        self._process = os.getpid()
        # MLX's default streams belong to their thread; this one serves whichever thread calls.
        self._stream = mx.new_thread_unsafe_stream(mx.default_device())
        self._pacing = Pacing(
            target,
            drafter,
            self._guard,
            self.block_size,
            automatic=self.automatic,
            trace=trace,
            say=say,
        )

    @property
    def warnings(self) -> list[str]:
        """Sentences a person should see with every answer."""
        return self._warnings + self._pacing.warnings

    @contextmanager
    def _guard(self) -> Iterator[None]:
        self._refuse_fork()
        with self._lock, mx.stream(self._stream):
            yield

    def _refuse_fork(self) -> None:
        """UsageError in a forked process: without MLX's threads it would wait forever."""
        if os.getpid() != self._process:
            raise UsageError(
                f"This engine belongs to another process ({self._process}), of which this one is a "
                "copy. Load one in each process."
            )

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
        return Session(
            self.target,
            self.drafter,
            self._guard,
            block_size=self.block_size,
            pace=self._pacing.pace,
            exact=self.exact,
        )

    def calibrate(self, seconds: float | None = None, *, anew: bool = False) -> Costs:
        """What cycles cost here: as stored for this machine, else measured, in about `seconds`.

        anew: measure and store again. UsageError for an engine without a drafter.
        """
        if self.drafter is None or self.block_size < 2:
            raise UsageError(
                f"{self.model} runs without a drafter here ({self.reason}), so there is nothing to "
                "calibrate. Name a drafter with --draft."
            )
        self._refuse_fork()
        with self._lock:
            return self._pacing.costs(seconds, anew=anew)

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
        """Drop a session's caches and give their memory back; of another process's nothing."""
        if os.getpid() != self._process:
            return
        with self._guard():
            session.reset()
            mx.clear_cache()

    def prompt(self, given: Input, thinking: bool | str | None, system: str | None) -> Prompt:
        """What `stream` was given as the target will see it; UsageError names what is wrong."""
        if isinstance(given, str):
            refuse_empty(given)
            if not self.tokenizer.has_template:
                return self._bare_prompt(given, thinking, system)
            given = [{"role": "user", "content": given}]
        items = as_items(given)
        if not isinstance(items[0], Mapping | str | tuple | list):
            if system is not None or thinking is not None:
                raise UsageError(
                    "A prompt of token ids has no system message and no thinking mode. "
                    "Leave these options out."
                )
            return Prompt(checked_ids(items, self.target.vocab_size, self.model), None)
        messages = checked_messages(items, system)
        text = self.tokenizer.render(messages, thinking=thinking)
        ids = self._known(self.tokenizer.encode_plain(text))
        if not ids:
            raise CheckpointError(
                f"The chat template of {self.model} makes nothing of these messages; fetch the "
                "model again, or give the prompt as token ids."
            )
        return Prompt(ids, text, self.tokenizer.opens_thinking(text))

    def _known(self, ids: list[int]) -> list[int]:
        """The ids; CheckpointError for one that the target has no embedding for."""
        if ids and max(ids) >= self.target.vocab_size:
            raise CheckpointError(
                f"The tokenizer of {self.model} makes token {max(ids)}, and the model has "
                f"{self.target.vocab_size} tokens; use the tokenizer that belongs to these weights."
            )
        return ids

    def _bare_prompt(self, text: str, thinking: bool | str | None, system: str | None) -> Prompt:
        if system is not None or thinking is not None:
            raise UsageError(
                f"{self.model} has no chat template, so it knows neither system messages nor "
                "thinking. Leave these options out."
            )
        return Prompt(self._known(self.tokenizer.encode(text)), text)

    def limit(self, prompt: Prompt, max_tokens: int) -> int:
        """max_tokens, or less where the model's context ends first."""
        whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        if not whole or max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens!r}. Give a whole number above 0.")
        room = self.target.context_length - len(prompt.ids)
        if room < 1:
            raise UsageError(
                f"The prompt has {len(prompt.ids)} tokens and {self.model} was made for a context "
                f"of {self.target.context_length}. Shorten the prompt."
            )
        return min(max_tokens, room)

    def new_stats(self) -> GenerationStats:
        """Statistics of a generation that has not begun."""
        return GenerationStats(
            engine="dflash" if self.block_size > 1 else "plain",
            engine_reason=self.reason,
            exact=self.exact,
            model=self.model,
            drafter=self.drafter_name,
            model_revision=self.revisions[0],
            drafter_revision=self.revisions[1],
            versions=dict(self._versions),
            blas=f"{BLAS.name}: {BLAS.reason}",
            kernels=kernels.status(),
            warnings=self.warnings,
        )

    def answer(
        self,
        session: Session,
        prompt: Prompt,
        max_tokens: int,
        sampling: SamplingParams | None,
        stop: Sequence[str],
        transcript: Transcript | None = None,
        stats: GenerationStats | None = None,
    ) -> Generator[Chunk, None, None]:
        """Chunks of an answer in a session of this engine; UsageError for unusable stops."""
        params = sampling or SamplingParams()
        stops = checked_stops(stop)
        if self._pacing.automatic:
            self.calibrate()  # here, or a first answer's clock would count the measuring
        stats = stats if stats is not None else self.new_stats()
        idle = params.without_effect()
        if self._pacing.automatic and params.seed is not None and params.greedy:
            idle.remove("seed")  # it keeps the costs behind the chosen blocks as they are stored
        if idle:
            stats.warn(
                f"Without effect at temperature 0, where decoding is greedy: {', '.join(idle)}. "
                "Set a temperature too."
            )
        return answer(
            session,
            self.tokenizer,
            prompt,
            params,
            max_tokens,
            stops,
            stats,
            transcript if transcript is not None else Transcript(),
            self._conclude,
        )

    def _conclude(self, session: Session, stats: GenerationStats) -> None:
        stats.kernels = kernels.status()
        for sentence in self.warnings:
            stats.warn(sentence)
        self._pacing.compare_with_plain(session, stats)


def load(
    name: str,
    *,
    draft: str | None = "auto",
    draft_bits: int | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    block_size: int | Literal["auto"] | None = "auto",
    trace: Trace | None = None,
    exact: bool = False,
    progress: bool = True,
) -> Engine:
    """Load a model by name and make it ready to answer.

    name: an alias of models.toml, a hub id, a folder or a GGUF file.
    draft: "auto" takes the drafter the registry knows, or the one a conversion put beside the
    target, and falls back to plain decoding with the reason in the statistics; None decodes
    plainly; anything else is a drafter's hub id or folder, and an error when it does not serve.
    draft_bits: 4 or 8 quantizes the drafter's linear layers.
    dtype: auto, bfloat16, float16 or float32 (see loader.resolve_dtype).
    revision: of the target's hub repo.
    block_size: rows a cycle verifies, at most as trained; None is as trained. "auto" verifies what
    pays and decodes plainly where nothing does; the first answer waits until that is measured.
    trace: gets a JSON line for each step of "auto".
    exact: greedy text equals plain decoding's on a GPU, too; see models.exact.
    Raises DFlashError with a sentence to show.
    """
    check_loading(name, draft, draft_bits, block_size)
    given = draft if draft not in (None, "auto") else None
    found = registry.load_registry().resolve(name, drafter=given)
    wanted = revision or found.target_revision
    fetched = hub.fetch(found.target_spec, revision=wanted, kind="model", progress=progress)
    target = load_target(fetched.path, dtype)
    if exact:
        make_exact(target)
    tokenizer = load_tokenizer(fetched.path)
    model = found.label
    chosen = Drafting(reason="drafting is switched off")
    if draft is not None:
        named = given is not None
        chosen = choose_drafter(found, fetched.path, model, target, named, draft_bits, progress)
    if chosen.drafter is not None and block_size == 1:
        chosen.reason = "a block of one row leaves nothing to draft"
    return Engine(
        target,
        tokenizer,
        chosen.drafter,
        reason=chosen.reason,
        model=model,
        drafter_name=chosen.name,
        block_size=block_size,
        trace=trace,
        warnings=chosen.warnings,
        revisions=(fetched.revision, chosen.revision),
        exact=exact,
        path=fetched.path,
        say=say if progress else None,
    )
