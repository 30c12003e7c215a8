"""kernel_cost's model of a cycle's dispatches: the counts are by hand, and no operation is free."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import Session
from dflash_mlx.decode.stats import GenerationStats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import dispatch_table
import kernel_cost
import kernel_dispatches
from dispatch_table import CORE, FAST, PRODUCT
from kernel_dispatches import count_cycle, cycle_total, per_layer, recorder

# A norm, three products, swiglu, a sum.
MLP = 1 + 3 * PRODUCT + 1 + 1


def test_dispatches_of_a_drafter() -> None:
    layers = kernel_cost.LAYERS
    before, after = (count_cycle(kernels, layers) for kernels in (False, True))
    # fc, K and V of all layers, and a write for each kind of window.
    assert after["inject"] == {"fuse_taps": 1, "head_projection": 1, "__setitem__": 1}
    mixed = count_cycle(True, layers, mixed=True)["inject"]
    assert mixed == {"fuse_taps": 1, "head_projection": 1, "__setitem__": 2}
    # Two taps joined, three products, two norms with weights apart, rope, keys and values joined,
    # and two writes a layer.
    assert before["inject"].total() == 2 + 3 * PRODUCT + 2 + 2 + 1 + 2 + 2 * layers
    assert before["draft"]["scaled_dot_product_attention"] == layers
    assert after["draft"]["block_attention"] == after["draft"]["attention_combine"] == layers
    # Two joined ids and a look-up, final norm and head, the casts of logits and tokens, the choice,
    # and whether a logit was NaN.
    rest = 2 + 1 + 1 + 1 + 2 + 1 + 3
    assert after["draft"].total() == per_layer(True) * layers + rest
    assert before["draft"].total() == 26 * layers + rest


def test_dispatches_of_a_draft_layer() -> None:
    # Four norms, seven products in two parts, two ropes, two writes, attention, swiglu, two sums.
    assert per_layer(False) == 4 + 7 * PRODUCT + 2 + 2 + 1 + 1 + 2 == 26
    # Heads, two of attention, its output, and two of the MLP.
    assert per_layer(True) == 6 <= 12
    # DFlash 2 has a projection and two convolutions around each of the two sublayers.
    assert per_layer(True, second=True) == 6 + 2 * (1 + 2) <= 12


def test_dispatches_of_a_dense_target() -> None:
    layers = kernel_cost.LAYERS
    before, after = (count_cycle(kernels, layers) for kernels in (False, True))
    # Embedding, final norm and head.
    assert before["verify"].total() == 3 + per_layer(False) * layers
    # Attention in two parts for the splits of the context.
    assert after["verify"].total() == before["verify"].total() + layers
    for counts in (before, after):
        assert counts["commit"] == {}
        # Drafts clipped from both sides and joined with the anchor; the target's choices as
        # integers; what agrees, as integers, and up to where.
        verdict = 2 + 2 + 2 + 1 + 1 + 1 + 1
        # The chosen logits that are emitted (row <= accepted) are finite: a look-up, the rows,
        # their comparison and its opposite, six for finite, either, all.
        sound = 1 + 1 + 1 + 1 + 6 + 1 + 1
        # Two flags as integers, three stacked, and joined with the tokens.
        assert counts["accept"].total() == verdict + sound + 2 + 3 + 2


def test_dispatches_of_a_hybrid_target() -> None:
    linear, full = 3, 1
    before, after = (
        count_cycle(kernels, linear + full, family="qwen3_5") for kernels in (False, True)
    )
    # Norm, four projections, the tail joined with the inputs, convolution, silu and a cast; norm
    # and scales of queries and keys, both copied from beside the values.
    delta = 1 + 4 * PRODUCT + 2 + 1 + 1 + 1 + (2 + 2) + (2 + 1)
    # Decay, beta and its cast, the rule with a copy of the values, a norm with its weights cast,
    # the gate, projection and sum.
    delta += 1 + 2 + 2 + 2 + 1 + PRODUCT + 1 + MLP
    # Norm, projections, norms (queries copied from beside their gates), two ropes over a part of
    # the heads, writes, attention of heads that have no fused kernel, its rows and the gates
    # copied, sigmoid, product, projection, sum.
    attention = 1 + 3 * PRODUCT + 3 + 2 * 2 + 2 + 8 + 2 + 1 + 1 + PRODUCT + 1 + MLP
    assert before["verify"].total() == 3 + linear * delta + full * attention
    # The kernel takes as many, but attention's output needs no copy.
    assert after["verify"].total() == before["verify"].total() - full * (8 + 1 - 2)
    assert after["verify"]["gated_delta_advance"] == linear
    # The rows again, with a copy of their values, and the convolution's tail.
    assert before["commit"] == {"gated_delta_update": 2 * linear, "contiguous": linear}
    assert after["commit"] == {"gated_delta_replay": linear, "contiguous": linear}
    for part in ("draft", "inject"):
        assert before[part] == count_cycle(False, linear + full)[part]


@pytest.mark.parametrize("kernels", [False, True])
def test_the_decode_loop_has_no_dispatch_beside_the_parts(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more cycle of a whole generation is one cycle's total."""
    monkeypatch.setattr(kernel_dispatches, "VOCABULARY", 64)
    target, drafter = kernel_dispatches._pair("qwen3", 2, False)

    def total(cycles: int) -> int:
        with recorder() as counted, ExitStack() as stack:
            if kernels:
                stack.enter_context(kernel_dispatches.kernels_counted(counted))
            stats = GenerationStats()
            session = Session(target, drafter, nullcontext)
            tokens = 1 + kernel_dispatches.ROWS * cycles
            run = session.run([0] * 20, SamplingParams(), tokens, (), stats)
            assert len(list(run)) == 1 + cycles == 1 + stats.cycles
            return counted.total()

    counts = kernel_dispatches._count.__wrapped__(kernels, 2, False, "qwen3")
    assert total(2) - total(1) == cycle_total(counts)


@pytest.mark.parametrize(("family", "second"), kernel_cost.CYCLES)
def test_kernel_cost_prints_the_parts_and_the_whole(
    family: str, second: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_cost.show_cycle(family, second)
    printed = capsys.readouterr().out
    counts = {
        part: (int(a), int(b)) for part, a, b in re.findall(r"  (.+): (\d+) -> (\d+)", printed)
    }
    whole = counts.pop("whole cycle, modelled")
    assert set(counts) == set(kernel_dispatches.PARTS)
    assert whole == tuple(map(sum, zip(*counts.values(), strict=True)))
    assert whole[1] < whole[0]


def test_slices_are_views_and_a_bare_integer_is_a_look_up() -> None:
    """As the CPU back-end has it, which indexes by the same graph."""
    x = mx.zeros((3, 4, 5))
    every = slice(None)
    for index in (0, -1, (0,), (0, ...), (every, 0), (every, every, 1), slice(1, 2), (2, None)):
        start, part = (np.array(a, copy=False).ctypes.data for a in (x, x[index]))
        copied = not start <= part < start + x.nbytes
        assert dispatch_table.ARRAY["__getitem__"](x, index) == copied, index
    assert dispatch_table.ARRAY["__getitem__"](x, mx.array([1])) == 1


def test_operations_cost_what_their_arguments_make_them_cost() -> None:
    half = mx.zeros((1, 16, 2, 640), mx.float16)
    joined = half.reshape(1, 16, -1)
    left = half[:, :, :1]
    assert CORE["contiguous"](half) == 0
    assert CORE["contiguous"](half[:, :2]) == 1  # 2 of 16 rows would keep the others alive
    assert CORE["contiguous"](half[:, :15]) == 0
    assert CORE["contiguous"](left) == 1
    assert CORE["reshape"](joined, (1, 16, 2, 640)) == CORE["reshape"](half, 1, 16, -1) == 0
    assert CORE["reshape"](half.swapaxes(1, 2), 1, 2, 16, 20, 32) == 0
    assert CORE["reshape"](half.swapaxes(1, 2), 1, 2, -1) == 1
    assert FAST["rms_norm"](half, None, 1e-6) == 1
    assert FAST["rms_norm"](half[..., :64], None, 1e-6) == 2
    assert FAST["rms_norm"](half.astype(mx.float32), mx.ones((640,), mx.float16), 1e-6) == 2
    heads = half.transpose(0, 2, 1, 3)
    assert FAST["rope"](heads, 640, offset=0) == FAST["rope"](half, 640, offset=0) == 1
    assert FAST["rope"](half, 64, offset=0) == FAST["rope"](half[..., :64], 64, offset=0) == 2
    assert dispatch_table.ARRAY["__add__"](half, 1.0) == 1
    assert dispatch_table.ARRAY["__add__"](half, mx.zeros((1,))) == 2
    attend, query = FAST["scaled_dot_product_attention"], mx.zeros((1, 2, 9, 128))
    assert attend(query, query, query, scale=1.0, mask="causal") == 1
    wide = mx.zeros((1, 2, 9, 256))
    assert attend(wide, wide, wide, scale=1.0, mask="causal") == 8
    assert attend(wide, wide, wide, scale=1.0, mask=mx.ones((9, 9), mx.bool_)) == 5
    assert CORE["argpartition"](mx.zeros((3, 2048)), 4) == 1
    assert CORE["argpartition"](mx.zeros((3, 151936)), 4) == 2 + 2 * 7  # 75 blocks


def test_a_form_without_a_count_is_an_error() -> None:
    few, wide = mx.zeros((1, 2, 8, 64)), mx.zeros((1, 2, 9, 256))
    rows = [mx.zeros((1, 3, 2, 128))] * 3 + [mx.zeros((1, 3, 2))] * 2
    for unknown in (
        lambda: FAST["scaled_dot_product_attention"](few, few, few, scale=1.0),
        lambda: FAST["scaled_dot_product_attention"](wide, wide, wide, scale=1.0, sinks=few),
        lambda: FAST["gated_delta_update"](*rows),
        lambda: CORE["conv1d"](mx.zeros((1, 9, 4)), mx.zeros((4, 3, 2)), 1, 0, 1, 2),
    ):
        with pytest.raises(dispatch_table.UncountedError):
            unknown()


def test_an_operation_without_a_count_is_an_error() -> None:
    for unknown in (
        lambda x: mx.erf(x),
        lambda x: x**2,
        lambda x: x.cumsum(),
        lambda x: mx.fast.layer_norm(x, x, x, 1),
    ):
        with recorder(), pytest.raises(dispatch_table.UncountedError, match="no dispatches"):
            unknown(mx.zeros((3,)))
    with recorder() as counted:
        mx.softmax(mx.ones((3,)))
    assert counted == {"ones": 1, "softmax": 1}
