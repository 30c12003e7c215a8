"""Shared fixtures, and which tests this machine cannot run."""

from __future__ import annotations

from pathlib import Path

# First, so that every test runs on the BLAS of MLX's own wheel: its rounding does not depend on
# the number of rows, which equality of tokens needs. (dflash_mlx.machine loads another one only
# before MLX is imported.)
import mlx.core as mx
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if mx.metal.is_available():
        return
    skip = pytest.mark.skip(reason="needs an Apple GPU; MLX has no Metal device here")
    for item in items:
        if item.get_closest_marker("metal"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into the cache folder."""
    from dflash_mlx import hub
    from dflash_mlx.registry import resolve

    return hub.fetch(resolve("SmolLM2-135M").target_spec).path
