"""`dflash-mlx plan`: whether a model fits into memory, told before anything is fetched."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.plan import Fit


MOST_MEMORY_GB = 1_000_000
MOST_CONTEXT = 100_000_000


def plan(
    model: Annotated[
        str, typer.Argument(help="Name, config.json, model folder, GGUF file or fetched hub id.")
    ],
    context: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Positions: prompt and answer.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Plan for a Mac with this memory, not this machine."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(metavar="16|8|6|5|4|3|2", help="Bits of the target's weights."),
    ] = None,
    drafter: Annotated[
        bool, typer.Option("--draft/--no-draft", help="Count the drafter, or not.")
    ] = True,
    as_json: Annotated[bool, console.option("Print one JSON document.", "--json")] = False,
) -> None:
    """Show how much memory a model needs. Exits with 1 when it does not fit."""
    from dflash_mlx import plan as planning

    if bits is not None and bits not in planning.BITS:
        known = ", ".join(map(str, planning.BITS))
        raise UsageError(f"--bits is {bits}. Give one of {known}.")
    if memory is not None and not 0 < memory < MOST_MEMORY_GB:
        raise UsageError(
            f"--memory is {memory:g}. Give gigabytes above 0 and below {MOST_MEMORY_GB}."
        )
    if context is not None and context > MOST_CONTEXT:
        raise UsageError(f"--context is {context}. Give at most {MOST_CONTEXT} tokens.")
    machine = planning.this_machine() if memory is None else planning.mac_memory(memory)
    found = planning.find_model(model, drafted=drafter)
    fit = planning.plan(found, machine, context, bits)
    if as_json:
        print(json.dumps(_document(fit)))
    else:
        _show(fit)
    raise typer.Exit(0 if fit.fits else 1)


def _document(fit: Fit) -> dict[str, Any]:
    return {
        "model": fit.model.name,
        "drafter": fit.model.drafter,
        "parameters": fit.model.target.parameters,
        "machine": fit.memory.name,
        "memory_bytes": fit.memory.total,
        "limit_bytes": fit.memory.limit,
        "metal": fit.memory.metal,
        "context": fit.context,
        "context_limit": fit.model.context,
        "bits": fit.bits,
        "parts": fit.parts | dict.fromkeys(fit.unknown),
        "unknown_parts": list(fit.unknown),
        "total_bytes": fit.total,
        "fits": fit.fits,
        "largest_context": fit.largest_context,
        "advice": list(fit.advice),
        "remarks": list(fit.model.remarks),
    }


def _show(fit: Fit) -> None:
    as_is = "the checkpoint as it is" if fit.bits is None else f"{fit.bits} bits"
    weights = as_is if fit.memory.metal else "float32"
    largest = fit.largest_context
    rows = [
        ("model", f"{fit.model.name}, {fit.model.target.parameters / 1e9:.2f}e9 weights"),
        ("drafter", fit.model.drafter or "none"),
        ("for", f"{fit.memory.name}, weights: {weights}, context {fit.context}"),
        *((part.replace("_", " "), console.gigabytes(size)) for part, size in fit.parts.items()),
        *((part.replace("_", " "), "unknown") for part in fit.unknown),
        ("total", console.gigabytes(fit.total) + (", without the unknown" if fit.unknown else "")),
        (
            "limit",
            f"{console.gigabytes(fit.memory.limit)} of {console.gigabytes(fit.memory.total)}",
        ),
        ("largest context", "none fits" if largest is None else str(largest)),
        *(("remark", sentence) for sentence in fit.model.remarks),
        *(("advice", sentence) for sentence in fit.advice),
    ]
    console.show_rows(rows, sys.stdout)
    if fit.fits and fit.unknown:
        print("It fits without the drafter; whether it fits with it is not known.")
    else:
        print("It fits." if fit.fits else "It does not fit.")
