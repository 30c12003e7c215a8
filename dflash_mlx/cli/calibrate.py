"""`dflash-mlx calibrate`: measure what cycles cost on this machine, for --block-size auto."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dflash_mlx.cli import console
from dflash_mlx.cli.chat import DTYPES, DraftBits, Dtype, Exact, Model, check_draft_bits
from dflash_mlx.errors import UsageError


def calibrate(
    model: Model,
    draft: Annotated[
        str | None,
        console.option("The drafter.", "--draft", metavar="REPO_OR_FOLDER"),
    ] = None,
    draft_bits: DraftBits = None,
    exact: Exact = False,
    dtype: Dtype = "auto",
    seconds: Annotated[
        float, typer.Option("--seconds", help="About how long; longer reaches longer contexts.")
    ] = 20.0,
    as_json: Annotated[bool, console.option("Print one JSON document.", "--json")] = False,
) -> None:
    """Measure the cost of drafting and verifying here, and keep it: for answers with the same
    drafter, --draft-bits, --exact and --dtype.
    """
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds is {seconds}. Give a number above 0.")
    check_draft_bits(draft_bits)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")
    from dflash_mlx import engine as engines

    engine = engines.load(
        model, draft=draft or "auto", draft_bits=draft_bits, exact=exact, dtype=dtype
    )
    costs = engine.calibrate(seconds, anew=True)
    console.Warnings().show(engine.warnings)
    if as_json:
        print(json.dumps({"calibration": costs.digest, **costs.to_json()}))
        return
    console.show_rows(rows_of(costs.to_json()["measured"]), sys.stdout)
    if (head := costs.head) is not None:
        most = max(head.saved)
        share = min(max(head.saved[most] / costs.measured[0].drafting, 0.0), 1.0)
        print(
            f"drafting {most} tokens with {head.reduced} of the head's {head.whole} rows saves "
            f"{share:.0%} of drafting"
        )
    print(f"calibration {costs.digest}")


def rows_of(measured: list[dict[str, Any]]) -> list[list[str]]:
    """A line a context: a plain step in milliseconds, drafting and cycles in plain steps.

    A cycle's cost is the number of tokens it has to bring to be as fast as plain decoding.
    """
    blocks = [str(int(drafts) + 1) for drafts in measured[0]["cycles"]]
    rows = [["context", "plain ms", "drafting", *(f"block {b}" for b in blocks)]]
    for one in measured:
        plain = one["plain"]
        cycles = [f"{seconds / plain:.2f}" for seconds in one["cycles"].values()]
        drafting = f"{one['drafting'] / plain:.2f}"
        rows.append([str(one["context"]), f"{plain * 1e3:.2f}", drafting, *cycles])
    return rows
