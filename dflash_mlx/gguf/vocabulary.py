"""The tokenizer of a GGUF file, built from its metadata; token ids equal llama.cpp's own.

Like llama.cpp it applies no Unicode normalization, also where the model's original tokenizer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_mlx.errors import CheckpointError
from dflash_mlx.gguf.file import GGUFFile

_KEY = "tokenizer.ggml."

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, marks: str = "") -> str:
    """The split of the Llama 3 and Qwen families, which differ in how they cut digits and marks."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: every pattern splits the pieces of the one before it."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token needs no merges
    adds_bos: bool = False  # when the file does not say


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# tokenizer.ggml.pre -> how it cuts. Only names whose ids were compared with llama.cpp's.
PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _PLAIN_GPT2,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_words(r"\p{N}", marks=r"\p{M}"),)),
}

# Ends of a turn that files often hold as control tokens without naming them in eot or eom keys.
_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")


def end_ids(file: GGUFFile) -> frozenset[int]:
    """The ids that end an answer: eos, eot, eom, and control tokens known to end a turn.

    CheckpointError for metadata of another type.
    """
    ids = {i for name in ("eos", "eot", "eom") if (i := _token_id(file, name)) is not None}
    tokens = _list(file, "tokens", str, [])
    kinds = _list(file, "token_type", int, [])
    named = (tokens.index(name) for name in _END_NAMES if name in tokens)
    ids.update(i for i in named if i < len(kinds) and kinds[i] == TokenType.CONTROL)
    return frozenset(ids)


class Vocabulary(NamedTuple):
    """A GGUF file's tokenizer, its special tokens by transformers' names, and its template."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, unk_token, pad_token, as far as named
    chat_template: str | None


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Build the file's tokenizer from its metadata.

    Raises CheckpointError for a tokenizer model other than byte-level BPE, a pre-tokenizer that is
    not in the table, and missing or inconsistent metadata.
    """
    model = file.metadata.get(f"{_KEY}model")
    if model is None:
        raise _missing(file, "model")
    if model != "gpt2":
        raise CheckpointError(
            f"{file.path} has a tokenizer of kind {model!r:.80}, and only byte-level BPE ('gpt2') "
            "is supported from GGUF. Use the model's safetensors folder instead."
        )
    pre_name = file.metadata.get(f"{_KEY}pre", "default")
    if not isinstance(pre_name, str) or pre_name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path} names the pre-tokenizer {pre_name!r:.80}, and known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's safetensors folder instead."
        )
    pre = PRE_TOKENIZERS[pre_name]
    tokens = _list(file, "tokens", str)
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise _malformed(file, "tokenizer.chat_template", template, "text")
    tokenizer = _bpe(file, pre, tokens)
    named = _named_tokens(file, tokens)
    _frame(file, tokenizer, tokens, pre)
    return Vocabulary(tokenizer, named, template)


def _bpe(file: GGUFFile, pre: PreTokenizer, tokens: list[str]) -> Tokenizer:
    kinds = _list(file, "token_type", int, [int(TokenType.NORMAL)] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file.path} has {len(tokens)} tokens and {len(kinds)} token types. "
            "Download the file again or convert the model again."
        )
    # Unused ids fill the vocabulary up to the model's width; they have no text.
    vocab = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != TokenType.UNUSED
    }
    merges = [_pair(file, merge) for merge in _list(file, "merges", str)]
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the Rust side raises the bare class
        raise CheckpointError(
            f"{file.path} has merges that do not fit its tokens ({error}). "
            "Download the file again or convert the model again."
        ) from error
    tokenizer = Tokenizer(bpe)
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    added = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=added[TokenType(kind)], normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in added
        ]
    )
    return tokenizer


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(
            f"{file.path} has the merge {merge!r}, which is not two tokens. "
            "Download the file again or convert the model again."
        )
    return left, right


def _named_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """The special tokens that the file names, by transformers' names for them."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    named = {}
    for key, short in keys.items():
        index = _token_id(file, key)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise CheckpointError(
                f"{file.path} names token {index} as {key} token of a vocabulary of {len(tokens)}. "
                "Download the file again or convert the model again."
            )
        named[f"{short}_token"] = tokens[index]
    return named


def _frame(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], pre: PreTokenizer) -> None:
    """Let encoding put the begin and end tokens around a text where the file asks for it."""
    pieces, special = ["$A"], {}
    for name, default in (("bos", pre.adds_bos), ("eos", False)):
        if not file.metadata.get(f"{_KEY}add_{name}_token", default):
            continue
        index = _token_id(file, name)
        if index is None:
            raise CheckpointError(
                f"{file.path} asks for a {name} token around every text and names none. "
                "Convert the model again."
            )
        special[tokens[index]] = index
        pieces.insert(0 if name == "bos" else len(pieces), tokens[index])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, pair=[*pieces, "$B:1"], special_tokens=list(special.items())
        )


def _token_id(file: GGUFFile, name: str) -> int | None:
    """The id of a special token as the file states it, None where it states none."""
    key = f"{_KEY}{name}_token_id"
    index = file.metadata.get(key)
    if index is not None and type(index) is not int:
        raise _malformed(file, key, index, "one token id")
    return index


def _list(file: GGUFFile, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """A list of one type; without a default the file has to have it."""
    found = file.metadata.get(f"{_KEY}{name}", default)
    if found is None:
        raise _missing(file, name)
    if not isinstance(found, list) or not set(map(type, found)) <= {kind}:
        wanted = "a list of texts" if kind is str else "a list of whole numbers"
        raise _malformed(file, f"{_KEY}{name}", found, wanted)
    return found


def _malformed(file: GGUFFile, key: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} has {key} = {value!r:.80}, not {wanted}. "
        "Download the file again or convert the model again."
    )


def _missing(file: GGUFFile, name: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} lacks the metadata {_KEY}{name}, so it has no usable tokenizer. "
        "Convert the model again."
    )
