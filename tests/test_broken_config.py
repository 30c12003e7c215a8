"""Every key of a config with every wrong type: a sentence or a model, and never a traceback."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_folder
from tiny import tiny_config, tiny_weights
from tiny_engine import VOCAB, write_tokenizer
from tiny_hybrid import multimodal

from dflash_mlx import load
from dflash_mlx.errors import CheckpointError, DFlashError
from dflash_mlx.loader import load_target

WRONG: list[Any] = [True, -1, 10**9, 10**400, "32", ["x"], {"a": 1}, math.nan]
# Read by the loader, the tokenizer or the choice of a drafter, whether the config states them.
READ = """
    architectures conversion eos_token_id layer_types mlp_only_layers model_type
    num_local_experts per_layer_config quantization quantization_config rope_freq_factors
    rope_parameters rope_scaling text_config
    """.split()  # noqa: SIM905
NESTED = ("text_config", "rope_parameters", "rope_scaling")


def checkpoint(folder: Path, family: str) -> Path:
    config = tiny_config(family, vocab_size=VOCAB)
    weights = tiny_weights(config)
    if family.startswith("qwen3_5"):
        config, weights = multimodal(config, weights)
    return write_folder(folder, config, weights)


def broken(folder: Path, only: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Writes one wrong config after the other: the key and its value."""
    file = folder / "config.json"
    good = file.read_text()
    config = json.loads(good)
    places = [(key,) for key in only or dict.fromkeys([*config, *READ])]
    for outer in NESTED:
        places += [(outer, key) for key in config.get(outer) or () if not only]
    for place in places:
        for value in WRONG:
            changed = json.loads(good)
            level = changed if len(place) == 1 else changed[place[0]]
            level[place[-1]] = value
            file.write_text(json.dumps(changed))
            yield ".".join(place), value
    file.write_text(good)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection after every load would take most of the time here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def refusal(opened: Callable[[], Any], what: str) -> str | None:
    """The sentence of a refusal, None for success; anything else fails the test."""
    try:
        opened()
    except DFlashError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return None


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe", "gemma4_shared"])
def test_every_key_with_every_wrong_type(tmp_path: Path, family: str) -> None:
    folder, sentences = checkpoint(tmp_path / "m", family), []
    for key, value in broken(folder):
        what, began = f"{key} = {value!r:.40}", time.process_time()
        sentences.append(refusal(lambda: load_target(folder), what))
        assert len(sentences[-1] or "") < 500, what
        assert time.process_time() - began < 2, what
    assert sentences.count(None) > 20
    assert len(sentences) - sentences.count(None) > 100
    load_target(folder)


def test_every_key_with_every_wrong_type_on_the_way_to_an_engine(tmp_path: Path) -> None:
    """Beside the model, what the tokenizer and the drafting read."""
    folder = write_tokenizer(checkpoint(tmp_path / "m", "qwen3_moe"))
    sentences = [
        refusal(lambda: load(str(folder), dtype="float32"), f"{key} = {value!r:.40}")
        for key, value in broken(folder, READ)
    ]
    assert 10 < sentences.count(None) < len(sentences) - 10


@pytest.mark.parametrize("key", ["num_hidden_layers", "head_dim", "num_experts", "vocab_size"])
def test_sizes_beyond_the_tensors_are_refused_before_a_model_is_built(
    tmp_path: Path, key: str
) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text()) | {key: 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{key} is 1000000000, the tensors of .* have room"):
        load_target(folder)


def test_files_that_cannot_be_read_get_a_sentence(tmp_path: Path) -> None:
    folder = write_tokenizer(checkpoint(tmp_path / "m", "llama"))
    config, weights = folder / "config.json", folder / "model.safetensors"
    good = config.read_text()
    for content in ("[" * 100_000, '{"a":' * 100_000, "\ufeff" + good, "\x00"):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            load(str(folder))
    config.write_text(good)
    for content in ('{"eos_token_id": "x"}', "[]", "[" * 100_000):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            load(str(folder), dtype="float32")
    (folder / "generation_config.json").unlink()
    weights.rename(folder / "kept")
    weights.symlink_to(weights)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(str(folder))
    config.unlink()
    config.symlink_to(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(str(folder))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no such role') }}", "refuses these messages: no such role"),
        ("{{ 1 / 0 }}", r"fails \(ZeroDivisionError"),
        ("{{ messages.nothing.more }}", "'dict object'|undefined|has no attribute"),
        ("{% if %}", "refuses these messages"),
        ("", "has no chat template"),
        ("{# nothing #}", "makes nothing of these messages"),
        (5, "chat_template|cannot be read"),
        ({"default": 5}, "chat_template|cannot be read"),
    ],
)
def test_broken_chat_templates(tmp_path: Path, template: Any, sentence: str) -> None:
    folder = write_tokenizer(checkpoint(tmp_path / "m", "llama"), template=template)
    with pytest.raises(DFlashError, match=sentence):
        load(str(folder), dtype="float32").generate([{"role": "user", "content": "Hi"}])


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=96)
    folder = write_tokenizer(write_folder(tmp_path / "m", config))
    with pytest.raises(CheckpointError, match=r"makes token \d+, and the model has 96 tokens"):
        load(str(folder), dtype="float32").generate("Hi")
