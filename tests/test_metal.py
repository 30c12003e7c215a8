"""On an Apple GPU: goldens, losslessness up to near-ties, quantized weights kept as they are."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import write_quantized
from oracle import OracleDrafter, plain_logits
from test_exact import FAMILIES, exact_target, logits_of_blocks
from tiny import tiny_prompt, tiny_target

from dflash_mlx.bench.compare import near_tie_gap
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.kernels import backend, try_all
from dflash_mlx.loader import Precision, load_target_as

pytestmark = pytest.mark.metal
TOKENS = 40


def on_cpu(family: str, ids: list[int]) -> np.ndarray:
    with mx.stream(mx.cpu):
        return plain_logits(tiny_target(family), ids)


def session_text(target, drafter, prompt: list[int]) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    run = Session(target, drafter, nullcontext).run(prompt, SamplingParams(), TOKENS, (), stats)
    return [token for step in run for token in step], stats


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_equal_those_of_the_cpu(family: str) -> None:
    ids = tiny_prompt(96, 50)
    seen = plain_logits(tiny_target(family), ids)
    assert np.abs(seen - on_cpu(family, ids)).max() <= 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("plan", [[0, 7, 2], [99]])
def test_dflash_equals_plain_up_to_near_ties(family: str, plan: list[int]) -> None:
    target = tiny_target(family)
    prompt = tiny_prompt(96, 20)
    truth, _ = session_text(target, None, prompt)
    drafter = OracleDrafter(
        len(prompt),
        truth,
        vocab_size=96,
        hidden_size=target.hidden_size,
        block_size=8,
        taps=(0, 2),
        plan=plan,
    )
    text, stats = session_text(target, drafter, prompt)
    assert stats.cycles == drafter.proposes > 0
    assert stats.accepted > 0
    if text != truth:
        parted = next(i for i, (a, b) in enumerate(zip(text, truth, strict=True)) if a != b)
        row = on_cpu(family, prompt + truth[:parted])[-1]
        gap, size = abs(row[text[parted]] - row[truth[parted]]), np.abs(row).max()
        assert gap <= near_tie_gap(float(size), mx.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_kept_quantized_equals_dequantized(tmp_path: Path, bits: int) -> None:
    folder = write_quantized(tmp_path / "m", "llama", bits=bits)
    kept = load_target_as(folder, Precision(mx.float32, True))
    dense = load_target_as(folder, Precision(mx.float32, False))
    ids = tiny_prompt(96, 20)
    assert np.abs(plain_logits(kept, ids) - plain_logits(dense, ids)).max() <= 1e-2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_kernel_agrees_with_its_twin(dtype: mx.Dtype) -> None:
    backend.forget()
    assert try_all([dtype]) == []
    assert backend.status().count(",") >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_mode_gives_the_same_bits_one_by_one_and_in_blocks(family: str) -> None:
    target, ids = exact_target(family), tiny_prompt(96, 36)
    single = mx.concatenate(logits_of_blocks(target, [ids[:20], *([i] for i in ids[20:])])[1:])
    for sizes in ([16], [3, 13]):
        blocks = [ids[:20], ids[20 : 20 + sizes[0]], ids[20 + sizes[0] :]]
        found = mx.concatenate(logits_of_blocks(target, [b for b in blocks if b])[1:])
        assert mx.array_equal(found, single)
