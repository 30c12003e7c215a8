"""Shared fixtures, and which tests this machine cannot run."""

from __future__ import annotations

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

pytest_plugins = ["engine_fixtures"]

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not mx.metal.is_available():
        missing["metal"] = "needs an Apple GPU; MLX has no Metal device here"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        missing["metal_cpu"] = "runs Metal kernels on an x86-64 Linux CPU"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into the cache folder."""
    from dflash_mlx import hub
    from dflash_mlx.registry import resolve

    return hub.fetch(resolve("SmolLM2-135M").target_spec).path


@pytest.fixture(scope="session", autouse=True)
def _own_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny models leave no calibrations in the cache folder of whoever runs the tests."""
    from dflash_mlx import calibration

    home = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "home_dir", lambda: home)
        patch.setattr(calibration, "FIRST_SECONDS", 0.0)
        yield
