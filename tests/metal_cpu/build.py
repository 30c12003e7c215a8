"""Compiles C++ with the clang of the `ziglang` wheel, and keeps what it made by content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
_COMMON = [
    *["-c", "-std=c++17", "-fPIC", "-g1", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector"],
    *["-fno-math-errno", "-fno-strict-aliasing", "-fno-finite-loops", "-ffp-contract=off"],
]
_RUNTIME = [*_COMMON, "-O2", "-fno-sanitize=all"]
_KERNEL = [
    *_COMMON,
    *["-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none"],
    *["-Xclang", "-fbfloat16-excess-precision=none", "-ftrivial-auto-var-init=pattern"],
    *["-Wuninitialized", "-Wconditional-uninitialized", "-Wimplicit-float-conversion"],
    *["-Werror=return-type", "-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier"],
    *["-Wno-user-defined-literals", "-Wno-reserved-user-defined-literal", "-Wno-pass-failed"],
    f"-I{HERE / 'shim'}",
]
_FAST = [*_KERNEL, "-O2", "-fno-sanitize=all"]
_CHECK = [
    *_KERNEL,
    # Without optimisation zig adds sanitizers of its own, which the runtime has no handlers for.
    *["-DMSL_CHECK", "-fno-sanitize=undefined", "-fsanitize=thread"],
    *["-mllvm", "-tsan-instrument-read-before-write=1"],
    "-fsanitize=array-bounds,integer-divide-by-zero,alignment,float-cast-overflow",
    "-fno-sanitize-recover=all",
]


class CompileError(Exception):
    """The compiler, or a rule of MSL that it warns about only, rejects the kernel."""


@cache
def _zig() -> list[str]:
    """The compiler's command; scripts/test installs its wheel."""
    import ziglang

    return [str(Path(ziglang.__file__).parent / "zig")]


@cache
def _store() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dflash-metal-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _shim() -> str:
    return "".join(path.read_text() for path in sorted((HERE / "shim").iterdir()))


def shared_object(name: str, sources: dict[str, str], flags: list[str]) -> Path:
    """The library of these sources; compiled unless a library of the same content is kept."""
    content = "\0".join([name, *sources.values(), *flags, _shim()])
    made = _store() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.so"
    if made.exists():
        return made
    with tempfile.TemporaryDirectory(dir=_store()) as folder:
        objects = []
        for file, text in sources.items():
            path = Path(folder) / file
            path.write_text(text)
            objects.append(f"{path}.o")
            _run([*_zig(), "c++", *flags, str(path), "-o", objects[-1]])
        _run([*_zig(), "ld.lld", "-shared", *objects, "-o", f"{folder}/made.so"])
        os.rename(f"{folder}/made.so", made)
    return made


def _run(command: list[str]) -> None:
    done = _zig_says(command)
    if done.returncode or _narrowing(done.stderr):
        raise CompileError(done.stderr)


def _zig_says(command: list[str]) -> subprocess.CompletedProcess[str]:
    kept = str(_store() / "zig")
    places = {"ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **places}, check=False
    )


def _narrowing(messages: str) -> list[int]:
    """Lines where a float becomes a bfloat implicitly: a warning here, an error in Metal."""
    pattern = r"kernel:(\d+):\d+: warning: implicit conversion.* to '[^']*bf"
    return [int(line) for line in re.findall(pattern, messages)]


def compile_errors(cpp: str) -> list[int]:
    """The source lines that a strict Metal compiler rejects."""
    with tempfile.TemporaryDirectory(dir=_store()) as folder:
        path = Path(folder) / "kernel.cpp"
        path.write_text(cpp)
        command = [*_zig(), "c++", *_FAST, "-ferror-limit=0", "-fsyntax-only", str(path)]
        messages = _zig_says(command).stderr
    errors = re.findall(r"kernel:(\d+):\d+: (?:error|note: in instantiation)", messages)
    return sorted({*map(int, errors), *_narrowing(messages)})


@cache
def kernel_library(cpp: str, *, check: bool, small: bool) -> ctypes.CDLL:
    """A kernel from source.to_cpp, for check mode or for fast mode.

    small: launches are so small that check mode's optimisation would take longer than they do.
    """
    runtime()
    flags = [*_CHECK, "-O0" if small else "-O1"] if check else _FAST
    return _load(shared_object("kernel", {"kernel.cpp": cpp}, flags))


@cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@cache
def runtime() -> ctypes.CDLL:
    """The fibers and the watch over memory, visible to the kernels loaded after it."""
    names = ("fibers.cpp", "memory.cpp")
    header = (HERE / "runtime.h").read_text()
    sources = {
        n: (HERE / n)
        .read_text()
        .replace('#include "runtime.h"', header.replace("#pragma once", ""))
        for n in names
    }
    return ctypes.CDLL(str(shared_object("runtime", sources, _RUNTIME)), mode=ctypes.RTLD_GLOBAL)
