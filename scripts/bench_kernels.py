"""Each Metal kernel against MLX's operations on the shapes of real models; runs on a Mac.

Prints a table and ends with one JSON line. Times are medians over repetitions, of which each chains
enough calls that a launch's latency does not count. A kernel that is slower has no place here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from kernel_cases import Case, cases

from dflash_mlx.kernels import backend
from dflash_mlx.machine import chip, versions

REPETITIONS, CALLS = 9, 20


def seconds(run: Callable[[], list[mx.array]], repetitions: int, calls: int) -> float:
    """Median seconds of one call."""
    mx.eval(run())
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        mx.eval([run() for _ in range(calls)])
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def measure(case: Case, repetitions: int = REPETITIONS, calls: int = CALLS) -> dict[str, Any]:
    """Times of kernel and operations, GB/s of the kernel, ratio, and the kernel's difference."""
    run = case.make()
    backend.forget()
    expected = _by_operations(case, run)
    found = run()
    gap = max(backend.difference(a, b) for a, b in zip(found, expected, strict=True))
    fault = backend._rejected.get(case.operation)
    if fault is None and case.operation not in {operation for operation, _ in backend._trusted}:
        fault = "MLX's operations answered: the kernel does not take this shape here"
    kernel = None if fault else seconds(run, repetitions, calls)
    twin = seconds(lambda: _by_operations(case, run), repetitions, calls)
    return {
        "operation": case.operation,
        "shape": case.shape,
        "kernel_us": None if kernel is None else round(1e6 * kernel, 1),
        "operations_us": round(1e6 * twin, 1),
        "ratio": None if kernel is None else round(twin / kernel, 3),
        "gb_per_s": None if kernel is None else round(case.bytes / kernel / 1e9, 1),
        "difference": gap,
        "fault": fault,
    }


def _by_operations(case: Case, run: Callable[[], list[mx.array]]) -> list[mx.array]:
    """The twin's result: the kernel counts as rejected meanwhile."""
    kept = backend._rejected.get(case.operation)
    backend._rejected[case.operation] = "it is being compared"
    try:
        return run()
    finally:
        if kept is None:
            del backend._rejected[case.operation]
        else:
            backend._rejected[case.operation] = kept


def main() -> int:
    if not backend.kernels_active():
        print(f"Nothing to measure: {backend.choice().reason} Run this on a Mac.", file=sys.stderr)
        return 2
    rows = []
    for case in cases():
        rows.append(measure(case))
        mx.clear_cache()  # its arrays are gone: the next case gets their memory
        line = rows[-1]
        print(
            f"{line['operation']:20} {line['shape']:62} kernel {line['kernel_us']} us, "
            f"operations {line['operations_us']} us, ratio {line['ratio']}, {line['gb_per_s']} GB/s"
        )
    print(json.dumps({"chip": chip(), "versions": versions(), "kernels": rows}))
    return 1 if any(row["fault"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
