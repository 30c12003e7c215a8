"""What a run reads: features within the limit before any are made, and the sets texts belong to."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_target
from tiny_training import own_texts, read_json, write_answers, write_target

import dflash_mlx
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.train import features, sources
from dflash_mlx.train.corpus import Text, digest, joined_texts, read_answers, split, usable
from dflash_mlx.train.features import FeatureCache, FeatureSpec
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import train
from dflash_mlx.train.shape import Shape
from dflash_mlx.train.sources import offline

pytestmark = pytest.mark.usefixtures("no_picture")

TRAINED = [Text(f"a{i}", (1, 2, 3), (4, 5, 6, i)) for i in range(4)]
HELD = [Text(f"b{i}", (1, 2), (7, 8, 9, i)) for i in range(3)]
# tokens, times taps, times 48 hidden units, times the size of the type; 8 for every likely token
SIZES = (4 * 7 * (2 * 48 * 2 + 5 * 8), 3 * 6 * 2 * 48 * 4)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def wanted():
    bf16, own = FeatureSpec("t", (1, 2), 5, "bfloat16"), FeatureSpec("t", (1, 2), 0, "float32")
    return [(bf16, TRAINED), (own, HELD)]


def test_the_limit_is_for_all_features_and_checked_before_any_are_made(target, tmp_path):
    said = []

    def made(limit):
        return offline(tmp_path, wanted(), target, limit, said.append, lambda done, total: None)

    total = sum(SIZES)
    for limit in (max(SIZES), total - 1):
        with pytest.raises(UsageError, match="more than the limit"):
            made(limit)
        assert not list(tmp_path.rglob("*.safetensors"))
    trained, held = made(total)
    assert [len(trained.read_all(TRAINED)), len(held.read_all(HELD))] == [4, 3]
    assert all("7 texts will take" in sentence for sentence in said)
    # What is there counts with its size on disk, which has headers besides.
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    with pytest.raises(UsageError, match="more than the limit"):
        made(stored - 1)
    made(stored)
    assert len(said) == 3


def test_a_full_disk_is_seen_before_any_features_are_made(target, tmp_path, monkeypatch):
    class Usage:
        free = max(SIZES) * 1.1

    monkeypatch.setattr(sources.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(UsageError, match="free"):
        offline(tmp_path, wanted(), target, None, lambda text: None, lambda done, total: None)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_labels_that_a_shard_lacks_are_told(target, tmp_path):
    spec = FeatureSpec("t", (1, 2), 5, "bfloat16")
    FeatureCache(tmp_path, spec).add(target, TRAINED)
    [shard] = tmp_path.rglob("features-*.safetensors")
    arrays = {k: v for k, v in mx.load(str(shard)).items() if not k.endswith(".logprobs")}
    mx.eval(arrays)
    mx.save_safetensors(str(shard), arrays)
    with pytest.raises(CheckpointError, match="logprobs' is not there"):
        FeatureCache(tmp_path, spec).read(TRAINED[0])


def test_features_that_float16_cannot_hold_are_refused(tmp_path):
    target = tiny_target("llama")
    target.model.embed_tokens.weight = target.model.embed_tokens.weight * 1e7
    cache = FeatureCache(tmp_path, FeatureSpec("t", (1, 2), 0, "float16"))
    with pytest.raises(UsageError, match="--cache-dtype bfloat16"):
        cache.add(target, TRAINED)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_features_go_on_behind_the_last_whole_shard(target, tmp_path, monkeypatch):
    made, real = [], features.compute

    def counted(target, spec, texts):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append([text.name for text in texts])
        return real(target, spec, texts)

    monkeypatch.setattr(features, "SHARD_TEXTS", 1)
    monkeypatch.setattr(features, "compute", counted)
    spec = FeatureSpec("t", (1, 2), 0, "bfloat16")
    with pytest.raises(KeyboardInterrupt):
        FeatureCache(tmp_path, spec).add(target, TRAINED)
    monkeypatch.setattr(
        features, "compute", lambda *given: made.append([given[2][0].name]) or real(*given)
    )
    cache = FeatureCache(tmp_path, spec)
    cache.add(target, TRAINED)
    names = sorted(name for part in made for name in part)
    assert names == [text.name for text in TRAINED]  # none twice
    assert all(text in cache for text in TRAINED)


def test_behind_a_kill_the_same_texts_share_a_shard(target, tmp_path, monkeypatch):
    """And so a pass of the target, whose sums a fast BLAS orders by the number of rows."""
    texts = [Text(f"c{i}", (1, 2, 3), (4, 5, 6, i)) for i in range(9)]
    spec = FeatureSpec("t", (1, 2), 0, "bfloat16")
    monkeypatch.setattr(features, "SHARD_TEXTS", 3)
    monkeypatch.setattr(features, "SHARD_BYTES", 5 * 7 * 2 * 48 * 2)  # five texts: three and two
    FeatureCache(tmp_path / "whole", spec).add(target, texts)
    stopped, write = FeatureCache(tmp_path / "stopped", spec), FeatureCache._write
    with monkeypatch.context() as patch:
        patch.setattr(FeatureCache, "_write", lambda self, *given: write(self, *given) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stopped.add(target, texts)
    told: list[tuple[int, int]] = []
    offline(
        tmp_path / "stopped", [(spec, texts)], target, None, lambda text: None,
        lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(0, 6), (2, 6), (5, 6), (6, 6)]
    names = [
        sorted(file.name for file in (tmp_path / run).rglob("features-*"))
        for run in ("whole", "stopped")
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 4


def test_an_id_of_two_texts_is_refused(tmp_path):
    first = write_answers(tmp_path / "a.jsonl", TRAINED[:2])
    same = write_answers(tmp_path / "b.jsonl", TRAINED[1:3])
    assert [text.name for text in read_answers([first, same], 96)] == ["a0", "a1", "a2"]
    other = write_answers(tmp_path / "c.jsonl", [replace(TRAINED[0], answer_ids=(9, 9, 9))])
    with pytest.raises(UsageError, match=r"c\.jsonl:1: the id a0 is another text's"):
        read_answers([first, other], 96)


def test_files_of_one_name_in_two_folders_may_be_given(tmp_path):
    files = []
    for text in TRAINED[:2]:
        folder = tmp_path / text.name
        folder.mkdir()
        row = json.loads(text.as_json())
        del row["id"]
        (folder / "answers.jsonl").write_text(json.dumps(row) + "\n")
        files.append(folder / "answers.jsonl")
    read = read_answers(files, 96)
    assert [text.ids for text in read] == [text.ids for text in TRAINED[:2]]
    assert len({text.name for text in read}) == 2
    assert len(read_answers([files[0], files[0]], 96)) == 1


def test_a_long_text_goes_through_the_target_in_pieces(monkeypatch):
    """Its features are those of one pass, for every kind of cache."""
    for family in ("llama", "gpt_oss", "qwen3_5", "gemma4_shared"):
        model = tiny_target(family)
        rows = []
        forward = model.forward

        def watched(segments, taps=(), rows=rows, forward=forward):
            rows.append(sum(segment.rows for segment in segments))
            return forward(segments, taps)

        ids = tuple(np.random.default_rng(0).integers(0, 90, 45).tolist())
        texts = [Text("long", ids[:5], ids[5:]), Text("short", ids[:3], ids[3:9])]
        spec = FeatureSpec("t", (0, 2), 4, "float32")
        whole = features.compute(model, spec, texts)
        with monkeypatch.context() as patch:
            patch.setattr(features, "PASS_ROWS", 16)
            patch.setattr(model, "forward", watched)
            pieces = features.compute(model, spec, texts)
        assert sorted(rows) == [9, 13, 16, 16]
        for one, other in zip(whole, pieces, strict=True):
            assert np.allclose(one.features, other.features, atol=1e-4), family
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-4), family


def test_features_of_one_kind_share_their_cache(target, tmp_path):
    spec = FeatureSpec("t", (1, 2), 0, "float32")
    both = [(spec, TRAINED), (spec, HELD)]
    one, two = offline(tmp_path, both, target, None, lambda text: None, lambda done, total: None)
    assert one.cache is two.cache
    assert len(two.read_all([*TRAINED, *HELD])) == 7


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("gsm8k/12", "answers", "gsm8k"),
        ("mt_bench/3/turn-2", "answers", "mt_bench"),
        ("p3", "questions", "questions"),
        ("p3/turn-2", "questions", "questions"),
        ("sha-00ff", None, "texts"),
        ("/x", None, "texts"),
    ],
)
def test_a_text_belongs_to_the_set_its_name_or_its_file_says(name, source, expected):
    text = Text(name, (1,), (2, 3, 4), source)
    assert text.set_name == text.cut(3).set_name == expected
    # It says where a text is from, not what it is: a run's hashes stay as they were.
    assert text == Text(name, (1,), (2, 3, 4))
    assert digest([text]) == digest([Text(name, (1,), (2, 3, 4))])


def named(names: str) -> list[Text]:
    """Texts of these names, each of a prompt of its own tokens."""
    return [Text(name, (1, i), (2, 3, 4)) for i, name in enumerate(names.split())]


def test_turns_and_wordings_of_a_prompt_are_held_out_together():
    prompts = [f"s/{i}" for i in range(40)]
    texts = named(" ".join(f"{p} {p}/turn-2 {p}+short {p}+short/turn-2" for p in prompts))
    trained, held = split(texts, 10)
    assert len(held) == 8  # ten would have taken a prompt apart
    ours, theirs = ({text.prompt_name for text in part} for part in (trained, held))
    assert len(theirs) == 2
    assert not ours & theirs
    assert ours | theirs == set(prompts)
    assert len(split(named("c++/1 c++/2 c++/3 c++/4"), 9)[1]) == 1  # four prompts, not one
    assert len(split(named(" ".join(f"data+{i}" for i in range(12))), 3)[1]) == 3
    odd = [text.prompt_name for text in named("s/6+v1.1 s/6+a/turn-2 x/turn-1/turn-2")]
    assert odd == ["s/6", "s/6", "x"]
    # Further answers, whatever they are called: the same tokens are the same prompt.
    drawn = [Text(f"{n}:{i}", (7, i), (n, 3, 4)) for n in range(3) for i in range(20)]
    trained, held = split(drawn, 6)
    assert len(held) == 6
    assert not {text.prompt_ids for text in trained} & {text.prompt_ids for text in held}
    assert {text.name for text in split(drawn[::-1], 6)[1]} == {text.name for text in held}
    # Whatever their order, and also where every name comes before all others so far.
    one = [Text(f"{i:06}", (7,), (1, 2, 3)) for i in range(20_000)]
    assert split(one[::-1] + drawn, 6)[1] == held
    assert split(one, 6)[1] == []  # one prompt: all of it, or nothing
    # A prompt has more texts than may be held out: the smallest is, rather than none.
    assert len(split(texts[:8] + texts[8:10], 1)[1]) == 2
    assert split(texts[:4], 1) == (texts[:4], [])


def test_given_answers_and_those_to_prompts_are_joined_without_losing_or_doubling_any():
    asked = [Text("s/1", (1,), (2, 3)), Text("s/2", (4,), (5, 6))]
    given = [
        Text("x:1", (1,), (2, 3)),  # the same answer
        Text("x:2", (1,), (9, 9)),  # another one to the same prompt
        Text("s/2", (7,), (8, 8)),  # another prompt of a name that is taken
        Text("x:3", (6,), (6, 6)),
    ]
    joined = joined_texts(given, asked)
    assert [text.prompt_name for text in joined] == ["s/1", "s/2", "x:3", "s/1", "s/2"]
    assert {text.ids for text in joined} == {text.ids for text in [*asked, *given[1:]]}
    assert len({text.name for text in joined}) == len(joined) == 5
    # Names without a set, and of later turns.
    asked = [Text("sha-1", (1,), (2, 3)), Text("sha-1/turn-2", (1, 2), (5, 6))]
    others = [replace(text, name="x", answer_ids=(9, 9)) for text in asked]
    assert {text.prompt_name for text in joined_texts(others, asked)} == {"sha-1"}


def test_texts_are_cut_to_the_longest_and_dropped_where_no_block_is_left():
    texts = [Text(f"s/{i}", tuple(range(10 * i)), (1, 2, 3, 4)) for i in (1, 2, 3)]
    kept, dropped = usable(texts, 22)
    assert [(text.length, len(text.answer_ids)) for text in kept] == [(14, 4), (22, 2)]
    assert dropped == 1
    assert usable(texts, 21) == (kept[:1], 2)


def test_a_run_trains_and_measures_on_texts_cut_to_the_longest(tmp_path):
    """Also a drafter that is trained further, on longer texts than before."""
    folder = write_target(tmp_path / "target", "llama")
    texts = own_texts(dflash_mlx.load(str(folder), draft=None), 8, 18)
    answers = write_answers(tmp_path / "given.jsonl", texts)
    recipe = Recipe(block_size=4, steps=1, step_blocks=8, negatives=8, held_out=2, max_length=12)
    shape = Shape(layers=1, taps=2)
    order = Order(str(folder), tmp_path / "out", recipe, shape, answers=[answers])
    short = train(order)
    longer = replace(order, out=tmp_path / "longer", init=str(order.out), shape=Shape())
    longer = replace(longer, recipe=replace(recipe, max_length=24, learning_rate=1e-4))
    assert short["answer_tokens"] == 6 * 6
    assert train(longer)["answer_tokens"] == 6 * 18
    shards = [mx.load(str(f)) for f in (order.out / "work").rglob("features-*.safetensors")]
    assert {array.shape[0] for shard in shards for array in shard.values()} == {12}


def test_which_texts_are_held_out_does_not_depend_on_others():
    texts = named(" ".join(f"s/{i}" for i in range(60)))
    few, many = (split(texts[:count], 8)[1] for count in (40, 60))
    assert len(few) == len(many) == 8
    first = [text for text in many if text in texts[:40]]
    assert all(text in few for text in first)


def test_a_shard_holds_no_more_bytes_than_are_in_memory_at_a_time(target, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 2.5 * 7 * (2 * 48 * 2 + 5 * 8))
    told = []
    made = offline(
        tmp_path, wanted()[:1], target, None, lambda text: None, lambda *at: told.append(at)
    )
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert told == [(0, 4), (2, 4), (4, 4)]
    assert len(made[0].read_all(TRAINED)) == 4


def test_texts_are_of_the_set_of_their_file(tmp_path):
    row = json.dumps({"prompt_ids": [1], "answer_ids": [2, 3]}) + "\n"
    (tmp_path / "one.jsonl").write_text(row)
    (tmp_path / "two.v1.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    files = [tmp_path / "one.jsonl", tmp_path / "two.v1.jsonl.gz"]
    assert [text.set_name for text in read_answers(files, 9)] == ["one", "two.v1"]


def test_tau_by_set_is_of_the_files_where_ids_say_no_set(tmp_path):
    folder = write_target(tmp_path / "target", "llama")
    texts = own_texts(dflash_mlx.load(str(folder), draft=None), 8, 6)
    named = [Text(f"n{i}", text.prompt_ids, text.answer_ids) for i, text in enumerate(texts)]
    answers = write_answers(tmp_path / "given.jsonl", named)
    prompts = tmp_path / "asked.jsonl"
    rows = [{"id": f"p{i}", "turns": [f"Question {i}?", "Why?"], "max": 4} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(block_size=4, steps=1, step_blocks=8, pass_blocks=8, held_out=6, negatives=8)
    shape, out = Shape(layers=1, taps=2), tmp_path / "out"
    train(Order(str(folder), out, recipe, shape, [prompts], [answers], slots=8))
    assert read_json(out / "curve.json")[0]["tau_by_set"].keys() == {"given", "asked"}
