"""What test_metal.py does on a Mac, done here on the harness, so that it cannot go out of date."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
import test_metal
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu

pytestmark = pytest.mark.metal_cpu


def test_what_runs_on_macs_runs_on_the_harness(tmp_path: Path) -> None:
    test_metal.test_logits_equal_those_of_the_cpu("qwen3")
    test_metal.test_kept_quantized_equals_dequantized(tmp_path, 4)
    with kernels_on_cpu(Mode.FAST):
        test_metal.test_dflash_equals_plain_up_to_near_ties("llama", [0, 7, 2])
        test_metal.test_exact_mode_gives_the_same_bits_one_by_one_and_in_blocks("qwen3")
    with kernels_on_cpu(Mode.FAST, trusted=False):
        test_metal.test_every_kernel_agrees_with_its_twin(mx.float32)
