"""What each kernel must move and compute, and the dispatches of a cycle: modelled, not measured.

Bytes, FLOPs and launches follow from the shapes; the floors are bytes over memory bandwidth.
"""

from __future__ import annotations

from math import prod

from kernel_cases import Case, cases
from kernel_dispatches import count_cycle, cycle_total, per_layer

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
CYCLES = (("qwen3", False), ("qwen3", True), ("qwen3_5", False))
KINDS = ("DFlash", "DFlash 2")


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
    print("\nGPU dispatches, modelled (not measured): MLX's operations -> kernels")
    for family, second in CYCLES:
        show_cycle(family, second)
    for second in (False, True):
        layer = " -> ".join(str(per_layer(kernels, second=second)) for kernels in (False, True))
        print(f"\na draft layer, {KINDS[second]}: {layer}")


def show_cycle(family: str, second: bool) -> None:
    """Parts of a cycle of greedy decoding, and all of them; see count_cycle."""
    before, after = (
        count_cycle(kernels, LAYERS, second=second, family=family) for kernels in (False, True)
    )
    print(f"\ncycle of a small {family} target and {KINDS[second]} drafter, {LAYERS} layers each:")
    for part in before:
        print(f"  {part}: {before[part].total()} -> {after[part].total()}")
        if before[part] != after[part]:
            print(f"    before: {dict(before[part])}\n    after:  {dict(after[part])}")
    print(f"  whole cycle, modelled: {cycle_total(before)} -> {cycle_total(after)}")


if __name__ == "__main__":
    main()
