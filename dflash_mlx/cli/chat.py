"""`dflash-mlx chat`: one answer, or a session at the terminal.

Reads options and shows text; everything about models is the engine's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.console import option
from dflash_mlx.cli.options import ReasoningLevel, Thinking, check_place, reasoning_of
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.decode.sampling import SamplingParams
    from dflash_mlx.engine import Engine

DTYPES = ("auto", "bfloat16", "float16", "float32")
DRAFT_BITS = (4, 8)


@dataclass(frozen=True)
class Answering:
    """How to answer, the same for every turn."""

    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    system: str | None
    thinking: bool | str | None  # a string is a reasoning level
    stats: bool | None  # None: the statistics that suit the way of use

    def for_turn(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "sampling": self.sampling, "stop": self.stop}

    def for_answer(self) -> dict[str, Any]:
        return {**self.for_turn(), "system": self.system, "thinking": self.thinking}


_MODEL = "A name of `dflash-mlx models`, a hub id, a folder or a GGUF file."
_PROMPT = "What to answer; - reads standard input. Without it a session starts."
_DRAFT = "Draft with this drafter instead of the model's own."
_BLOCK = "Tokens verified a cycle, the anchor included; 1 is plain decoding, auto what pays."
_TRACE = "Write the choices of --block-size auto to this file, one line a step."

Model = Annotated[str, typer.Argument(help=_MODEL)]
Prompt = Annotated[str | None, typer.Argument(help=_PROMPT, show_default=False)]
Draft = Annotated[str | None, option(_DRAFT, "--draft", metavar="REPO_OR_FOLDER")]
NoDraft = Annotated[bool, option("Decode plainly, without drafts.", "--no-draft")]
Exact = Annotated[bool, option("Text equal to plain decoding's on a GPU, too.", "--exact")]
DraftBits = Annotated[int | None, option("Quantize the drafter.", "--draft-bits", metavar="4|8")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")]
Temp = Annotated[float | None, option("Temperature; 0 (the default) is greedy.", "--temp")]
TopP = Annotated[
    float | None, option("Keep the likeliest tokens up to this probability.", "--top-p")
]
TopK = Annotated[int | None, option("Keep this many of the likeliest tokens; 0 is off.", "--top-k")]
MinP = Annotated[
    float | None, option("Keep tokens this likely relative to the likeliest.", "--min-p")
]
Penalty = Annotated[float | None, option("Above 1 discourages repetition.", "--repetition-penalty")]
Seed = Annotated[int | None, option("Makes sampling repeatable.", "--seed")]
System = Annotated[str | None, option("System message.", "--system")]
BlockSize = Annotated[str, typer.Option("--block-size", metavar="auto|N", help=_BLOCK)]
TraceFile = Annotated[Path | None, option(_TRACE, "--trace", metavar="FILE")]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Number type of the weights.")
]
Stop = Annotated[
    list[str] | None, option("End the answer before this; repeatable.", "--stop", metavar="STRING")
]
Revision = Annotated[
    str | None, option("Commit, tag or branch of the model's hub repo.", "--revision")
]
Stats = Annotated[bool | None, option("Show the statistics, or never.", "--stats/--no-stats")]
Json = Annotated[bool, option("Print one JSON document instead of streamed text.", "--json")]


def chat(
    model: Model,
    prompt: Prompt = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    draft_bits: DraftBits = None,
    max_tokens: MaxTokens = 2048,
    temp: Temp = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    system: System = None,
    thinking: Thinking = None,
    reasoning: ReasoningLevel = None,
    block_size: BlockSize = "auto",
    trace: TraceFile = None,
    exact: Exact = False,
    dtype: Dtype = "auto",
    stop: Stop = None,
    revision: Revision = None,
    stats: Stats = None,
    as_json: Json = False,
) -> None:
    """Answer PROMPT, or talk with MODEL at the terminal."""
    block = parse_block_size(block_size)
    if trace is not None and (block != "auto" or no_draft):
        raise UsageError("--trace writes the choices of --block-size auto. Leave one of them out.")
    _check_loading(draft, no_draft, draft_bits, dtype, max_tokens)
    think = reasoning_of(thinking, reasoning)
    question = _question(prompt, as_json)
    given = {
        "temperature": temp,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    how = Answering(max_tokens, _sampling(given), tuple(stop or ()), system, think, stats)
    from dflash_mlx import engine as engines

    engine = engines.load(
        model,
        draft=None if no_draft else draft or "auto",
        draft_bits=draft_bits,
        dtype=dtype,
        revision=revision,
        block_size=block,
        trace=_trace_writer(trace),
        exact=exact,
    )
    if trace is not None and not engine.automatic:
        console.say(f"There is nothing to trace: decoding is plain ({engine.reason}).")
    if question is None:
        from dflash_mlx.cli.session import run_session

        run_session(engine, how, model)
    elif as_json:
        _answer_as_json(engine, question, how)
    else:
        _answer(engine, question, how)


def parse_block_size(given: str) -> int | Literal["auto"]:
    """What --block-size says; numbers that do not fit the drafter are the engine's to refuse."""
    if given == "auto":
        return "auto"
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"--block-size is {given!r}. Give a whole number or auto.") from None


def _trace_writer(file: Path | None) -> Callable[[str], None] | None:
    """Writes lines as they come to a file that the first one makes; one that fails is told once."""
    if file is None:
        return None
    check_place("--trace", file)
    out: TextIO | None = None
    failed = False

    def write(line: str) -> None:
        nonlocal out, failed
        if failed:
            return
        try:
            out = out or file.open("w", encoding="utf-8", buffering=1)
            print(line, file=out)
        except OSError as error:
            failed = True
            if out is not None:
                with suppress(OSError):  # what it still holds
                    out.close()
            console.say(f"The trace cannot be written to {file} any more ({error.strerror}).")

    return write


def _check_loading(
    draft: str | None, no_draft: bool, draft_bits: int | None, dtype: str, max_tokens: int
) -> None:
    """Refuse what is wrong by itself before anything is fetched or loaded."""
    if no_draft and draft is not None:
        raise UsageError("--draft and --no-draft contradict each other. Leave one of them out.")
    if no_draft and draft_bits is not None:
        raise UsageError("--draft-bits needs a drafter, and --no-draft forbids one. Leave one out.")
    if draft is not None and not draft.strip():
        raise UsageError("--draft is empty. Name a hub repo or a folder.")
    check_draft_bits(draft_bits)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")
    if max_tokens < 1:
        raise UsageError(f"--max-tokens is {max_tokens}. Give a whole number above 0.")


def check_draft_bits(draft_bits: int | None) -> None:
    if draft_bits is not None and draft_bits not in DRAFT_BITS:
        raise UsageError(f"--draft-bits is {draft_bits}. A drafter can be quantized to 4 or 8.")


def _sampling(given: dict[str, Any]) -> SamplingParams:
    """Sampling settings of the options given; the others keep their defaults."""
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # the next line imports MLX
    from dflash_mlx.decode.sampling import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _question(prompt: str | None, as_json: bool) -> str | None:
    """The one prompt to answer, or None for a session at the terminal."""
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        if as_json:
            raise UsageError("--json answers one prompt. Give the prompt, or pipe it in.")
        return None
    question = _read_stdin() if prompt in (None, "-") else prompt
    if question is None or not question.strip():
        raise UsageError("The prompt is empty. Give some text to answer.")
    return question


def _read_stdin() -> str:
    """Standard input as text, without the newline that ends its last line."""
    if sys.stdin is None:
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Standard input is not UTF-8 text (byte {error.start}). Convert it first."
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _answer(engine: Engine, question: str, how: Answering) -> None:
    """Stream one answer to standard output, then its statistics to standard error."""
    writer = console.AnswerWriter()
    final = None
    try:
        for chunk in engine.stream(question, **how.for_answer()):
            writer.write(chunk)
            final = chunk.stats
    finally:
        writer.end()  # also when Ctrl-C stops the answer in the middle of a line
    if final is not None:
        console.Warnings().show(final.warnings)
        if how.stats is not False:
            console.show_stats(final.to_json())


def _answer_as_json(engine: Engine, question: str, how: Answering) -> None:
    completion = engine.generate(question, **how.for_answer())
    console.Warnings().show(completion.stats.warnings)
    if how.stats:
        console.show_stats(completion.stats.to_json())
    print(json.dumps(completion.to_json(), ensure_ascii=False))
