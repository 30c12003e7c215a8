"""Shared fixtures, and which tests this machine cannot run."""

from __future__ import annotations

import gc
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# First, so that every test runs on the BLAS of MLX's own wheel: its rounding does not depend on
# the number of rows, which equality of tokens needs. (dflash_mlx.machine loads another one only
# before MLX is imported.)
import mlx.core as mx
import pytest

pytest_plugins = ["engine_fixtures", "metal_budget"]

# A shell that starts the suite in the background makes it ignore Ctrl-C, and what it starts, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run on the CPU, also on a Mac; those marked `metal` on its GPU."""
    on_gpu = request.node.get_closest_marker("metal") is not None
    before = mx.default_device()
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def row_invariant_blas() -> None:
    """Skips where rows of a matrix product depend on their number, as with macOS' Accelerate."""
    from dflash_mlx.machine import blas_in_use

    if sys.platform == "darwin":
        pytest.skip("Accelerate orders sums by the number of rows; equality is tested on Linux")
    assert not blas_in_use().fast, "exactness is tested on the BLAS of MLX's own wheel"


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of training write their course as numbers only: a picture takes longer than a tiny run.

    test_train_run.py has runs with the picture.
    """
    from dflash_mlx.train import curve, trainer

    monkeypatch.setattr(trainer, "save_curve", curve.save_numbers)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run Metal kernels on the CPU in every order of threads"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("metal_cpu")
    if marked and metafunc.config.getoption("--full"):
        from metal_cpu import SCHEDULES

        metafunc.fixturenames.append("schedule")
        metafunc.parametrize("schedule", SCHEDULES, indirect=True)


@pytest.fixture
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of threads of kernels that ask for none."""
    monkeypatch.setattr("metal_cpu.kernel.default_schedule", request.param)


#: files that take longest, in this order: begun last, one of them would run alone at the end
_LONG = (
    "test_smollm2",
    "test_train_families",
    "test_convert_cli",
    "test_lossless_families",
    "test_cache_growth",
    "test_decode",
    "test_readme",
    "test_kernel_engine",
    "test_train_run",
)


def _begun_first(item: pytest.Item) -> int:
    name = item.path.stem
    return _LONG.index(name) if name in _LONG else len(_LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_begun_first)
    missing = {}
    if not mx.metal.is_available():
        missing["metal"] = "needs an Apple GPU; MLX has no Metal device here"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        missing["metal_cpu"] = "runs Metal kernels on an x86-64 Linux CPU"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Loading a model collects garbage; without what is imported by now that takes no time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into the cache folder."""
    from dflash_mlx import hub
    from dflash_mlx.registry import resolve

    return hub.fetch(resolve("SmolLM2-135M").target_spec).path


@pytest.fixture(scope="session", autouse=True)
def _own_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave no calibrations and rejections in the cache folder of whoever runs them."""
    from dflash_mlx import calibration
    from dflash_mlx.kernels import record

    home = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "home_dir", lambda: home)
        patch.setattr(record, "home_dir", lambda: home)
        patch.setattr(calibration, "FIRST_SECONDS", 0.0)
        yield
