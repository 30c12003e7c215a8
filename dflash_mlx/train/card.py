"""The model card of a trained drafter: what it is for, what was measured, how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.draft.config import DFlashConfig
from dflash_mlx.train.wording import counted


def model_card(
    config: DFlashConfig,
    run: Mapping[str, Any],
    result: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> str:
    """Markdown with the hub's header, from the drafter's config, run.json and the run's result."""
    recipe, trained, held = run["recipe"], run["trained"], run["held_out"]
    kind = "DFlash 2" if config.parts else "DFlash"
    best = next((e for e in history if e["step"] == result["best_step"]), None)
    lines = [
        "---",
        "library_name: dflash",
        "tags: [dflash, speculative-decoding, drafter]",
        "---",
        "",
        f"# {kind} drafter for {result['model']}",
        "",
        f"A block-diffusion drafter of {counted(config.num_hidden_layers, 'layer')} for blocks of "
        f"{config.block_size}, which reads the target's layers "
        f"{', '.join(map(str, config.target_layer_ids))} and borrows its embedding and head.",
        "",
        "## Measured",
        "",
        f"- {_tau(run, result, held)}",
    ]
    if best is not None:
        rows = _shares(best["accuracy"])
        lines += [
            *(f"- {name}: {tau:.2f}" for name, tau in best["tau_by_set"].items()),
            f"- share of cycles that accept at least so many drafts: {_shares(best['acceptance'])}",
        ]
        if rows:
            lines += [f"- accuracy of each row on the texts trained on, at that step: {rows}"]
    lines += [
        "- no speed was measured while training",
        "",
        "## Made by",
        "",
        f"- {counted(trained['texts'], 'text')} with {trained['answer_tokens']} tokens answered by "
        f"the target (SHA-256 of names and ids {trained['sha256'][:16]}...)",
        f"- {counted(result['steps'], 'step')} of {recipe['step_blocks']} blocks, learning rate "
        f"{recipe['learning_rate']}, {_weights(run)}, soft labels "
        f"{recipe['soft']:g}, start: {run['init']}",
        f"- on {run['machine']}, {run['device']}, {run['dtype']}; " + _versions(run["versions"]),
        "",
        "run.json holds every setting, curve.json the course of the run.",
        "",
    ]
    return "\n".join(lines)


def _weights(run: Mapping[str, Any]) -> str:
    gamma = run["gamma"]
    return "D-PACE weights" if gamma is None else f"row weights exp(-(k-1)/{gamma:g})"


def _tau(run: Mapping[str, Any], result: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    if not held["texts"]:
        return "no text was held out, so no acceptance was measured"
    start = result.get("tau_of_start")
    before = "" if start is None else f"; {start:.2f} before training"
    temperature = run["answers"]["temperature"] if run["prompts"] else 0
    # Generation at a temperature draws its drafts, too, and accepts them at chance.
    drawn = f", drawn at temperature {temperature:g}; drafts are greedy" if temperature else ""
    return (
        f"{result['tau']:.2f} tokens a cycle on {counted(held['texts'], 'held-out text')} "
        f"({held['answer_tokens']} tokens{drawn}), at step {result['best_step']}{before}"
    )


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
