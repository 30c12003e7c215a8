"""What cannot be converted gets its sentence, before any download or write, and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from checkpoints import write_folder
from conversions import tensors_of, write_source, write_tiny_drafter
from tiny import tiny_config

from dflash_mlx.convert import Order, Recipe, convert
from dflash_mlx.errors import CheckpointError, DFlashError, SourceError, UsageError

LATE = "model.norm.weight"  # written when most is on disk already


def _config(source: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))


def _weights(source: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    weights = tensors_of(source)
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(source / "model.safetensors"), weights)


def _put(name: str, value: float) -> Callable[[Path], None]:
    def change(weights: dict[str, mx.array]) -> None:
        weights[name] = mx.concatenate([weights[name][:-1], mx.array([value])])

    return lambda source: _weights(source, change)


def _integers(source: Path) -> None:
    _weights(source, lambda w: w.update({LATE: w[LATE].astype(mx.int32)}))


def _truncate(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-99])


def _cyclic_shard(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to("model.safetensors")


def _cyclic_folder(source: Path) -> None:
    shutil.rmtree(source)
    source.symlink_to(source.name)


def _drafter(source: Path) -> None:
    shutil.rmtree(source)
    write_tiny_drafter(source)


def _index(source: Path, weight_map: Any) -> None:
    file = source / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))


def _header(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = source / "model.safetensors"
    stored = file.read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + stored[end:])


def _entry(**changes: Any) -> Callable[[Path], None]:
    return lambda source: _header(source, lambda header: header[LATE].update(changes))


def _metadata(source: Path) -> None:
    _header(source, lambda header: header.update(__metadata__="mlx"))


def _folder(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()


class Fault(NamedTuple):
    name: str
    make: Callable[[Path], Any]
    sentence: str  # {m}: the source
    recipe: Recipe = Recipe()


FAULTS = [
    Fault("truncated", _truncate, "{m}/model.safetensors has * bytes, its header describes *;"),
    Fault("integers", _integers, f"{LATE} of {{m}} is stored as int32;"),
    Fault("nan", _put(LATE, float("nan")), f"{LATE} of {{m}} holds numbers that are not finite in"),
    Fault(
        "too large",
        _put(LATE, 1e6),
        f"{LATE} of {{m}} holds numbers that are not finite in float16; use another --dtype.",
        Recipe(dtype="float16"),
    ),
    Fault("no tokenizer", lambda m: (m / "tokenizer.json").unlink(), "{m} has no tokenizer: "),
    Fault(
        "another tokenizer",
        lambda m: write_folder(m, tiny_config("qwen3", vocab_size=96)),
        "The tokenizer of {m} gives id *, and the model knows ids up to 95;",
    ),
    Fault(
        "gptq",
        lambda m: _config(m, quantization_config={"quant_method": "gptq"}),
        "{m} is quantized by gptq, which is not supported;",
    ),
    Fault(
        "family",
        lambda m: _config(m, model_type="rwkv"),
        "The config's model_type 'rwkv' is not supported; use a model of one of llama, qwen3",
    ),
    Fault(
        "index of numbers",
        lambda m: _index(m, {LATE: 1, "a": "b"}),
        "{m}/model.safetensors.index.json names 1, which is no file name;",
    ),
    Fault(
        "no index", lambda m: _index(m, []), "{m}/model.safetensors.index.json has no weight_map"
    ),
    *(
        Fault(f"header {key} {value}", _entry(**{key: value}), f"{{m}}/model.safetensors {broken}")
        for key, value, broken in (
            ("shape", ["64"], f"has a broken entry for {LATE};"),
            ("data_offsets", ["0", "256"], f"has a broken entry for {LATE};"),
            ("data_offsets", [0.0, 256.0], f"has a broken entry for {LATE};"),
            ("data_offsets", [0, 256], "has a broken entry for"),  # another tensor's bytes
        )
    ),
    Fault("header kind", _entry(dtype=["F32"]), f"Tensor {LATE} of {{m}}/* is stored as ['F32'],"),
    Fault("metadata", _metadata, "{m}/model.safetensors has a broken safetensors header;"),
    Fault("folder", _folder, "{m}/model.safetensors cannot be read (Is a directory);"),
    *(
        Fault(f"config {key}", lambda m, c={key: value}: _config(m, **c), sentence)
        for key, value, sentence in (
            ("model_type", ["qwen3"], "The config's model_type ['qwen3'] is not supported;"),
            ("layer_types", 3, "The config's layer_types is 3, not a list of names;"),
            ("text_config", [1], "The config's text_config is [1], not an object;"),
        )
    ),
    Fault("drafter", _drafter, "{m} is a DFlash drafter, not a model;"),
    Fault(
        "cyclic shard", _cyclic_shard, "{m}/model.safetensors cannot be read (Too many levels *);"
    ),
    Fault("cyclic folder", _cyclic_folder, "The model '{m}' does not exist: "),
    Fault("nothing", shutil.rmtree, "The model '{m}' does not exist: "),
]


def matches(sentence: str, pattern: str) -> bool:
    return re.match(re.escape(pattern).replace(r"\*", ".*"), sentence) is not None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_bad_input_gets_a_sentence_and_leaves_nothing(tmp_path: Path, fault: Fault) -> None:
    source = write_source(tmp_path / "m")
    fault.make(source)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(DFlashError) as caught:
        convert(Order(str(source), tmp_path / "q", fault.recipe, shard_bytes=10_000))
    pattern = fault.sentence.replace("{m}", str(source))
    assert matches(str(caught.value), pattern), caught.value
    assert "\n" not in str(caught.value)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


_EXTRA = "layers.0.extra.weight"


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (
            lambda d: _config(d, num_target_layers=9),
            {},
            "The drafter was made for a target of 9 layers, the target has 2;",
        ),
        (
            lambda d: _config(d, hidden_size=32),
            {},
            "The drafter reads hidden states of width 32 (*), the target gives 64 (128 in all);",
        ),
        (
            lambda d: _weights(d, lambda w: w.pop("fc.weight")),
            {},
            "The drafter in {d} lacks fc.weight; fetch the drafter again.",
        ),
        (
            lambda d: _weights(d, lambda w: w.update({_EXTRA: mx.zeros(3)})),
            {},
            f"The drafter in {{d}} holds tensors its config.json does not explain: {_EXTRA};",
        ),
        (
            lambda d: _weights(d, lambda w: w.update({"norm.weight": mx.ones(63)})),
            {},
            "Tensor norm.weight of {d} has shape (63,), its config.json asks for (64,);",
        ),
        (lambda d: None, {"draft_bits": 8}, "The drafter's * has 40 inputs, no multiple of *"),
        (
            lambda d: None,
            {"drafter": None, "draft_bits": 4},
            "--draft-bits needs a drafter; name one with --drafter",
        ),
    ],
    ids=["layers", "width", "missing", "extra", "shape", "bits", "none"],
)
def test_a_drafter_that_would_not_load_is_refused(
    tmp_path: Path, change: Callable[[Path], Any], options: dict[str, Any], sentence: str
) -> None:
    source, drafter = write_source(tmp_path / "m"), write_tiny_drafter(tmp_path / "d")
    change(drafter)
    order = Order(str(source), tmp_path / "q", drafter=str(drafter))
    with pytest.raises(DFlashError) as caught:
        convert(replace(order, **options), lambda done, total: pytest.fail("began to write"))
    assert matches(str(caught.value), sentence.replace("{d}", str(drafter))), caught.value
    assert not (tmp_path / "q").exists()


def _full(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda q: (q.mkdir(), _full(q)), "{q} exists already; delete it or give another folder."),
        (lambda q: q.write_text("mine"), "{q} exists already; delete it or give another folder."),
        (lambda q: q.symlink_to(q.name), "{q} exists already; delete it or give another folder."),
        (lambda q: q.parent.rmdir(), "The folder {p} does not exist; make it or give another."),
    ],
    ids=["full", "file", "cyclic", "nowhere"],
)
def test_a_destination_in_use_is_left_alone(
    tmp_path: Path, make: Callable[[Path], Any], sentence: str
) -> None:
    source = write_source(tmp_path / "m")
    place = tmp_path / "p/q"
    place.parent.mkdir()
    make(place)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError) as caught:
        convert(Order(str(source), place))
    assert str(caught.value) == sentence.format(q=place, p=place.parent)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_place_inside_of_the_source_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    before = sorted(source.iterdir())
    with pytest.raises(UsageError, match="lies inside of what is converted"):
        convert(Order(str(source), source / "deep" / "q"))
    assert sorted(source.iterdir()) == before


def test_a_read_only_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "m")
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    if os.geteuid() == 0:  # permission bits do not bind root

        def locked(path: Any, *_: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        monkeypatch.setattr(os, "mkdir", locked)
    with pytest.raises(UsageError, match=r"/q cannot be written or read \(.*\); give a folder of"):
        convert(Order(str(source), place / "q"))
    assert list(place.iterdir()) == []


def test_an_empty_folder_stays_when_the_conversion_fails(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    _put(LATE, float("inf"))(source)
    (tmp_path / "q").mkdir()
    with pytest.raises(CheckpointError):
        convert(Order(str(source), tmp_path / "q"))
    assert list((tmp_path / "q").iterdir()) == []


def test_a_failure_behind_a_link_leaves_nothing(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    _put(LATE, float("inf"))(source)
    (tmp_path / "real").mkdir()
    (tmp_path / "q").symlink_to("real")
    with pytest.raises(CheckpointError):
        convert(Order(str(source), tmp_path / "q", shard_bytes=10_000))
    assert list((tmp_path / "real").iterdir()) == []
    assert (tmp_path / "q").is_symlink()


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("change", [_cut, os.utime])
def test_a_source_that_changes_meanwhile_leaves_nothing(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    source = write_source(tmp_path / "m")
    file = source / "model.safetensors"

    def progress(done: int, total: int) -> None:
        if 0 < done < total / 2:
            change(file)

    with pytest.raises(SourceError, match="changed while they were converted;") as caught:
        convert(Order(str(source), tmp_path / "q", shard_bytes=10_000), progress)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "q").exists()


def test_an_error_of_mlx_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "m")

    def fail(*_: Any) -> None:
        raise RuntimeError("[malloc] no\nmemory")

    monkeypatch.setattr("dflash_mlx.convert.order.compare", fail)
    with pytest.raises(SourceError, match=r"MLX could not convert .* \(\[malloc\] no memory\);"):
        convert(Order(str(source), tmp_path / "q"))
    assert not (tmp_path / "q").exists()


def test_names_that_are_not_utf8_get_a_sentence(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    odd = str(tmp_path / os.fsdecode(b"q\xff"))
    shutil.copytree(source, odd)
    for order in (Order(str(source), Path(odd + "2")), Order(odd, tmp_path / "q")):
        with pytest.raises(UsageError, match="is not UTF-8, and config"):
            convert(order)
    assert not (tmp_path / "q").exists()


def test_too_little_disk_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=63_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError) as caught:
        convert(Order(str(source), tmp_path / "q"))
    assert str(caught.value) == (
        f"The disk of {tmp_path} has 0.06 GB free, and 0.06 GB are needed (0.00 GB to write); "
        "free some or give a folder on another disk."
    )
    assert not (tmp_path / "q").exists()


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # a file's, really refused
    try:
        with pytest.raises(UsageError, match=r"There is no room left for .*/q "):
            convert(Order(str(source), tmp_path / "q"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "q").exists()


def test_no_room_at_the_very_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "m")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dflash_mlx.convert.order.result_config", full)
    with pytest.raises(UsageError, match="There is no room left"):
        convert(Order(str(source), tmp_path / "q"))
    assert not (tmp_path / "q").exists()
