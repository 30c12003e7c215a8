"""Facts about this machine, each with its reason: chip, memory, back-end, BLAS, versions.

Importing this file imports no MLX, so that `prepare_blas` can act before MLX is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
import threading
import tomllib
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mlx import __version__

DISTRIBUTION = "dflash-mlx-engine"
# What the package calls in MLX beyond the oldest parts of its API.
MLX_FUNCTIONS = (
    "async_eval",
    "clear_cache",
    "default_device",
    "get_peak_memory",
    "reset_peak_memory",
    "quantized_matmul",
    "dequantize",
    "fast.metal_kernel",
    "fast.rms_norm",
    "fast.rope",
    "fast.scaled_dot_product_attention",
    "metal.is_available",
    "new_thread_unsafe_stream",
    "random.categorical",
    "random.split",
)
_THREADS = "OPENBLAS_NUM_THREADS"
_lock = threading.Lock()
_failure: str | None = None  # why prepare_blas could not do its work


class BlasChoice(NamedTuple):
    """Which matrix library MLX's CPU back-end multiplies with, and why that one."""

    name: str
    reason: str

    @property
    def fast(self) -> bool:
        return not self.name.startswith("bundled")


def prepare_blas() -> BlasChoice:
    """Load a fast BLAS before MLX is imported; say which one MLX will use, and why.

    The package's entry points call it. It raises nothing and prints nothing: where it cannot
    act, MLX keeps the reference BLAS of its own wheel, and the choice says so. A program that
    wants that BLAS (its rounding does not depend on the number of rows) never calls this.
    """
    global _failure
    with _lock:
        if sys.platform == "linux" and "mlx.core" not in sys.modules and not _global_gemm():
            _failure = _load_openblas()
    return blas_in_use()


def blas_in_use() -> BlasChoice:
    """The BLAS of this process as the dynamic linker sees it, however it came about."""
    if sys.platform == "darwin":
        return BlasChoice("Accelerate", "MLX on macOS is built on it.")
    if sys.platform != "linux":
        return BlasChoice("unknown", f"MLX's BLAS on {sys.platform} is not known here.")
    library, loaded = _global_gemm(), _loaded_libraries()
    mlx_at = next((i for i, path in enumerate(loaded) if path.endswith("/libmlx.so")), None)
    if library is None:
        if _failure:
            reason = _failure
        elif mlx_at is None:
            reason = "Nothing has loaded a faster one; prepare_blas() does before MLX's import."
        else:
            reason = "MLX was imported before dflash_mlx could load a faster one."
        return BlasChoice("bundled reference BLAS", reason)
    if mlx_at is not None and loaded.index(library) > mlx_at:
        return BlasChoice(
            "bundled reference BLAS", f"MLX was imported before {Path(library).name} was loaded."
        )
    return BlasChoice(*_describe(library))


def _load_openblas() -> str | None:
    """Load the OpenBLAS of the ngsolve-openblas wheel for everyone; None, or why it failed.

    Its library needs libgfortran.so.5, which few machines have but MLX's wheel brings under
    another name. Its search path is its own folder, so a folder of links puts both together;
    once everything is mapped the folder has done its work.
    """
    if platform.machine() != "x86_64":
        return f"There is no OpenBLAS wheel for {platform.machine()}."
    openblas = _package_file("ngsolve_openblas", "libopenblas*.so*")
    if openblas is None:
        return "The package ngsolve-openblas is not installed."
    partners = _package_folder("mlx", "../mlx_cpu.libs")
    chosen = os.environ.get(_THREADS)
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-blas-") as folder:
            _link_together(Path(folder), openblas, partners)
            # Two threads on a busy machine are many times slower than one.
            os.environ.setdefault(_THREADS, "1")
            ctypes.CDLL(f"{folder}/libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"OpenBLAS could not be loaded: {error}."
    finally:
        if chosen is None:  # only for this load, not for child processes or other libraries
            os.environ.pop(_THREADS, None)
    return None


def _link_together(folder: Path, openblas: Path, partners: Path | None) -> None:
    """Links to OpenBLAS and to the Fortran run-time libraries it needs, under expected names."""
    (folder / "libopenblas.so.0").symlink_to(openblas)
    for library in sorted(partners.iterdir()) if partners else ():
        if "blas" in library.name or "lapack" in library.name:
            continue
        (folder / library.name).symlink_to(library)
        if library.name.startswith("libgfortran"):
            (folder / "libgfortran.so.5").symlink_to(library)


def _package_folder(package: str, inside: str = ".") -> Path | None:
    """A folder of an installed package, found without importing the package."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    folders = [(Path(place) / inside).resolve() for place in places or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def _package_file(package: str, pattern: str) -> Path | None:
    folder = _package_folder(package)
    return next(iter(sorted(folder.glob(pattern))), None) if folder else None


class _SymbolPlace(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _global_gemm() -> str | None:
    """The library that offers cblas_sgemm to everything loaded after it; None when none does."""
    everyone = ctypes.CDLL(None)
    gemm = getattr(everyone, "cblas_sgemm", None)
    if gemm is None:
        return None
    place = _SymbolPlace()
    address = ctypes.cast(gemm, ctypes.c_void_p)
    return place.file.decode() if everyone.dladdr(address, ctypes.byref(place)) else None


class _LoadedObject(ctypes.Structure):
    """The head of dl_phdr_info of dl_iterate_phdr(3)."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _loaded_libraries() -> list[str]:
    """Paths of all shared libraries of this process in the order they were loaded."""
    paths: list[str] = []
    visitor_type = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p
    )

    def visit(item: ctypes._Pointer[_LoadedObject], size: int, extra: int | None) -> int:
        paths.append(os.fsdecode(item.contents.name or b""))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(visitor_type(visit), None)
    return paths


def _describe(library: str) -> tuple[str, str]:
    """Name and reason of a BLAS that stands before MLX's own."""
    everyone = ctypes.CDLL(None)
    if not hasattr(everyone, "openblas_get_config"):
        return Path(library).name, "Loaded before MLX."
    everyone.openblas_get_config.restype = ctypes.c_char_p
    words = everyone.openblas_get_config().decode().split()
    threads = everyone.openblas_get_num_threads()
    unit = "thread" if threads == 1 else "threads"
    return " ".join(words[:2]), f"Loaded before MLX, with {threads} {unit}; {_THREADS} sets more."


def back_end() -> tuple[str, str]:
    """("metal" or "cpu", why). Imports MLX: call `prepare_blas` first where speed matters."""
    import mlx.core as mx

    if mx.metal.is_available():
        return "metal", f"MLX computes on the GPU of {chip()}."
    if sys.platform != "darwin":
        return "cpu", "Metal exists on Apple Silicon only."
    if platform.machine() != "arm64":
        return "cpu", "This Python is not an arm64 build, and MLX's Metal back-end is arm64 only."
    return "cpu", "MLX finds no Metal device, as in some virtual machines."


def chip() -> str:
    """The processor's marketing name, or its architecture where the system has no name for it."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def memory_bytes() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def working_set_bytes() -> int | None:
    """Bytes that Metal recommends this process to use at most; None without Metal."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def versions() -> dict[str, str]:
    """Versions of this program, of Python and of what decides results and speed."""
    found = {"dflash-mlx": __version__, "python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "transformers", "huggingface_hub"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_versions() -> list[str]:
    """What keeps this installation from running, one sentence each; empty when all is well.

    Compares every declared dependency with what is installed, then looks for the MLX functions
    the package calls.
    """
    problems = [problem for line in _requirements() if (problem := _unmet(line))]
    try:
        mx: Any = import_module("mlx.core")
    except ImportError as error:
        return [*problems, f"MLX cannot be imported: {error}."]
    for dotted in MLX_FUNCTIONS:
        place: Any = mx
        for part in dotted.split("."):
            place = getattr(place, part, None)
        if place is None:
            problems.append(f"MLX {metadata.version('mlx')} has no mlx.core.{dotted}.")
    return problems


def _requirements() -> list[str]:
    """The declared dependencies: of the installed distribution, else of the checkout."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        return list(tomllib.loads(project.read_text())["project"]["dependencies"])


def _unmet(line: str) -> str | None:
    """The sentence about one requirement that the installation does not fulfil."""
    from packaging.requirements import Requirement

    need = Requirement(line)
    if need.marker and not need.marker.evaluate({"extra": ""}):
        return None
    try:
        installed = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return f"The package {need.name} is not installed (needed: {need.specifier})."
    if need.specifier.contains(installed, prereleases=True):
        return None
    return f"{need.name} {installed} is installed, but {need.specifier} is needed."
