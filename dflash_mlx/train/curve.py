"""The course of a run: as numbers in curve.json, and as a picture in curve.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.train.files import replacing, write_text


def save_numbers(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write curve.json; history: one entry a measurement."""
    write_text(folder / "curve.json", json.dumps(list(history), indent=1) + "\n")


def save_curve(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """history: one entry a measurement, with step, loss, accuracy [b-1] and tau.

    A measurement of the start has no loss and an empty accuracy.
    """
    save_numbers(folder, history)
    if not history:
        return
    # Here, because matplotlib is slow to import and only needed at the end of a run.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [entry["step"] for entry in history]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    trained = [entry for entry in history if entry["loss"] is not None]
    at = [entry["step"] for entry in trained]
    above.plot(at, [entry["loss"] for entry in trained], marker=".")
    above.set_ylabel("loss (weighted mean)")
    tau = above.twinx()
    tau.plot(steps, [entry["tau"] for entry in history], marker=".", color="tab:red")
    tau.set_ylabel("held-out tokens a cycle", color="tab:red")
    for row in range(len(trained[0]["accuracy"]) if trained else 0):
        values = [entry["accuracy"][row] for entry in trained]
        below.plot(at, values, marker=".", label=f"{row + 1}")
    below.set_ylabel("training accuracy by row")
    below.set_xlabel("step")
    if trained:
        below.legend(title="row", ncols=4, fontsize="small")
    with replacing(folder / "curve.png") as partial:
        figure.savefig(partial, dpi=110, format="png")
