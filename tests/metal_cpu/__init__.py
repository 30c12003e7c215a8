"""Runs Metal kernels on an x86-64 Linux CPU, thread by thread, from the source that MLX generates.

source: MLX's text of a call, made C++ · build: the compiler and its cache · launch: one run, its
checks and schedules · kernel: a stand-in for mx.fast.metal_kernel. The shim defines what MSL adds
to C++, the runtime (fibers.cpp, memory.cpp) is threads, barriers and the watch over memory.
"""

from metal_cpu.build import CompileError
from metal_cpu.kernel import CpuKernel, metal_on_cpu
from metal_cpu.launch import SCHEDULES, Fault, Mode

__all__ = ["SCHEDULES", "CompileError", "CpuKernel", "Fault", "Mode", "metal_on_cpu"]
