"""`dflash-mlx doctor`: whether this machine can run the program, and what to do if not."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx import paths
from dflash_mlx.cli import console
from dflash_mlx.cli.chat import DTYPES, Draft, DraftBits, Dtype, check_draft_bits
from dflash_mlx.errors import UsageError

# Below this a download of a small model fails half-way.
SMALL_DISK = 2e9


_MODEL = "Try the kernels on the shapes and types of this model, which has to be on this disk."
Trial = Callable[[], list[str]]  # runs kernels; remarks on what it could not try


def doctor(
    model: Annotated[str | None, typer.Argument(help=_MODEL, show_default=False)] = None,
    draft: Draft = None,
    draft_bits: DraftBits = None,
    dtype: Dtype = "auto",
    as_json: Annotated[bool, console.option("Print one JSON document.", "--json")] = False,
) -> None:
    """Tell whether this machine can run; exits with 1 when it cannot."""
    if model is None and (draft is not None or draft_bits is not None or dtype != "auto"):
        raise UsageError("--draft, --draft-bits and --dtype say how MODEL is held. Name it.")
    check_draft_bits(draft_bits)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")
    report = examine(None if model is None else _trial_of(model, draft, draft_bits, dtype))
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    raise typer.Exit(0 if report["can_run"] else 1)


def _trial_of(model: str, draft: str | None, draft_bits: int | None, dtype: str) -> Trial:
    """What tries a model's kernels; DFlashError where it is not on this disk."""
    from dflash_mlx.machine import prepare_blas

    prepare_blas()  # the next line imports MLX
    from dflash_mlx import trials

    subject = trials.subject(model, draft, draft_bits, dtype)

    def run() -> list[str]:
        trials.try_model(subject)
        return list(subject.remarks)

    return run


def examine(trial: Trial | None = None) -> dict[str, Any]:
    """All findings. `problems` keep the program from running, `remarks` make it slower or less.

    trial: of kernels on a model's shapes, in place of small cases.
    """
    from dflash_mlx import machine

    blas = machine.prepare_blas()
    problems = machine.check_versions() + _python_problems()
    report: dict[str, Any] = {
        "versions": machine.versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "chip": machine.chip(),
        "memory_bytes": machine.memory_bytes(),
        "back_end": None,
        "blas": {"name": blas.name, "reason": blas.reason},
        "kernels": None,
        "rejected_kernels": [],
    }
    remarks = [] if blas.fast else [f"Matrix products are slow: {blas.name}. {blas.reason}"]
    try:
        name, reason = machine.back_end()
        report["back_end"] = {"name": name, "reason": reason}
        remarks += _cpu_remarks() if name == "cpu" else []
        report["kernels"], report["rejected_kernels"], found = _kernels(trial)
        remarks += found
    except ImportError:
        remarks.append("The back-end is unknown because MLX cannot be imported.")
    report["cache"], cache_problems, cache_remarks = _cache_folder()
    report["files"], file_problems = _package_files()
    problems += cache_problems + file_problems
    remarks += cache_remarks
    return {"can_run": not problems, "problems": problems, "remarks": remarks, **report}


def _python_problems() -> list[str]:
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return []
    return [f"Python {platform.python_version()} is not supported. Use 3.11, 3.12 or 3.13."]


def _kernels(trial: Trial | None = None) -> tuple[str, list[dict[str, str]], list[str]]:
    """What runs as a kernel, each tried first; the rejections that are kept; remarks on both."""
    from dflash_mlx import kernels

    remarks = []
    with warnings.catch_warnings():  # a remark says it
        warnings.simplefilter("ignore")
        if trial is None:
            kernels.try_all()
        else:
            remarks += trial()
            if not kernels.kernels_active():
                remarks.append("The kernels were not tried on the model: none is active here.")
    remarks += kernels.rejections()
    rejected, fault = kernels.kept()
    now = kernels.rejected_operations()
    remarks += [
        f"The Metal kernel {one.operation} was not used on {one.date}: {one.reason} (case "
        f"{one.variant}). Each process checks it again."
        for one in rejected
        if one.operation not in now
    ]
    remarks += [fault] if fault else []
    return kernels.status(), [one._asdict() for one in rejected], remarks


def _cpu_remarks() -> list[str]:
    """What is not supported or slower without Metal."""
    remarks = [
        "Without Metal everything runs on the CPU in float32; the Metal kernels are not used. "
        "For speed run on Apple Silicon."
    ]
    if shutil.which("g++") is None:
        remarks.append(
            "MLX fuses its CPU operations with g++, which is not installed; it runs slower "
            "without. Install g++."
        )
    return remarks


def _cache_folder() -> tuple[dict[str, Any], list[str], list[str]]:
    """The cache folder, problems with it, and remarks."""
    home = paths.home_dir()
    standing = next(place for place in (home, *home.parents) if place.exists())
    writable = _is_writable(standing)
    free = shutil.disk_usage(standing).free
    problems, remarks = [], []
    if not writable:
        problems.append(f"The cache folder {home} cannot be written. Set DFLASH_HOME to another.")
    elif free < SMALL_DISK:
        remarks.append(
            f"Only {console.gigabytes(free)} are free in {home}; most models need more. "
            "Free some, or set DFLASH_HOME to another disk."
        )
    return {"path": str(home), "writable": writable, "free_bytes": free}, problems, remarks


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made there; permission bits alone lie to root and on some disks."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _package_files() -> tuple[dict[str, str | None], list[str]]:
    """The package's own files, found or not."""
    places = {
        "registry": paths.registry_file(),
        "kernel sources": paths.metal_dir(),
        "embedded drafters": paths.assets_dir(),
    }
    found = {name: str(place) if _is_filled(place) else None for name, place in places.items()}
    problems = [
        f"The {name} are missing at {places[name]}. Install the package again."
        for name, place in found.items()
        if place is None
    ]
    return found, problems


def _is_filled(place: Path) -> bool:
    return place.is_file() or (place.is_dir() and any(place.iterdir()))


def _show(report: dict[str, Any]) -> None:
    cache, back_end, blas = report["cache"], report["back_end"], report["blas"]
    rows = [(name, version) for name, version in report["versions"].items()]
    rows += [
        ("system", report["system"]),
        ("chip", report["chip"]),
        ("memory", console.gigabytes(report["memory_bytes"])),
        ("back-end", f"{back_end['name']}: {back_end['reason']}" if back_end else "unknown"),
        ("BLAS", f"{blas['name']}: {blas['reason']}"),
        ("kernels", report["kernels"] or "unknown"),
        ("cache", f"{cache['path']} ({console.gigabytes(cache['free_bytes'])} free)"),
    ]
    rows += [(name, place or "missing") for name, place in report["files"].items()]
    rows += [("remark", sentence) for sentence in report["remarks"]]
    rows += [("problem", sentence) for sentence in report["problems"]]
    console.show_rows(rows, sys.stdout)
    print("This machine can run." if report["can_run"] else "This machine cannot run yet.")
