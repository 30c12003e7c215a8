"""The folder of a run: whose it is, who may write it, and what failures leave of it."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_training import answered_target

import dflash_mlx
from dflash_mlx.cli import main
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.train import folder as folders
from dflash_mlx.train import run as runs
from dflash_mlx.train.answer_file import AnswerFile, AnswerSettings
from dflash_mlx.train.checkpoint import STATE, Progress, load_state, save_state
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.export import save_drafter
from dflash_mlx.train.files import write_text
from dflash_mlx.train.folder import MARK, locked, taken
from dflash_mlx.train.interrupt import uninterrupted
from dflash_mlx.train.naming import target_name
from dflash_mlx.train.order import Order
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import Voice, train
from dflash_mlx.train.shape import Shape
from dflash_mlx.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_picture")

RECIPE = Recipe(block_size=4, steps=2, step_blocks=8, pass_blocks=8, held_out=1, measure_every=2)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return answered_target(tmp_path_factory.mktemp("given"), 5)


@pytest.fixture
def order(given, tmp_path):
    shape = Shape(layers=1, taps=2)
    return Order(given[0], tmp_path / "deep" / "out", RECIPE, shape, answers=[given[1]])


@pytest.fixture
def asked(order, tmp_path):
    """An order whose target answers prompts."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"Question {i}?", "max": 6} for i in range(5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(order, answers=[], prompts=[prompts], slots=2)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("init", ["target", "the same folder"])
def test_a_folder_of_something_else_is_left_alone(order, given, init):
    foreign = Path(given[0])
    before = content_of(foreign)
    with pytest.raises(UsageError, match=f"{foreign} holds other things"):
        train(replace(order, out=foreign, init=init.replace("the same folder", str(foreign))))
    assert content_of(foreign) == before


def test_a_drafter_without_a_state_is_left_alone(order):
    order.out.mkdir(parents=True)
    (order.out / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=f"{order.out} holds other things"):
        train(order)
    assert content_of(order.out) == {"run.json": b"{}"}


def test_an_empty_folder_of_version_control_is_taken(tmp_path):
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), taken(tmp_path):
        raise KeyboardInterrupt
    assert (tmp_path / ".git" / "refs").is_dir()
    with taken(tmp_path):
        assert (tmp_path / MARK).exists()


def test_a_run_stopped_before_its_first_state_goes_on(asked, monkeypatch):
    whole = AnswerFile.add

    def stopping(self, text):
        whole(self, text)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(asked)
    file = asked.out / "work" / "answers.jsonl"
    first = file.read_text()
    assert first.count("\n") == 1
    assert {f.name for f in asked.out.iterdir()} == {"work", MARK}
    with pytest.raises(UsageError, match="more than the limit"):
        train(replace(asked, cache_limit_gb=1e-6))
    assert file.read_text().startswith(first)
    assert file.read_text().count("\n") == 5


def test_the_first_step_is_told_and_says_how_long_it_takes(order):
    told = []
    train(order, Voice(report=told.append))
    assert [report.step for report in told] == [1, 2]
    assert told[0].seconds_left > 0
    assert told[0].tau is None


def test_an_unfinished_runs_folder_says_so_as_a_drafter(order, monkeypatch):
    order = replace(order, recipe=replace(order.recipe, measure_every=1))
    keep = Trainer._keep
    for measured, told in ((0, "is a training run's and has no drafter yet"), (1, None)):

        def stopping(self, sets, measured=measured):
            if measured:
                keep(self, sets)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_keep", stopping)
            with pytest.raises(KeyboardInterrupt):
                train(order)
        if told:
            with pytest.raises(CheckpointError, match=told):
                dflash_mlx.load(order.target, draft=str(order.out))
    engine = dflash_mlx.load(order.target, draft=str(order.out))
    assert [w for w in engine.warnings if "best drafter so far of a run" in w]
    train(order)
    engine = dflash_mlx.load(order.target, draft=str(order.out))
    assert not [w for w in engine.warnings if "best drafter so far" in w]


def test_two_runs_do_not_share_a_folder(order):
    with taken(order.out), pytest.raises(UsageError, match=f"Another training run .* {order.out}"):
        train(order)
    assert not order.out.parent.exists()


def test_two_runs_do_not_make_data_in_one_folder(order, tmp_path):
    work = tmp_path / "shared" / "work"
    with locked(work), pytest.raises(UsageError, match=f"Another training run .* {work}"):
        train(replace(order, work=work))
    assert not work.parent.exists()
    assert not order.out.parent.exists()
    # What is there can be read by several, and one folder may serve as both.
    assert train(replace(order, work=work))["steps"] == 2
    assert train(replace(order, out=work.parent / "both", work=work.parent / "both"))["steps"] == 2


@pytest.mark.parametrize(
    "changes", [{"init": "/nowhere"}, {"cache_limit_gb": 1e-6}, {"shape": Shape(taps=9)}]
)
def test_a_refused_run_leaves_no_folder(order, tmp_path, changes):
    with pytest.raises(dflash_mlx.errors.DFlashError):
        train(replace(order, work=tmp_path / "its" / "work", **changes))
    assert not order.out.parent.exists()
    assert not (tmp_path / "its").exists()
    with pytest.raises(dflash_mlx.errors.DFlashError):
        train(replace(order, **changes))
    assert not order.out.parent.exists()
    order.out.mkdir(parents=True)
    with pytest.raises(dflash_mlx.errors.DFlashError):
        train(replace(order, **changes))
    assert not list(order.out.iterdir())


def test_refused_answers_leave_no_folder(asked):
    with pytest.raises(UsageError, match="caches of one sequence"):
        train(replace(asked, memory_gb=1e-6))
    assert not asked.out.parent.exists()


@contextmanager
def full_disk(size: int):
    """No file grows above `size` bytes: writes fail as on a full disk, some of them half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WEIGHTS = {"a": mx.ones((5000,))}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (STATE, lambda at, w: save_state(at, w, {}, Progress(), {})),
        ("model.safetensors", lambda at, w: save_drafter(at, {}, w)),
        ("text.json", lambda at, w: write_text(at / "text.json", "x" * 9000)),
    ],
)
def test_a_full_disk_is_one_sentence_and_nothing_half(tmp_path, name, write):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"old")
    with full_disk(5000), pytest.raises(UsageError, match=rf"/{name} cannot be written \(.+\)"):
        write(tmp_path, WEIGHTS)
    assert (tmp_path / name).read_bytes() == b"old"
    assert not list(tmp_path.rglob("partial-*"))


def test_a_full_disk_leaves_a_file_of_whole_answers(tmp_path):
    path, settings = tmp_path / "answers.jsonl", AnswerSettings("tiny", 0.0, 6, 0)
    first, second = Text("a", (1,), (2, 3)), Text("b", (1,), tuple(range(200)))
    with AnswerFile(path, settings, 288) as file:
        file.add(first)
        with full_disk(300), pytest.raises(UsageError, match=r"answers.jsonl cannot be written"):
            file.add(second)
    assert path.read_text() == first.as_json() + "\n"


def test_errors_that_are_not_of_the_disk_stay_themselves(tmp_path):
    with pytest.raises(ValueError, match="broadcast"):
        save_state(tmp_path, {"a": mx.ones(3) + mx.ones(4)}, {}, Progress(), {})
    assert load_state(tmp_path) is None


@pytest.mark.parametrize("online", [False, True])
def test_a_file_in_the_place_of_work_is_named(order, asked, tmp_path, online):
    work = tmp_path / "file"
    work.write_text("mine")
    with pytest.raises(UsageError, match=rf"{work}.* cannot be a folder \(.+\)"):
        train(replace(asked if online else order, work=work, online=online))
    assert work.read_text() == "mine"
    assert not order.out.parent.exists()


def test_an_unusable_path_is_named(order):
    with pytest.raises(UsageError, match=r"/proc/none cannot be a folder \(.+\)"):
        train(replace(order, out=Path("/proc/none")))


@pytest.mark.parametrize("option", ["--out", "--work"])
def test_an_empty_path_is_not_the_current_folder(order, tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    given = {"--out": "out", "--work": "work", option: ""}
    arguments = ["train", order.target, "--answers", str(order.answers[0])]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, *(word for pair in given.items() for word in pair)])
    assert stopped.value.code == 2
    assert f"{option} is empty. Give a folder." in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_run_that_named_its_target_by_a_path_goes_on(asked, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs, "target_name", lambda *given: f"/once/here/{target_name(*given)}")
        assert train(asked)["steps"] == 2
    told = []
    train(asked, Voice(say=told.append))
    assert "Going on behind step 2 of 2." in told


def test_weights_changed_in_place_have_another_name(order, tmp_path):
    copied = tmp_path / "target"
    shutil.copytree(order.target, copied)
    local = replace(order, target=str(copied))
    names = [target_name(local, dflash_mlx.load(str(copied), draft=None))]
    (copied / "model.safetensors").touch()
    names.append(target_name(local, dflash_mlx.load(str(copied), draft=None)))
    weights = mx.load(str(copied / "model.safetensors"))
    mx.eval(weights)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.save_safetensors(str(copied / "model.safetensors"), weights)
    names.append(target_name(local, dflash_mlx.load(str(copied), draft=None)))
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("target@") for name in names)


def test_a_run_killed_while_it_marked_its_folder_goes_on(tmp_path):
    (tmp_path / "partial-training.unfinished.json").write_text("{")
    with taken(tmp_path):
        assert (tmp_path / "training.unfinished.json").exists()


def test_a_disk_without_locks_is_no_other_run(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(folders.fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match="cannot be locked"), taken(tmp_path):
        pass


def test_a_path_written_otherwise_is_the_same_target(order, monkeypatch):
    monkeypatch.chdir(Path(order.target).parent)
    folder = Path(order.target).name
    names = {
        target_name(replace(order, target=path), dflash_mlx.load(path, draft=None))
        for path in (order.target, f"./{folder}", f"../{Path.cwd().name}/{folder}/")
    }
    assert len(names) == 1


def test_names_of_pinned_weights_are_their_pins():
    pinned = Order("SmolLM2-135M", Path("out"))
    loaded = SimpleNamespace(model="SmolLM2-135M", revisions=(None, None), path=None)
    assert target_name(pinned, loaded) == "SmolLM2-135M@b179c9523d0e6a0f"
    assert target_name(pinned, SimpleNamespace(model="a/b", revisions=("c0", None))) == "a/b@c0"


def test_a_signal_waits_for_the_end_of_a_section():
    steps = []

    def run():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("whole")
        steps.append("behind")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("where", ["optimizer", "drafter"])
def test_a_signal_in_a_step_leaves_the_state_of_a_whole_one(order, monkeypatch, where):
    """The weights saved are those of the step counted, and a best τ has its drafter."""
    from dflash_mlx.train import trainer

    seen = {}

    def interrupting(make):
        def wrapped(*given):
            if where == "drafter":  # τ is counted as the best one, its drafter not there yet
                signal.raise_signal(signal.SIGINT)
            seen["made"] = make(*given)
            if where == "optimizer":  # its state is step 1's, weights and progress are step 0's
                signal.raise_signal(signal.SIGINT)
            return seen["made"]

        return wrapped

    if where == "optimizer":
        compiled = mx.compile
        monkeypatch.setattr(mx, "compile", lambda *args, **kw: interrupting(compiled(*args, **kw)))
    else:
        monkeypatch.setattr(trainer, "save_drafter", interrupting(trainer.save_drafter))
    with pytest.raises(KeyboardInterrupt):
        train(order)
    parameters, optimizer, progress, _ = load_state(order.out)
    assert progress.step == int(optimizer["step"]) == progress.place
    if where == "optimizer":
        ours, made = dict(tree_flatten(parameters)), dict(tree_flatten(seen["made"]))
        assert progress.step == 1
        assert all(mx.array_equal(ours[n], made[n]) for n in made)
    else:
        assert progress.history[-1]["step"] == progress.best_step == 2
        assert (order.out / "model.safetensors").exists()
