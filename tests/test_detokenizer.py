"""Streamed text equals text decoded at once, for every decoder, also on bytes that are no UTF-8."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from gguf_files import byte_chars
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import CheckpointError
from dflash_mlx.tokenizer import Tokenizer

LLAMA2 = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
WORDS = ["▁the", "▁", "▁▁", "he", "llo", ",", "▁n't", "é", "🙂", "▁a▁b", "<0x", "\ufffd"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> list[str]:
    """Every byte, words, and tokens that end or begin inside a character."""
    chars = byte_chars()
    runs = [" the", "!!", "\n\n", "🙂", "é", " n't", "\ufffd"]
    encoded = [run.encode() for run in runs]
    encoded += ["🙂".encode()[:2], "🙂".encode()[2:], "语".encode()[:2], b"\xbf a", b"\xff\xfe"]
    return [*chars, *("".join(chars[b] for b in run) for run in encoded)]


def build(decoder: decoders.Decoder, tokens: Sequence[str], clean: bool = False) -> Tokenizer:
    """A tokenizer of these tokens, then one special and two ordinary added ones."""
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(["<end>"])
    backend.add_tokens([AddedToken("<tool é>"), AddedToken("日本")])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=clean
    )
    return Tokenizer(hf, frozenset({len(tokens)}), "tiny")


TOKENIZERS = {
    "byte-level": (decoders.ByteLevel(), byte_level()),
    "byte-level in a sequence": (decoders.Sequence([decoders.ByteLevel()]), byte_level()),
    "llama 2": (LLAMA2, [*BYTES, *WORDS]),
    "gemma": (GEMMA, [*BYTES, *WORDS]),
    "metaspace": (decoders.Metaspace(), WORDS),
    "metaspace first": (decoders.Metaspace(prepend_scheme="first"), WORDS),
    "metaspace never": (decoders.Metaspace(prepend_scheme="never"), WORDS),
}


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text_decoded_at_once(name: str, clean: bool) -> None:
    decoder, tokens = TOKENIZERS[name]
    tokenizer = build(decoder, tokens, clean)
    rng = random.Random(name)
    size, replaced, held = len(tokens), 0, 0
    plain = [i for i, token in enumerate(tokens) if token not in BYTES]
    for _ in range(1500):
        pool = [range(size + 3), range(size - 12, size + 3), plain, range(size // 2, size)][
            rng.randrange(4)
        ]
        ids = [rng.choice(pool) for _ in range(rng.randrange(14))]
        stream, pieces, rest = tokenizer.detokenizer(), [], list(ids)
        while rest:
            count = rng.randrange(1, 5)
            pieces.append(stream.add(rest[:count]))
            del rest[:count]
        before_end = len("".join(pieces))
        text = "".join(pieces) + stream.finish()
        assert text == tokenizer.decode(ids), ids
        assert "<end>" not in text
        replaced += "\ufffd" in text
        held += len(text) > before_end
    assert replaced > 20  # the sequences did contain broken characters
    assert held > 20 or name.startswith("metaspace")


def test_valid_text_by_single_bytes_comes_in_whole_characters() -> None:
    tokenizer = build(*TOKENIZERS["byte-level"])
    text = "Grüße, 世界! 👩‍👩‍👧 e\u0301"
    stream = tokenizer.detokenizer()
    pieces = [stream.add([byte]) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.finish() == ""


def test_replacement_only_when_it_is_certain() -> None:
    tokenizer = build(*TOKENIZERS["byte-level"])
    stream = tokenizer.detokenizer()
    assert stream.add(list("世".encode())[:2]) == ""  # may still become a character
    assert stream.add([ord("a")]) == "\ufffda"
    assert stream.add([0xFF]) == "\ufffd"  # begins no character
    assert stream.add(list("🙂".encode())[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_do_not_part_a_character() -> None:
    tokenizer = build(*TOKENIZERS["byte-level"])
    stream, end = tokenizer.detokenizer(), max(tokenizer.end_ids)
    first, second = "é".encode()
    assert [stream.add([first]), stream.add([end]), stream.add([second])] == ["", "", "é"]


def test_byte_fallback_waits_for_the_end_of_the_run() -> None:
    tokenizer = build(*TOKENIZERS["gemma"])
    he = 256 + WORDS.index("he")
    stream = tokenizer.detokenizer()
    assert stream.add(list("é".encode())) == ""  # one more bad byte would turn all of it
    assert stream.add([he]) == "éhe"
    assert stream.add([*"é".encode(), 0xFF]) == ""
    assert stream.add([he]) == "\ufffd\ufffd\ufffdhe"


def test_leading_space_of_sentencepiece() -> None:
    the = 256 + WORDS.index("▁the")
    for name, text in (("llama 2", "the the"), ("gemma", " the the")):
        tokenizer = build(*TOKENIZERS[name])
        stream = tokenizer.detokenizer()
        assert stream.add([max(tokenizer.end_ids)]) == ""
        assert stream.add([the]) + stream.add([the]) + stream.finish() == text


def test_spaces_before_punctuation_stay() -> None:
    """`clean_up_tokenization_spaces` would make "x!= y" of "x != y"."""
    tokenizer = build(*TOKENIZERS["byte-level"], clean=True)
    ids = list(b"x != y , z n't")
    assert tokenizer.decode(ids) == "x != y , z n't"


def test_each_token_is_looked_up_once() -> None:
    tokenizer = build(*TOKENIZERS["byte-level"])
    stream, asked = tokenizer.detokenizer(), []
    lookup = stream._token
    stream._token = lambda i: asked.append(i) or lookup(i)  # type: ignore[method-assign]
    ids = [0xE4] * 300 + list(b"abc") * 100  # one unfinished character after the other
    for i in ids:
        stream.add([i])
    assert asked == ids


@pytest.mark.parametrize(
    ("decoder", "shown"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace(Regex("a+"), "b"), decoders.Fuse()]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), r"Fuse \+ Strip"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]), "ByteFallback"),
        (None, "none"),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(
    decoder: decoders.Decoder | None, shown: str
) -> None:
    with pytest.raises(CheckpointError, match=f"tiny has a tokenizer with the decoder {shown}"):
        build(decoder, WORDS)
