"""Exact mode: rows verified together have the bits of rows decoded one at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu, launches
from tiny import tiny_prompt, tiny_target

from dflash_mlx import machine
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import backend
from dflash_mlx.models import exact
from dflash_mlx.segment import Segment

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "head_dim": 16},
    "qwen3": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen3_5": {"num_hidden_layers": 2},
    "gemma4": {},
}


def logits_of_blocks(target: Any, blocks: list[list[int]]) -> list[mx.array]:
    """Logits of each block, run and committed one behind the other."""
    cache, found = target.make_cache(), []
    for block in blocks:
        hidden, _ = target.forward([Segment(mx.array(block, dtype=mx.int32), cache)])
        found.append(target.logits(hidden)[0])
        mx.eval(found[-1], cache.arrays())
        cache.commit(len(block))
    return found


def _blocks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [ids[a:b] for a, b in pairwise(cuts)]


def exact_target(family: str, bits: int = 0) -> Any:
    target = tiny_target(family, **FAMILIES[family])
    if bits:
        wide = lambda _, m: isinstance(m, nn.Linear) and m.weight.shape[1] % 32 == 0  # noqa: E731
        nn.quantize(target, 32, bits, class_predicate=wide)
    exact.make_exact(target)
    return target


@pytest.mark.metal_cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_one_by_one_and_in_blocks(family: str) -> None:
    ids = tiny_prompt(96, 20 + 6)
    prompt = ids[:20]  # longer than a kernel takes, as prefill is; alike in both
    with kernels_on_cpu(Mode.FAST) as made:
        target = exact_target(family, bits=4 if family == "llama" else 0)
        single = mx.concatenate(logits_of_blocks(target, [prompt, *_blocks(ids[20:], [1] * 6)])[1:])
        for sizes in ([6], [2, 4]):
            found = mx.concatenate(
                logits_of_blocks(target, [prompt, *_blocks(ids[20:], sizes)])[1:]
            )
            assert mx.array_equal(found, single), sizes
        ran = launches(made)
        assert ran["rows_matmul"] > 100
        assert ran["block_attention"] >= 9
    assert mx.std(single).item() > 0.5


@pytest.mark.metal_cpu
def test_bits_differ_without_exact_mode() -> None:
    """The test above has teeth: attention by MLX for single rows is enough to part them."""
    ids = tiny_prompt(96, 26)
    with kernels_on_cpu(Mode.FAST):
        target = exact_target("qwen3")
        for module in target.modules():
            if hasattr(module, "exact"):
                module.exact = False
        single = mx.concatenate(
            logits_of_blocks(target, [ids[:20], *_blocks(ids[20:], [1] * 6)])[1:]
        )
        block = logits_of_blocks(target, [ids[:20], ids[20:]])[1]
    assert not mx.array_equal(single, block)
    assert mx.allclose(single, block, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_kernels_it_is_the_same_model(family: str, row_invariant_blas: None) -> None:
    ids = tiny_prompt(96, 30)
    plain = tiny_target(family, **FAMILIES[family])
    switched = exact_target(family)
    for a, b in zip(
        *(logits_of_blocks(t, [ids[:20], ids[20:]]) for t in (plain, switched)), strict=True
    ):
        assert mx.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "part"),
    [("qwen3_moe", "ExpertLinear"), ("gpt_oss", "ExpertLinear"), ("qwen3_next", "ExpertLinear")],
)
def test_a_part_without_an_exact_operation_is_named(
    family: str, part: str, row_invariant_blas: None
) -> None:
    with pytest.raises(UsageError, match=part):
        exact.make_exact(tiny_target(family))


def test_weights_and_heads_without_a_kernel_are_named(row_invariant_blas: None) -> None:
    with pytest.raises(UsageError, match=r"self_attn.*Attention"):
        exact.make_exact(tiny_target("llama"))  # heads of 12
    target = tiny_target("qwen3")
    nn.quantize(
        target,
        32,
        4,
        mode="mxfp4",
        class_predicate=lambda path, m: isinstance(m, nn.Linear) and m.weight.shape[1] % 32 == 0,
    )
    with pytest.raises(UsageError, match="QuantizedLinear"):
        exact.make_exact(target)


def test_a_blas_that_orders_sums_by_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "blas_in_use", lambda: machine.BlasChoice("OpenBLAS 0.3", "test"))
    with pytest.raises(UsageError, match="orders sums by the number"):
        exact.make_exact(tiny_target("qwen3"))


@pytest.mark.metal_cpu
def test_a_rejected_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_on_cpu(Mode.FAST):
        target = exact_target("qwen3")
        monkeypatch.setitem(backend._rejected, "rows_matmul", "it differs")
        with pytest.raises(UsageError, match="rows_matmul: it differs"):
            logits_of_blocks(target, [[1, 2, 3]])


def test_blocks_beyond_the_kernels_rows_are_refused() -> None:
    class Wide:
        block_size = 24

    with pytest.raises(UsageError, match="at most 16 rows and a block has 24"):
        Engine(None, None, Wide(), reason="", model="", exact=True)  # type: ignore[arg-type]
