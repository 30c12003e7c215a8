"""What each kernel must move and compute, and the dispatches of a cycle: modelled, not measured.

Bytes, FLOPs and launches follow from the shapes; the floors are bytes over memory bandwidth.
"""

from __future__ import annotations

from math import prod

from kernel_cases import Case, cases
from kernel_dispatches import count_cycle, per_layer

# GB/s of the chips' memory as Apple states it, of the largest variant. There is no M4 Ultra, and no
# M5 Ultra yet.
BANDWIDTH = {
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546,
    "M5": 153, "M5 Pro": 307, "M5 Max": 614,
}  # fmt: skip
LAYERS = 4


def show_case(case: Case) -> None:
    print(f"\n{case.operation}: {case.shape}")
    print(f"  {case.bytes / 1e6:.2f} MB, {case.flops / 1e9:.3f} GFLOP", end="")
    for launch in case.launches:
        print(
            f"; {prod(launch.groups)} threadgroups of {prod(launch.threads)} threads, "
            f"{launch.memory} B of threadgroup memory",
            end="",
        )
    floors = (f"{chip} {case.bytes / speed / 1e3:.0f}" for chip, speed in BANDWIDTH.items())
    print(f"\n  floor in us: {', '.join(floors)}")


def main() -> None:
    for case in cases():
        show_case(case)
    print("\nGPU dispatches of a cycle, modelled (not measured): MLX's operations, then kernels")
    for second in (False, True):
        kind = "DFlash 2" if second else "DFlash"
        before, after = (count_cycle(kernels, LAYERS, second=second) for kernels in (False, True))
        for part in before if not second else ("draft",):
            counts = f"{before[part].total()} -> {after[part].total()}"
            print(f"\n{part}, {LAYERS} layers of a small Qwen3 pair, {kind}: {counts}")
            print(f"  before: {dict(before[part])}\n  after:  {dict(after[part])}")
        layer = " -> ".join(str(per_layer(kernels, second=second)) for kernels in (False, True))
        print(f"a draft layer, {kind}: {layer}")


if __name__ == "__main__":
    main()
