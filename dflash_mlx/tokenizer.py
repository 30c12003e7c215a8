"""Text to token ids and back: encoding, chat templates, end ids, thinking tags.

Wraps transformers' fast tokenizer, read from a model folder or built from a GGUF file's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# transformers says on import that it found no PyTorch; nothing here uses it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from dflash_mlx.detokenizer import StreamDetokenizer, pieces_factory
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.text import CHANNEL_MARKS

_THINK_TAGS = ("<think>", "</think>")
_LEVEL_NAMES = ("reasoning_effort", "reasoning_strength")  # what templates call the level
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

Message = Mapping[str, Any]


class Tokenizer:
    """A model's tokenizer, chat template and end ids. Immutable; safe to share between threads."""

    end_ids: frozenset[int]  # any of these ends an answer
    think_tags: tuple[str, str] | None  # around the model's reasoning, for models that reason
    has_channels: bool  # answers come as messages on channels, in the harmony format

    def __init__(self, hf: PreTrainedTokenizerFast, end_ids: frozenset[int], name: str) -> None:
        """`hf` is taken over; `name` is what error messages call the model."""
        self._hf, self._name = hf, name
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        template = hf.chat_template
        if isinstance(template, dict):  # several named templates; transformers picks "default"
            template = template.get("default")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(
                f"The chat_template of {name} is {template!r:.80}, which is no text. "
                "Fetch the model again."
            )
        self._template: str = template or ""
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        marks = {self._backend.token_to_id(mark) for mark in CHANNEL_MARKS}
        self.has_channels = marks <= self._special and CHANNEL_MARKS[1] in self._template
        self._streamed_special = self._special - (marks if self.has_channels else set())
        self._pieces = pieces_factory(self._backend, name)
        self.end_ids = end_ids
        known = all(tag in self._template for tag in _THINK_TAGS) or all(
            self._backend.token_to_id(tag) is not None for tag in _THINK_TAGS
        )
        self.think_tags = _THINK_TAGS if known else None

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into the folder."""
        self._hf.save_pretrained(folder)

    @property
    def has_template(self) -> bool:
        return bool(self._template)

    @property
    def mask_id(self) -> int | None:
        """The mask token, where the tokenizer names one."""
        return self._hf.mask_token_id

    @property
    def size(self) -> int:
        """One more than the largest id that stands for a token."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def spare_control_id(self) -> int | None:
        """The first special token that no part of a conversation is: not in the chat template, no
        begin, end, padding or unknown token. None when there is none.
        """
        hf = self._hf
        named = {hf.bos_token_id, hf.eos_token_id, hf.pad_token_id, hf.unk_token_id, *self.end_ids}
        free = (
            token
            for token in sorted(self._special - named)
            if self.token_text(token) not in self._template
        )
        return next(free, None)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, framed as the tokenizer does by itself (often one BOS in front).

        A text that begins with the BOS token already gets no second one.
        """
        ids = self._backend.encode(text).ids
        bos = self._hf.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text alone; special tokens written in it are recognised."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens.

        Spaces before punctuation stay, whatever `clean_up_tokenization_spaces` says: taking them
        out changes code that the model wrote.
        """
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """A special or added token as templates write it; "" for an id without a token."""
        return self._backend.id_to_token(token) or ""

    def detokenizer(self) -> StreamDetokenizer:
        """Fresh streaming state; the texts it gives join to `decode` of all ids.

        With `has_channels` the marks of the format stay in these texts, for `text.Channels`.
        """
        return StreamDetokenizer(self._backend, self._streamed_special, self._pieces())

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat template's text for messages (`role` and `content`), ready for an answer.

        `thinking` is the template's `enable_thinking`, or as a string its `reasoning_effort` or
        `reasoning_strength`, whichever it reads; None leaves it to the template. Raises UsageError
        for messages the template refuses and for `thinking` where it knows no such mode,
        CheckpointError for a template that fails.
        """
        if not self._template:
            raise UsageError(
                f"{self._name} has no chat template. Give a raw prompt or use an instruct model."
            )
        extra: dict[str, Any] = {}
        if isinstance(thinking, str):
            extra = {name: thinking for name in _LEVEL_NAMES if name in self._template}
            if not extra:
                raise UsageError(
                    f"The chat template of {self._name} has no reasoning levels to set to "
                    f"{thinking}. Leave the reasoning option away."
                )
        elif thinking is not None:
            if "enable_thinking" not in self._template:
                raise UsageError(
                    f"The chat template of {self._name} has no thinking mode to turn "
                    f"{'on' if thinking else 'off'}. Leave the thinking option away."
                )
            extra["enable_thinking"] = thinking
        checked = [dict(_checked(message)) for message in messages]
        try:
            text = self._hf.apply_chat_template(
                checked,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **extra,
            )
        except TemplateError as error:
            raise UsageError(
                f"The chat template of {self._name} refuses these messages: {error}. "
                "Change their roles or their order."
            ) from error
        except Exception as error:  # a template is a program, which can fail in any way
            raise CheckpointError(
                f"The chat template of {self._name} fails ({type(error).__name__}: {error}). "
                "Fetch the model again, or give a prompt as token ids."
            ) from error
        assert isinstance(text, str)  # tokenize=False
        return text

    def chat_ids(
        self, messages: Sequence[Message], thinking: bool | str | None = None
    ) -> list[int]:
        """Ids of the rendered messages; the template alone says whether there is a BOS."""
        return self.encode_plain(self.render(messages, thinking))

    def opens_thinking(self, rendered_prompt: str) -> bool:
        """Whether the prompt ends inside a think block: the answer then begins with reasoning.

        With `has_channels`, whether it ends inside a message's header.
        """
        if self.has_channels:
            _, mark, role = rendered_prompt.rpartition(CHANNEL_MARKS[0])
            return bool(mark) and role.isalpha()
        return self.think_tags is not None and rendered_prompt.rstrip().endswith(self.think_tags[0])


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or GGUF file.

    Raises CheckpointError when there is none, or one that cannot be read or streamed.
    """
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    # Only here: the gguf package costs half a second that folders need not pay.
    from dflash_mlx.gguf.file import read_gguf
    from dflash_mlx.gguf.vocabulary import end_ids, read_vocabulary

    file = read_gguf(path)
    vocabulary = read_vocabulary(file)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.tokenizer,
        chat_template=vocabulary.chat_template,
        **vocabulary.special_tokens,
    )
    return Tokenizer(hf, end_ids(file), path.name)


def _from_folder(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there. "
            "Fetch the complete model, or put its tokenizer files into the folder."
        )
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids |= _configured_end_ids(path / name)
    try:
        hf = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a broken folder
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"The tokenizer in {path} cannot be read ({reason}). Fetch the model again."
        ) from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise CheckpointError(
            f"The tokenizer in {path} is a {type(hf).__name__} without a fast version. "
            "Convert it to tokenizer.json."
        )
    if hf.eos_token_id is not None:
        ids.add(hf.eos_token_id)
    return Tokenizer(hf, frozenset(ids), path.name)


def _configured_end_ids(file: Path) -> set[int]:
    """The `eos_token_id` of a config file, also that of its `text_config`; empty without one."""
    if not file.is_file():
        return set()
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}). Fetch the model again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is no JSON object. Fetch the model again.")
    found: set[int] = set()
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{file} has text_config {text!r:.80}, which is no object. "
            "Correct the file or fetch the model again."
        )
    for level in (config, text):
        value = level.get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(v) is int for v in values):
            raise CheckpointError(
                f"{file} has eos_token_id {value!r:.80}, which is no token id or list of them. "
                "Correct the file or fetch the model again."
            )
        found.update(values)
    return found


def _checked(message: Message) -> Message:
    for key in ("role", "content"):
        if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
            raise UsageError(
                f"A message needs the strings 'role' and 'content', and {message!r} lacks {key!r}. "
                "Write every message as {'role': 'user', 'content': '…'}."
            )
    return message
