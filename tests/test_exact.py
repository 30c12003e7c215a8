"""Exact mode: rows verified together have the bits of rows decoded one at a time."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_cpu import Mode
from metal_kernels import kernels_on_cpu, launches
from oracle import OracleDrafter
from tiny import tiny_prompt, tiny_target

from dflash_mlx import machine
from dflash_mlx.cache import RecurrentCache
from dflash_mlx.cache.pool import Places
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import DeltaRows, backend
from dflash_mlx.models import exact
from dflash_mlx.segment import Segment, by_segment

TOKENS = 14
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


def _wide(path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.weight.shape[1] % 32 == 0


def exact_target(family: str, bits: int = 0) -> Any:
    target = tiny_target(family, **FAMILIES[family])
    if bits:
        nn.quantize(target, 32, bits, class_predicate=_wide)
    exact.make_exact(target)
    return target


def _generate(
    target: Any, drafter: OracleDrafter | None, prompt: list[int]
) -> tuple[list[int], mx.array, GenerationStats]:
    """The text, the logits that chose its tokens [TOKENS, V], and the statistics."""
    seen: list[mx.array] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def logits(self, rows: mx.array) -> mx.array:
            seen.append(target.logits(rows))
            return seen[-1]

    stats = GenerationStats()
    session: Any = Session(Watched(), drafter, nullcontext)  # type: ignore[arg-type]
    steps = [step for step in session.run(prompt, SamplingParams(), TOKENS, (), stats) if step]
    assert len(seen) == len(steps)
    chosen = [logits[: len(step)] for logits, step in zip(seen, steps, strict=True)]
    return [token for step in steps for token in step], mx.concatenate(chosen), stats


@pytest.mark.metal_cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_plain_decoding_to_the_last_bit_of_its_logits(family: str) -> None:
    prompt = tiny_prompt(96, 20)  # longer than a kernel takes, as prefill is; alike in both
    with kernels_on_cpu(Mode.FAST) as made:
        target = exact_target(family, bits=4 if family == "llama" else 0)
        truth, single, _ = _generate(target, None, prompt)
        drafter = OracleDrafter(
            *(len(prompt), truth),
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            block_size=exact.MAX_ROWS,
            taps=(0,),
            plan=[6, 0, 2, 15],
            check_growth=False,
        )
        text, together, stats = _generate(target, drafter, prompt)
    assert text == truth
    assert stats.accepted >= 8
    assert mx.array_equal(together, single)
    assert mx.std(single).item() > 0.5
    ran = launches(made)
    # Every product of each pass behind the prompt, and the head's for the prompt's last row.
    layers = sum(isinstance(module, nn.Linear | nn.QuantizedLinear) for module in target.modules())
    products = layers + ("lm_head" not in target)
    passes = TOKENS - 1 + stats.cycles
    assert ran["rows_matmul"] == products * passes + 2
    assert ran["block_attention"] >= stats.cycles
    if family == "qwen3_5":
        assert ran["gated_delta_replay"] >= 2


def _text_of(ids: list[int], sizes: list[int], target: Any) -> mx.array:
    return mx.concatenate(logits_of_blocks(target, _blocks(ids, sizes)))


# Rows of every sequence in each round: 21 rows at once behind a prompt beyond a kernel's rows, one
# row each, and a prompt that joins others' blocks.
ROUNDS = [[20, 3, 0], [8, 9, 4], [1, 1, 1], [16, 1, 20], [1, 16, 3]]


@pytest.mark.metal_cpu
@pytest.mark.parametrize("together", ["own caches", "pooled caches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_bits_among_others(family: str, together: str) -> None:
    sizes = list(zip(*ROUNDS, strict=True))
    texts = [tiny_prompt(96, sum(rows), seed) for seed, rows in enumerate(sizes)]
    with kernels_on_cpu(Mode.FAST):
        target = exact_target(family)
        alone = [
            _text_of(t, [n for n in s if n], target) for t, s in zip(texts, sizes, strict=True)
        ]
        places = Places(len(texts))
        stacks = [target.make_cache() for _ in texts]
        if together == "pooled caches":
            stacks = [places.add(stack) for stack in stacks]
        found: list[list[mx.array]] = [[] for _ in texts]
        done = [0] * len(texts)
        for rows in ROUNDS:
            live = [i for i, count in enumerate(rows) if count]
            segments = [
                Segment(mx.array(texts[i][done[i] : done[i] + rows[i]], dtype=mx.int32), stacks[i])
                for i in live
            ]
            hidden, features = target.forward(segments, (0, 1))
            assert features is not None
            assert features.shape[1] == hidden.shape[1] == sum(rows)
            logits = by_segment(target.logits(hidden), segments)
            mx.eval(*logits, *(a for stack in stacks for a in stack.arrays()))
            for i, part in zip(live, logits, strict=True):
                found[i].append(part[0])
                stacks[i].commit(rows[i])
                done[i] += rows[i]
    for parts, want in zip(found, alone, strict=True):
        assert mx.array_equal(mx.concatenate(parts), want)


@pytest.mark.parametrize(
    ("rows", "runs"),
    [([1], [1]), ([16, 1], [1, 1]), ([8, 8, 1], [2, 1]), ([3, 40, 2, 14], [1, 1, 2])],
)
def test_segments_share_a_pass_up_to_the_kernels_rows(rows: list[int], runs: list[int]) -> None:
    cache: Any = None
    segments = [Segment(mx.zeros((count,), mx.int32), cache) for count in rows]
    made = list(exact.packs(segments))
    assert [len(pack) for pack in made] == runs
    assert [segment for pack in made for segment in pack] == segments


def test_logits_of_no_rows(row_invariant_blas: None) -> None:
    target = exact_target("llama")
    shape = (1, 0, target.hidden_size)
    assert target.logits(mx.zeros(shape)).shape == (1, 0, target.vocab_size)


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


@pytest.mark.metal_cpu
@pytest.mark.parametrize("operation", ["gated_delta_advance", "gated_delta_replay"])
def test_a_recurrence_without_its_kernel_is_an_error(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = mx.full((1, 3, 1), 0.7)
    rows = DeltaRows(*[mx.ones((1, 3, 1, 8))] * 3, gates, gates)
    with kernels_on_cpu(Mode.FAST):
        target = exact_target("qwen3_5")
        caches = [c for c in target.make_cache() if isinstance(c, RecurrentCache)]
        assert caches
        assert all(cache.exact for cache in caches)
        monkeypatch.setitem(backend._rejected, operation, "it differs")
        with pytest.raises(UsageError, match=f"{operation}: it differs"):
            _run_and_keep(RecurrentCache(4, exact=True), rows, 2)
        _run_and_keep(RecurrentCache(4), rows, 2)


def _run_and_keep(cache: RecurrentCache, rows: DeltaRows, n: int) -> None:
    cache.window(mx.zeros((1, rows.keys.shape[1], 8)))
    cache.advance(rows)
    cache.commit(n)


def test_blocks_beyond_the_kernels_rows_are_refused() -> None:
    class Wide:
        block_size = 24

    with pytest.raises(UsageError, match="at most 16 rows and a block has 24"):
        Engine(None, None, Wide(), reason="", model="", exact=True)  # type: ignore[arg-type]
