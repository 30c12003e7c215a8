"""Encoding, templates and end ids: held to llama.cpp's ids and to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import BOS, EOS, MERGES, TOKENS, TOOL, TURN, UNUSED, tiny_gguf, tokenizer_fields
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_mlx.errors import CheckpointError, DFlashError, UsageError
from dflash_mlx.gguf.file import GGUFFile, read_gguf
from dflash_mlx.gguf.vocabulary import PRE_TOKENIZERS, read_vocabulary
from dflash_mlx.tokenizer import Tokenizer, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens" / "tokenizer"
USER = {"role": "user", "content": "Hi in"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.role + ': ' + m.content + '<turn>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name).read_text("utf-8"))


def tiny(tmp_path: Path, template: str | None = None, **changes: Any) -> Path:
    fields = tokenizer_fields(**changes)
    if template is not None:
        fields["tokenizer.chat_template"] = template
    return tiny_gguf(tmp_path / "tiny.gguf", tokenizer=fields)


def hf_folder(path: Path, source: Path, template: str = TEMPLATE, **settings: Any) -> Path:
    """A model folder with the tiny tokenizer, BOS in front of every text, and token configs."""
    backend = read_vocabulary(read_gguf(source)).tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B:1"], special_tokens=[("<s>", BOS)]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        **settings,
    )
    hf.save_pretrained(path)
    return path


# llama.cpp's ids, on SmolLM2's vocabulary


@pytest.fixture(scope="module")
def smollm2_file(smollm2_gguf: Path) -> GGUFFile:
    return read_gguf(smollm2_gguf)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def cut_as(smollm2_file: GGUFFile) -> Callable[[str], Backend]:
    def build(name: str) -> Backend:
        metadata = dict(smollm2_file.metadata)
        metadata["tokenizer.ggml.pre"] = name
        del metadata["tokenizer.ggml.add_bos_token"]
        return read_vocabulary(replace(smollm2_file, metadata=metadata)).tokenizer

    return build


@pytest.mark.smollm2
@pytest.mark.parametrize("name", golden("llama_cpp.json")["smollm2"])
def test_ids_are_llama_cpps(name: str, cut_as: Callable[[str], Backend]) -> None:
    goldens = golden("llama_cpp.json")
    tokenizer = cut_as(name)
    for text, ids in zip(goldens["strings"], goldens["smollm2"][name], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.smollm2
def test_begin_tokens_are_llama_cpps(cut_as: Callable[[str], Backend]) -> None:
    goldens = golden("llama_cpp.json")["framed_hi"]
    assert goldens.keys() == PRE_TOKENIZERS.keys()
    for name in ("smollm", "llama-bpe", "smaug-bpe", "qwen2"):
        assert cut_as(name).encode("Hi").ids == goldens[name]


def reduced(name: str, cut: str) -> Backend:
    """The part of another family's vocabulary that the golden strings need."""
    vocabulary = golden("llama_cpp.json")["reduced"][name]
    fields = tokenizer_fields(pre=cut, add_bos_token=False, eot_token_id=None, token_type=None)
    fields |= {f"tokenizer.ggml.{key}": vocabulary[key] for key in ("tokens", "merges")}
    return read_vocabulary(GGUFFile(Path("reduced.gguf"), fields, {})).tokenizer


@pytest.mark.parametrize("name", golden("llama_cpp.json")["reduced"])
def test_ids_of_other_families_are_llama_cpps(name: str) -> None:
    goldens = golden("llama_cpp.json")
    rows = list(zip(goldens["strings"], goldens["reduced"][name]["ids"], strict=True))
    tokenizer = reduced(name, name)
    for text, ids in rows:
        assert tokenizer.encode(text).ids == ids, text
    # The golden has teeth: cut in most other ways, several strings come out otherwise. (Llama 3's
    # way differs only in runs of digits, and qwen2 has no token of two.)
    for other in {"qwen2", "smollm", "gpt-2", "default"} - {name}:
        tokenizer = reduced(name, other)
        assert sum(tokenizer.encode(text).ids != ids for text, ids in rows) >= 3, other


def test_every_way_to_cut_is_tested() -> None:
    goldens = golden("llama_cpp.json")
    names = {*goldens["smollm2"], *goldens["reduced"], *CUTS}
    assert {PRE_TOKENIZERS[name] for name in names} == set(PRE_TOKENIZERS.values())


@pytest.mark.smollm2
def test_special_tokens_in_a_text(smollm2: Tokenizer) -> None:
    goldens = golden("llama_cpp.json")
    for text, ids in zip(goldens["special_strings"], goldens["special_ids"], strict=True):
        assert smollm2.encode_plain(text) == ids, text
    assert smollm2.decode(smollm2.encode_plain("a<|im_end|>b")) == "ab"


@pytest.mark.smollm2
def test_decoding_gives_the_text_back(smollm2: Tokenizer) -> None:
    for text in golden("llama_cpp.json")["strings"]:
        ids, stream = smollm2.encode_plain(text), smollm2.detokenizer()
        assert smollm2.decode(ids) == text
        assert "".join(stream.add([i]) for i in ids) + stream.finish() == text


@pytest.mark.smollm2
def test_smollm2_chats(smollm2: Tokenizer) -> None:
    for chat in golden("llama_cpp.json")["chats"]:
        assert smollm2.render(chat["messages"]) == chat["text"]
        assert smollm2.chat_ids(chat["messages"]) == chat["ids"]
    for prompt in golden("prompts.json")["prompts"]:
        messages = [{"role": "user", "content": prompt["content"]}]
        assert smollm2.chat_ids(messages) == prompt["prompt_ids"]
    assert smollm2.end_ids == {2}
    assert smollm2.think_tags is None


# Pre-tokenizers of other families, cut by hand


CUT_TEXT = "I'LL pay 12345, don't!!\n\n   xि्x"
CUTS = {
    "smollm": "I|'|LL| pay| |1|2|3|4|5|,| don|'t|!!|\n\n  | x|ि्|x",
    "gpt-2": "I|'|LL| pay| 12345|,| don|'t|!!|\n\n  | x|ि्|x",
    "llama-bpe": "I|'LL| pay| |123|45|,| don|'t|!!\n\n|  | x|ि्|x",
    "qwen2": "I|'LL| pay| |1|2|3|4|5|,| don|'t|!!\n\n|  | x|ि्|x",
    "qwen35": "I|'LL| pay| |1|2|3|4|5|,| don|'t|!!\n\n|  | xि्x",
}


@pytest.mark.parametrize("name", CUTS)
def test_ways_to_cut(tmp_path: Path, name: str) -> None:
    cutter = read_vocabulary(read_gguf(tiny(tmp_path, pre=name))).tokenizer.pre_tokenizer
    spans = [span for _, span in cutter.pre_tokenize_str(CUT_TEXT)]
    assert "|".join(CUT_TEXT[a:b] for a, b in spans) == CUTS[name]


# A tiny byte-level vocabulary


def test_tiny_encoding(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny(tmp_path))
    assert tokenizer.encode_plain("in t's") == [256, 257, 258]
    assert tokenizer.encode_plain("é") == list("é".encode())
    assert tokenizer.encode("<tool>in<turn>") == [TOOL, 256, TURN]
    assert tokenizer.decode([256, TOOL, TURN, 257]) == "in<tool> t"  # only control tokens go
    assert tokenizer.encode_plain("[PAD263]") == list(b"[PAD263]")
    assert tokenizer.decode([UNUSED, 256]) == "in"
    assert [tokenizer.token_text(i) for i in (TURN, UNUSED)] == ["<turn>", ""]


@pytest.mark.parametrize(
    ("changes", "front", "back"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [BOS], []),
        ({"pre": "llama-bpe"}, [BOS], []),  # Llama 3 files often leave the flag away
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
    ],
)
def test_begin_and_end_tokens(
    tmp_path: Path, changes: dict[str, Any], front: list[int], back: list[int]
) -> None:
    tokenizer = load_tokenizer(tiny(tmp_path, **changes))
    assert tokenizer.encode("in") == [*front, 256, *back]
    assert tokenizer.encode("<s>in") == [BOS, 256, *back]  # never a second one
    assert tokenizer.encode_plain("<s>in") == [BOS, 256]
    assert tokenizer.encode("") == [*front, *back]


def test_whole_words_need_no_merges(tmp_path: Path) -> None:
    tokens = [*TOKENS, "in's"]
    kinds = [1] * 259 + [3] * 3 + [4, 5, 1]
    for pre, ids in (("smaug-bpe", [256, 258]), ("gpt-2", [256, 258])):
        changes = {"pre": pre, "tokens": tokens, "token_type": kinds}
        assert load_tokenizer(tiny(tmp_path, **changes)).encode_plain("in's") == ids
    tokens[-1], changes = "tin", {"tokens": tokens, "token_type": kinds}
    for pre, ids in (("llama-bpe", [264]), ("smaug-bpe", [ord("t"), 256])):
        assert load_tokenizer(tiny(tmp_path, pre=pre, **changes)).encode_plain("tin") == ids


def test_end_ids(tmp_path: Path) -> None:
    assert load_tokenizer(tiny(tmp_path)).end_ids == {EOS, TURN}
    assert load_tokenizer(tiny(tmp_path, eot_token_id=None)).end_ids == {EOS}
    assert load_tokenizer(tiny(tmp_path, eom_token_id=TOOL)).end_ids == {EOS, TURN, TOOL}
    named = [t if t != "<turn>" else "<|eot_id|>" for t in TOKENS]
    assert load_tokenizer(tiny(tmp_path, eot_token_id=None, tokens=named)).end_ids == {EOS, TURN}
    named = [t if t != "in" else "<|eot_id|>" for t in TOKENS]  # an ordinary token of that name
    ends = load_tokenizer(tiny(tmp_path, eot_token_id=None, tokens=named, merges=["Ġ t", "' s"]))
    assert ends.end_ids == {EOS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "a tokenizer of kind 'llama', and only byte-level BPE"),
        ({"model": None}, "lacks the metadata tokenizer.ggml.model"),
        ({"pre": "tekken"}, "names the pre-tokenizer 'tekken', and known are command-r, "),
        ({"tokens": None, "token_type": None}, "lacks the metadata tokenizer.ggml.tokens"),
        ({"merges": None}, "lacks the metadata tokenizer.ggml.merges"),
        ({"merges": [*MERGES, "zz q"]}, "has merges that do not fit its tokens"),
        ({"merges": [*MERGES, "single"]}, "has the merge 'single', which is not two tokens"),
        ({"token_type": [1, 1]}, "has 264 tokens and 2 token types"),
        ({"bos_token_id": 999}, "names token 999 as bos token of a vocabulary of 264"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for a bos token .* and names none"),
    ],
)
def test_refused_vocabularies(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tiny(tmp_path, **changes))


# Templates


def test_chat_ids_are_those_of_transformers_with_one_bos(tmp_path: Path) -> None:
    source = tiny(tmp_path, TEMPLATE, add_bos_token=True)
    folder = hf_folder(tmp_path / "hf", source)
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [USER, {"role": "assistant", "content": " t"}, USER]
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    for path in (source, folder):
        tokenizer = load_tokenizer(path)
        assert tokenizer.chat_ids(messages) == expected
        assert expected.count(BOS) == 1
        text = tokenizer.render(messages)
        assert text == "<s>user: Hi in<turn>assistant:  t<turn>user: Hi in<turn>assistant: "
        assert tokenizer.encode(text) == expected  # also as a raw prompt
        short = tokenizer.render([USER], add_generation_prompt=False)
        assert short == "<s>user: Hi in<turn>"


def test_thinking(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny(tmp_path, TEMPLATE))
    assert tokenizer.think_tags == ("<think>", "</think>")
    ends = {None: "assistant: ", True: "<think>\n", False: "<think>\n\n</think>\n\n"}
    for thinking, end in ends.items():
        text = tokenizer.render([USER], thinking)
        assert text.endswith(end)
        assert tokenizer.opens_thinking(text) is (thinking is True)
        assert tokenizer.chat_ids([USER], thinking) == tokenizer.encode_plain(text)
    asking = [{"role": "user", "content": "What does <think> do?"}]
    assert not tokenizer.opens_thinking(tokenizer.render(asking))


def test_no_thinking_mode(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny(tmp_path, "{{ messages[0].content }}<think>"))
    assert tokenizer.think_tags is None
    assert not tokenizer.opens_thinking(tokenizer.render([USER]))
    with pytest.raises(UsageError, match=r"tiny\.gguf has no thinking mode to turn off"):
        tokenizer.render([USER], thinking=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "pirate", "content": "Arr"}], "refuses these messages: no role pirate. Change"),
        ([{"role": "user"}], "lacks 'content'"),
        ([{"role": "user", "content": None}], "lacks 'content'"),
        ([{"role": "user", "content": ["Hi"]}], "lacks 'content'"),
        ([{"content": "Hi"}], "lacks 'role'"),
        (["Hi"], "lacks 'role'"),
    ],
)
def test_refused_messages(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_tokenizer(tiny(tmp_path, TEMPLATE)).render(messages)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny(tmp_path))
    assert not tokenizer.has_template
    with pytest.raises(UsageError, match=r"has no chat template\. Give a raw prompt"):
        tokenizer.chat_ids([USER])


# Folders


def test_a_folder_encodes_as_transformers_does(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tiny(tmp_path), clean_up_tokenization_spaces=True)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.has_template
    for text in ("in t's", "<s>", "é<turn>x", "", "can 't stop , now !"):
        assert tokenizer.encode_plain(text) == reference.encode(text, add_special_tokens=False)
        if not text.startswith("<s>"):
            assert tokenizer.encode(text) == reference.encode(text)
        ids = reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert tokenizer.encode("<s>in") == [BOS, 256]


def test_truncation_and_padding_of_a_folder_are_ignored(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tiny(tmp_path))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode_plain("abcdefghijkl")) == 12
    assert load_tokenizer(folder).encode_plain("ab") == [97, 98]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, {}, {EOS}),
        ({"eos_token_id": TURN}, None, {EOS, TURN}),
        ({"eos_token_id": None}, {"eos_token_id": [TURN, 7]}, {EOS, TURN, 7}),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": 6}, {EOS, 5, 6}),
    ],
)
def test_end_ids_of_a_folder(
    tmp_path: Path, config: dict, generation: dict | None, ends: set[int]
) -> None:
    folder = hf_folder(tmp_path / "hf", tiny(tmp_path))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(folder).end_ids == ends


def spoil(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer: none of tokenizer.json"),
        (lambda f: spoil(f, "tokenizer.json", "{"), r"The tokenizer in .* cannot be read \("),
        (lambda f: spoil(f, "config.json", "{"), "config.json is not JSON"),
        (lambda f: spoil(f, "generation_config.json", "{"), "generation_config.json is not JSON"),
        (
            lambda f: spoil(f, "config.json", '{"model_type": "llama", "eos_token_id": "x"}'),
            "has eos_token_id 'x', which is no token id",
        ),
        (lambda f: spoil(f, "generation_config.json", "[]"), "is no JSON object"),
    ],
)
def test_broken_folders(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = hf_folder(tmp_path / "hf", tiny(tmp_path))
    damage(folder)
    with pytest.raises(DFlashError, match=message):
        load_tokenizer(folder)


def test_think_tokens_of_the_vocabulary_count(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tiny(tmp_path), template="{{ messages[0].content }}")
    assert load_tokenizer(folder).think_tags is None
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).think_tags == ("<think>", "</think>")
