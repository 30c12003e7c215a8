"""The Metal harness proves itself: one planted fault of each kind, each caught and named."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import SCHEDULES, CpuKernel, Fault, Mode
from metal_cpu.build import compile_errors
from metal_cpu.launch import time_limit
from metal_cpu.source import SourceError, check_rules, to_cpp

pytestmark = pytest.mark.metal_cpu

THREADS = 64

# A neighbour's value through threadgroup memory, and a sum over the SIMD group; `fault` breaks it.
_BODY = """
    threadgroup float shared[64];
    threadgroup float other[2][8];
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    uint group = threadgroup_position_in_grid.x;
    float mine = x[i];
    shared[l] = mine;
    switch (fault) {
        case 1: break;
        case 2: threadgroup_barrier(mem_flags::mem_none); break;
        case 3: threadgroup_barrier(mem_flags::mem_device); break;
        case 4: simdgroup_barrier(mem_flags::mem_threadgroup); break;
        case 5: if (l < 32) threadgroup_barrier(mem_flags::mem_threadgroup); break;
        default: threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float sum = 0;
    if (fault != 6) sum = simd_sum(mine);
    else if (l < 7) sum = simd_sum(mine);
    y[i] = shared[(l + 1) % 64] + sum;
    z[i] = 0;
    device const float* matrix_at = x;
    simdgroup_float8x8 m;
    float few[4] = {0, 1, 2, 3};
    switch (fault) {
        case 7: if (l < 3) return; break;
        case 8: z[0] = float(i); break;
        case 9: z[63 - l] += 1; break;
        case 10: y[i] = x[i + 64]; break;
        case 11: y[i] = (x - 1)[i - 64 * group]; break;
        case 12: { threadgroup float* p = shared; p[l + 1] = 0; break; }
        case 13: y[i] = few[l]; break;
        case 14: y[i] = other[0][l % 8]; break;
        case 15: y[i] = simd_shuffle(mine, ushort(l + 1)); break;
        case 16: simdgroup_load(m, matrix_at + l, 8); break;
        case 17: { float4 v = *(device const float4*)(x + 1); y[i] = v.x + v.w; break; }
        case 18: y[i] = float(100 / (int(l) - 5)); break;
        case 19: while (shared[0] < 1e9f) shared[0] = 0; break;
        case 20: y[i] = float(int(mine * 1e30f)); break;
        case 21: shared[(l + 2) % 64] = mine; break;
        case 22: y[i + 1] = z[i]; break;
        case 23: other[1][l % 8 + fault] = mine; break;
        case 24: y[i] = *(device const float*)(x + 100000000 + i); break;
        case 25: if (l < 32) shared[l] = 1; else shared[l - 32] = 2; break;
    }
    if (fault == 26 && l > 3) simdgroup_barrier(mem_flags::mem_threadgroup);
    if (fault == 27) for (uint n = 0; n < l; n++) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (fault != 28 || i != 77) last[i] = mine;
    threadgroup_barrier(mem_flags::mem_none);
"""

FAULTS = {
    1: "race: shared",
    2: "race: shared",
    3: "race: shared",
    4: "uninitialised: shared",  # too weak a barrier
    5: "race: shared",  # the order of threads shows that before the divergence
    6: "SIMD divergence",
    7: "barrier divergence",
    8: "race: z",
    9: "uninitialised: z",
    10: "out of bounds: read of x",
    11: "out of bounds: read of x",
    12: "out of bounds: write of shared",
    13: "out of bounds: index",
    14: "uninitialised: other",
    15: "SIMD function reads a lane",
    16: "simdgroup matrix at different addresses",
    17: "misaligned",
    18: "integer division by zero",
    19: "the time limit",
    20: "a float does not fit",
    21: "race: shared",
    22: "race: y",
    23: "out of bounds: index",
    24: "access to memory|out of bounds",
    25: "race: shared",
    26: "SIMD divergence",
    27: "barrier divergence",
    28: "unwritten: last",
}


def _run(fault: int, mode: Mode = Mode.CHECK, schedule: int = 0, body: str = _BODY) -> np.ndarray:
    kernel = CpuKernel(
        mode=mode,
        schedule=schedule,
        name="planted",
        input_names=["x", "fault"],
        output_names=["y", "z", "last"],
        source=body,
    )
    y, *_ = kernel(
        inputs=[mx.arange(2 * THREADS).astype(mx.float32), fault],
        output_shapes=[(2 * THREADS,)] * 3,
        output_dtypes=[mx.float32] * 3,
        grid=(2 * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
    )
    return np.array(y)


@pytest.mark.parametrize("mode", Mode)
def test_the_kernel_without_a_fault_is_right_in_every_schedule(mode: Mode) -> None:
    x = np.arange(2 * THREADS, dtype=np.float32)
    rolled = np.roll(x.reshape(2, THREADS), -1, axis=1).ravel()
    sums = np.repeat(x.reshape(-1, 32).sum(axis=1), 32)
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(_run(0, mode, schedule), rolled + sums)


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    fault: int, optimised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimised:
        monkeypatch.setattr("metal_cpu.launch._SMALL", 0)
    with time_limit(0.3), pytest.raises(Fault) as caught:
        _run(fault)
    assert re.match(FAULTS[fault], str(caught.value)), str(caught.value)


def test_a_fault_shows_the_lines_of_the_source() -> None:
    with pytest.raises(Fault, match=r"race: shared(?s:.*)line \d+: y\[i\] = shared"):
        _run(2)


def test_after_a_fault_the_next_launch_is_whole() -> None:
    for fault in (18, 24, 7):
        with pytest.raises(Fault):
            _run(fault)
        assert np.isfinite(_run(0)).all()


def test_fast_mode_stops_at_guard_pages() -> None:
    with pytest.raises(Fault, match="access to memory"):
        _run(10, Mode.FAST)


@pytest.mark.parametrize(
    ("threads", "floats", "fault"),
    [(1025, 1, "threadgroup of 1025 threads"), (32, 8193, "32784 bytes of threadgroup memory")],
)
def test_a_limit_of_metal_is_kept(threads: int, floats: int, fault: str) -> None:
    kernel = CpuKernel(
        schedule=0,
        name="large",
        input_names=["x"],
        output_names=["y"],
        source=f"threadgroup float a[{floats}]; a[0] = 1; y[thread_position_in_grid.x] = x[0];",
    )
    with pytest.raises(Fault, match=fault):
        kernel(
            inputs=[mx.zeros((9,))],
            output_shapes=[(threads,)],
            output_dtypes=[mx.float32],
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
        )


# One line each; all are errors of the Metal compiler.
COMPILE_FAULTS = [
    "device float* a = local;",  # threadgroup to device
    "threadgroup float* a = y;",
    "constant float* a = x;",
    "x[0] = 1;",
    "few[0] = 1;",
    "bfloat a = y[0];",
    "bfloat a = half(1);",
    "half a = max(half(1), 2.0f);",
    "long a = simd_sum(long(1));",
    "float4 a = float4(1.0f, 2.0f);",
    "simdgroup_matrix<int, 8, 8> a;",
    "simdgroup_float8x8 a; simdgroup_load(a, few);",
    "auto a = std::max(1, 2);",
    "double a = 1;",
    "float4 a = make_vector<float4>(float3(1), 2.0f);",
    "((device atomic<float>*)y)[0] += 1.0f;",
    "atomic_fetch_add_explicit((device atomic<half>*)y, half(1), memory_order_relaxed);",
]


def test_the_compiler_rejects_what_metal_rejects() -> None:
    head = (
        "[[kernel]] void planted(\n  const device float* x [[buffer(0)]],\n"
        "  const constant float* few [[buffer(1)]],\n  device float* y [[buffer(2)]]) {\n"
        "threadgroup float local[8];\n"
    )
    source = head + "\n".join(f"{{ {line} }}" for line in COMPILE_FAULTS) + "\n}\n"
    first = head.count("\n") + 1
    cpp = to_cpp(source.replace("std::", "standard::"))
    wrong = compile_errors(cpp)
    missed = [c for n, c in enumerate(COMPILE_FAULTS, first) if n not in wrong]
    assert missed == []
    assert compile_errors(to_cpp(head + "y[0] = x[0] + few[0];\nlocal[0] = 0;\n}\n")) == []


@pytest.mark.parametrize(
    "line",
    [
        "float* a = 0;",
        "const T& a = b;",
        "goto end;",
        "auto a = std::max(1, 2);",
        "int* p = new int;",
        "#include <vector>",
        "#include <math.h>",
    ],
)
def test_words_that_msl_lacks_are_refused(line: str) -> None:
    with pytest.raises(SourceError):
        check_rules(f"template <typename T> void f() {{\n{line}\n}}")


def test_products_and_qualified_pointers_are_allowed() -> None:
    check_rules("device const float* a = x; thread float& b = c; float d = float(e) * f;")
