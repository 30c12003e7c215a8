"""One benchmark: its groups of prompts by suite, context and temperature, and its JSON document."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash_mlx import machine
from dflash_mlx.bench import contexts, measure
from dflash_mlx.bench.compare import NEAR_TIE_SPACINGS
from dflash_mlx.bench.measure import Pair
from dflash_mlx.bench.play import Player, Settings, check, check_drafter
from dflash_mlx.bench.questions import Loaded, Question
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.loader import dtype_name


@dataclass(frozen=True)
class Plan:
    """What to run. samples: prompts of each suite, None for all; contexts: lengths in tokens."""

    settings: Settings
    temperatures: tuple[float, ...] = (0.0,)
    contexts: tuple[int, ...] = ()
    samples: int | None = None


@dataclass
class Group:
    """Prompts of one suite at one context length and temperature, and their pairs so far."""

    suite: str
    context: int | None
    settings: Settings
    label: str
    questions: list[Question]
    pairs: list[Pair] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.questions) * self.settings.repeats


def groups(engine: Engine, loaded: Mapping[str, Loaded], plan: Plan) -> list[Group]:
    """All groups, suite by suite. UsageError for what cannot run, before anything runs."""
    check_drafter(engine)
    _check_contexts(engine, plan)
    found = []
    for suite, source in loaded.items():
        for context in plan.contexts or (None,):
            questions = _chosen(engine, suite, source, context, plan)
            check(engine, questions, plan.settings)
            for temperature in plan.temperatures:
                settings = replace(plan.settings, temperature=temperature)
                label = _label(suite, context, temperature, plan)
                found.append(Group(suite, context, settings, label, questions))
    return found


def shortfalls(found: Sequence[Group], plan: Plan) -> list[str]:
    """Sentences about suites that have fewer prompts than asked for."""
    short = {
        (g.suite, g.context): len(g.questions)
        for g in found
        if plan.samples is not None and len(g.questions) < plan.samples
    }
    return [
        f"{suite}{f' at {contexts.label(context)}' if context else ''} has {count} prompts, fewer "
        f"than the {plan.samples} asked for; all of them are run."
        for (suite, context), count in short.items()
    ]


def beyond_costs(engine: Engine, found: Sequence[Group], plan: Plan) -> list[str]:
    """A sentence where the costs behind the chosen blocks end before the longest prompts with a
    document do; they are measured now where none are stored."""
    if not engine.automatic:
        return []
    thinking = plan.settings.thinking
    documents = {id(g.questions): g.questions for g in found}.values()
    longest = max(
        (
            len(engine.prompt(question.prompt, thinking, None).ids)
            for questions in documents
            for question in questions
            if question.document is not None
        ),
        default=0,
    )
    covered = engine.calibrate().measured[-1].context
    if longest <= covered:
        return []
    return [
        f"What a cycle costs is measured up to a context of {covered} tokens here; for prompts of "
        f"up to {longest} it is taken as there. `dflash-mlx calibrate --seconds 120`, or longer, "
        "measures longer contexts."
    ]


def first_turns(loaded: Mapping[str, Loaded]) -> list[str]:
    """A sentence about every file of prompts of which some turns are not run."""
    return [
        f"Only first turns are run: {source.further} of the {len(source.questions)} prompts of "
        f"{name} came with more."
        for name, source in loaded.items()
        if source.further
    ]


def run(player: Player, found: Sequence[Group]) -> Iterator[Group]:
    """Run group by group; a group is yielded whenever it has another pair."""
    for group in found:
        for pair in player.play(group.questions, group.settings):
            group.pairs.append(pair)
            yield group


def document(
    engine: Engine,
    plan: Plan,
    loaded: Mapping[str, Loaded],
    found: Sequence[Group],
    notes: Sequence[str],
    partial: bool,
) -> dict[str, Any]:
    """The report as JSON, as `schema.md` describes it; only groups that were begun are in it."""
    begun = [group for group in found if group.pairs]
    every = [pair for group in begun for pair in group.pairs]
    suites = {
        g.label: {
            "suite": g.suite,
            "context": g.context,
            "temperature": g.settings.temperature,
            **measure.summarise(g.pairs),
        }
        for g in begun
    }
    by_context = {contexts.label(c): [g for g in found if g.context == c] for c in plan.contexts}
    by_temperature = {
        f"{t:g}": [g for g in found if g.settings.temperature == t] for t in plan.temperatures
    }
    return {
        **_head(engine, plan, loaded, every),
        "suites": suites,
        "by_context": _summaries(by_context, found),
        "by_temperature": _summaries(by_temperature, found),
        "summary": measure.summarise(every),
        "points": [point for g in begun for point in measure.points(g.label, g.pairs)],
        "notes": list(notes),
        "partial": partial,
        "planned_pairs": sum(group.total for group in found),
    }


def _summaries(parts: Mapping[str, list[Group]], found: Sequence[Group]) -> dict[str, Any]:
    """Of every part that is neither one group alone nor all of them, so told elsewhere."""
    return {
        name: measure.summarise([pair for group in part for pair in group.pairs])
        for name, part in parts.items()
        if 1 < len(part) < len(found)
    }


def _label(suite: str, context: int | None, temperature: float, plan: Plan) -> str:
    at = f" {contexts.label(context)}" if context is not None else ""
    return suite + at + (f" temp {temperature:g}" if len(plan.temperatures) > 1 else "")


def _chosen(
    engine: Engine, suite: str, source: Loaded, context: int | None, plan: Plan
) -> list[Question]:
    def count(question: Question) -> int:
        return len(engine.prompt(question.prompt, plan.settings.thinking, None).ids)

    wanted = len(source.questions) if plan.samples is None else plan.samples
    if context is not None:
        chosen = contexts.fitted(source.questions, context, wanted, count)
        lack = f"No prompt of {suite} can be brought to {context} tokens. Give another --context."
    elif source.documents:
        most = engine.target.context_length - plan.settings.max_tokens
        chosen = contexts.within(source.questions, most, wanted, count)
        lack = (
            f"No prompt of {suite} has from {contexts.SHORTEST} to {min(most, contexts.LONGEST)} "
            "tokens, as the context and --max-tokens would allow. Give --context or another suite."
        )
    else:
        chosen, lack = source.questions[:wanted], f"{suite} has no prompts. Give another suite."
    if not chosen:
        raise UsageError(lack)
    return chosen


def _check_contexts(engine: Engine, plan: Plan) -> None:
    limit, most = engine.target.context_length, plan.settings.max_tokens
    for context in plan.contexts:
        if context + most > limit:
            raise UsageError(
                f"--context {contexts.label(context)} and --max-tokens {most} reach beyond the "
                f"context of {limit} of {engine.model}. Give smaller numbers."
            )


def _head(
    engine: Engine, plan: Plan, loaded: Mapping[str, Loaded], pairs: Sequence[Pair]
) -> dict[str, Any]:
    stats = engine.new_stats()
    settings = asdict(plan.settings) | {"temperatures": list(plan.temperatures)}
    del settings["temperature"]
    return {
        "model": engine.model,
        "drafter": engine.drafter_name,
        "machine": {
            "chip": machine.chip(),
            "memory_gb": round(machine.memory_bytes() / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}",
            "back_end": machine.back_end()[0],
            "blas": stats.blas,
            "kernels": stats.kernels,
            "versions": stats.versions,
        },
        "settings": {
            **settings,
            "contexts": list(plan.contexts),
            "samples": plan.samples,
            "sources": {
                name: {"source": source.source, "revision": source.revision}
                for name, source in loaded.items()
            },
            "block_policy": _told(pairs, "block_policy"),
            "calibration": _told(pairs, "calibration"),
            "block_size": engine.block_size,
            "dtype": dtype_name(engine.target.dtype),
            "near_tie_spacings": 0 if engine.exact else NEAR_TIE_SPACINGS[engine.target.dtype],
            "exact": engine.exact,
            "model_revision": engine.revisions[0],
            "drafter_revision": engine.revisions[1],
        },
    }


def _told(pairs: Sequence[Pair], name: str) -> str | None:
    """What the statistics of the DFlash runs say, with commas between where they differ."""
    found = {pair.dflash.stats[name] for pair in pairs} - {None, ""}
    return ", ".join(sorted(found)) or None
