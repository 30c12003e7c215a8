"""Speed of plain decoding beside mlx-lm's on the same weights, and what a DFlash cycle adds.

Everything runs interleaved, prompt by prompt, in this process. A table first, then one JSON line.
Exit code 1 when a bound is missed or a text differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# This one comes first: it loads the fast BLAS before anything imports MLX.
from dflash_mlx.engine import BLAS, Engine, load

# isort: split
from bench_cycles import paired_cycles
from bench_pairs import AA_LIMIT, BOUNDS, CLOCKS, Pairs, deciding_clock, judge, steady

from dflash_mlx import machine
from dflash_mlx.bench.compare import difference
from dflash_mlx.bench.rival import MlxLm
from dflash_mlx.bench.spans import TimedRun, timed
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.loader import read_target_config

_DAYS = "\n".join(f"Day {n}: {3 * n} apples and {2 * n + 1} pears sold." for n in range(1, 31))
PROMPTS = {
    "pens": "A shop has 14 red pens and twice as many blue ones. On Monday it sells half of all "
    "its pens. How many are left? Explain every step.",
    "ledger": f"{_DAYS}\nWrite a report about the sales of this shop, day by day.",
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "letter": "Write a friendly letter to a neighbour who fed our cat for two weeks.",
    "rain": "Explain in ten sentences how rain forms and why some clouds bring none.",
}


class Bench:
    """The programs that run against each other, and what was found."""

    def __init__(self, engine: Engine, reference: MlxLm, max_tokens: int) -> None:
        self.engine = engine
        self.drafter = engine.drafter if engine.block_size > 1 else None
        self.max_tokens = max_tokens
        self._plain = Engine(
            engine.target, engine.tokenizer, None, reason="the baseline", model=engine.model
        )
        self._reference = reference
        self.pairs = Pairs()
        self.prompts: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.runs: dict[str, dict[str, list[TimedRun]]] = {}  # prompt -> who -> measured runs
        self.differences: list[dict[str, Any]] = []
        self._who: dict[str, list[str]] = {}  # prompt -> who gave the text of plain decoding
        self._cycles = self._cycle_tokens = 0

    def admit(self, name: str, text: str) -> None:
        """Run everyone once, unmeasured: who gives another text than plain is not compared."""
        prompt = self.engine.prompt(text, None, None).ids
        right = self._run("plain", prompt).tokens
        if len(right) < 2:
            raise UsageError(f"The answer to {name} is one token long. Choose another prompt.")
        self.prompts[name], self.texts[name], self.runs[name] = prompt, right, {}
        self._who[name] = []
        for who in ["mlx_lm", *(["dflash"] if self.drafter else [])]:
            other = self._run(who, prompt).tokens
            parted = difference(self.engine.target, self.engine._guard, prompt, right, other)
            if parted is None:
                self._who[name].append(who)
                continue
            where = {"prompt": name, "who": who, "token": parted.token}
            gap = parted.gap if math.isfinite(parted.gap) else None  # JSON knows no infinity
            self.differences.append(where | {"gap": gap, "near_tie": parted.near_tie})

    def round(self, number: int, name: str) -> None:
        """Everyone once, plain twice; every other round in the opposite order."""
        present = {"plain", "again", *self._who[name]}
        order = [who for who in ("plain", "mlx_lm", "again", "dflash") if who in present]
        runs = {}
        for who in order if number % 2 == 0 else reversed(order):
            runs[who] = self._run(who, self.prompts[name])
            if runs[who].tokens != self.texts[name]:
                raise UsageError(f"{who} gave two different texts for {name}. This is a bug.")
            self.runs[name].setdefault(who, []).append(runs[who])
        self.pairs.add_round(runs)

    def cycles(self, name: str) -> None:
        """The cycles of one generation beside their forwards alone."""
        if self.drafter is None:
            return
        ends = self.engine.tokenizer.end_ids
        prompt = self.prompts[name]
        for pair in paired_cycles(self.engine.target, self.drafter, prompt, self.max_tokens, ends):
            self.pairs.add_cycle(*pair)

    @property
    def tokens_per_cycle(self) -> float | None:
        return self._cycle_tokens / self._cycles if self._cycles else None

    @property
    def texts_agree(self) -> bool:
        return all(d["near_tie"] for d in self.differences)

    def _run(self, who: str, prompt: list[int]) -> TimedRun:
        if who == "mlx_lm":
            return self._reference.timed(prompt, self.max_tokens)
        engine = self.engine if who == "dflash" else self._plain
        return timed(lambda: self._own(engine, prompt))

    def _own(self, engine: Engine, prompt: list[int]) -> Iterator[list[int]]:
        for chunk in engine.stream(prompt, max_tokens=self.max_tokens):
            yield chunk.token_ids
            if chunk.stats is not None:
                self._cycles += chunk.stats.cycles
                self._cycle_tokens += chunk.stats.cycle_tokens


def wanted_bounds(bench: Bench) -> list[str]:
    """Without a drafter there is no cycle to judge."""
    return [name for name in BOUNDS if bench.drafter or name != "cycle_overhead"]


def document(bench: Bench, repeats: int) -> dict[str, Any]:
    """Everything found, ready for JSON; medians at the top are on the deciding clock."""
    pairs, clock = bench.pairs, deciding_clock(bench.pairs)
    names = ("plain_vs_mlx_lm", "prefill_vs_mlx_lm", "dflash_vs_plain", "cycle_overhead")
    verdicts = judge(pairs, wanted_bounds(bench))
    return {
        **{name: pairs.median(name, clock) for name in names},
        "aa": pairs.median("aa", "wall"),
        "aa_cpu": pairs.median("aa", "cpu"),
        "judged_by": clock,
        "steady": steady(pairs),
        **{other: {name: pairs.median(name, other) for name in names} for other in CLOCKS},
        "tokens_per_cycle": bench.tokens_per_cycle,
        "bounds": verdicts,
        "texts_agree": bench.texts_agree,
        "differences": bench.differences,
        "pass": bench.texts_agree and all(v["pass"] for v in verdicts.values()),
        "repeats": repeats,
        "max_tokens": bench.max_tokens,
        "prompts": {name: len(ids) for name, ids in bench.prompts.items()},
        "model": bench.engine.model,
        "drafter": bench.engine.drafter_name,
        "machine": {
            "chip": machine.chip(),
            "back_end": machine.back_end()[0],
            "memory_gb": round(machine.memory_bytes() / 1e9, 1),
            "blas": f"{BLAS.name}: {BLAS.reason}",
            "load_average": os.getloadavg()[0],
        },
        "versions": machine.versions(),
    }


def table(bench: Bench, found: Mapping[str, Any]) -> Iterator[str]:
    """The same for people, line by line."""
    clock = found["judged_by"]
    yield f"{bench.engine.model}, {found['machine']['chip']}, {found['machine']['blas']}"
    yield f"tokens a second, medians of {found['repeats']} rounds, by {clock} seconds:"
    yield (
        f"{'prompt':10}{'tokens':>12}{'':4}"
        + "".join(
            f"{who + ' ' + span:>16}"
            for span in ("prefill", "decode")
            for who in ("plain", "mlx_lm")
        )
        + f"{'dflash decode':>16}"
    )
    for name, runs in bench.runs.items():
        cells = [_prefill_rate(runs.get(w, []), len(bench.prompts[name]), clock) for w in _TWO]
        cells += [_rate(runs.get(w, []), clock) for w in (*_TWO, "dflash")]
        sizes = f"{len(bench.prompts[name])}+{len(bench.texts[name])}"
        yield f"{name:10}{sizes:>12}{'':4}" + "".join(f"{cell:>16}" for cell in cells)
    yield f"{'median of pairs':20}{'wall':>8}{'quartiles':>16}{'cpu':>10}{'quartiles':>16}"
    for name in ("aa", *(n for n in _RATIOS if n in bench.pairs.values)):
        yield f"{name:20}" + "".join(_cells(bench.pairs, name, c) for c in CLOCKS)
    tau = found["tokens_per_cycle"]
    yield "no drafter, so no cycles" if tau is None else f"tokens per cycle {tau:.2f}"
    yield f"judged by {clock} seconds (plain against itself by wall: {found['aa']:.4f}, " + (
        f"within {AA_LIMIT:.0%})" if clock == "wall" else f"off by more than {AA_LIMIT:.0%})"
    )
    if not found["steady"]:
        yield (
            f"no clock finds plain as fast as itself (by cpu: {found['aa_cpu']:.4f}): this machine "
            "is too busy to judge hundredths; measure again on an idle one"
        )
    for name, verdict in found["bounds"].items():
        word = "at least" if "at_least" in verdict else "at most"
        bound = verdict.get("at_least", verdict.get("at_most"))
        value = "not measured" if verdict["value"] is None else f"{verdict['value']:.4f}"
        yield f"{'pass' if verdict['pass'] else 'FAIL'}  {name} {value}, {word} {bound}"
    for d in bench.differences:
        kind = "near tie" if d["near_tie"] else "FAIL"
        how = "one text ends" if d["gap"] is None else f"logits {d['gap']:.2g} apart"
        yield (
            f"{kind}  {d['who']} parts from plain at token {d['token']} of {d['prompt']} "
            f"({how}); its speed there is not counted"
        )
    if not bench.differences:
        yield "pass  all texts are equal"


_TWO = ("plain", "mlx_lm")
_RATIOS = ("plain_vs_mlx_lm", "prefill_vs_mlx_lm", "dflash_vs_plain", "cycle_overhead")


def _rate(runs: list[TimedRun], clock: str) -> str:
    return f"{statistics.median(r.rate(clock) for r in runs):.2f}" if runs else "-"


def _prefill_rate(runs: list[TimedRun], rows: int, clock: str) -> str:
    rates = [rows / getattr(r.prefill, clock) for r in runs]
    return f"{statistics.median(rates):.1f}" if rates else "-"


def _cells(pairs: Pairs, name: str, clock: str) -> str:
    low, high = pairs.quartiles(name, clock)
    span = f"{low:.3f}..{high:.3f}"
    return f"{pairs.median(name, clock):>{8 if clock == 'wall' else 10}.4f}{span:>16}"


def measure(bench: Bench, prompts: Mapping[str, str], repeats: int, told: bool = True) -> None:
    """All rounds; progress goes to stderr."""
    for name, text in prompts.items():
        _tell(told, f"{name}: comparing texts")
        bench.admit(name, text)
    gc.collect()
    gc.freeze()  # collecting before every run must not go through all the libraries again
    try:
        for number in range(repeats):
            for name in prompts:
                _tell(told, f"round {number + 1} of {repeats}: {name}")
                bench.round(number, name)
                bench.cycles(name)
    finally:
        gc.unfreeze()


def _tell(told: bool, line: str) -> None:
    if told:
        print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3, help="how many of them")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--no-judge", action="store_true", help="exit 0 whatever was found")
    given = parser.parse_args(arguments)
    if not (given.repeats >= 1 and given.max_tokens >= 4 and 1 <= given.prompts <= len(PROMPTS)):
        parser.error(
            f"give --repeats from 1, --max-tokens from 4, --prompts from 1 to {len(PROMPTS)}"
        )
    try:
        engine = load(given.model, block_size=None)
        reference = MlxLm(engine, read_target_config(engine.path))
        bench = Bench(engine, reference, given.max_tokens)
        chosen = dict(list(PROMPTS.items())[: given.prompts])
        measure(bench, chosen, given.repeats, told=not given.json)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    found = document(bench, given.repeats)
    if not given.json:
        print("\n".join(table(bench, found)))
    print(json.dumps(found))
    return 0 if found["pass"] or given.no_judge else 1


if __name__ == "__main__":
    sys.exit(main())
