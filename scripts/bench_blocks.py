"""Whether the block chosen by cost pays: against fixed blocks, and what a reduced draft head saves.

bench_blocks auto   --block-size auto against every fixed block and plain decoding, each suite;
                    and against plain decoding on prompts of shuffled words
bench_blocks head   drafting time and τ with fewer rows of the output head
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

# This one comes first: it loads the fast BLAS before anything imports MLX.
from dflash_mlx.engine import Engine, load

# isort: split
import mlx.core as mx

from dflash_mlx.bench.questions import load as load_questions
from dflash_mlx.bench.spans import TimedRun, now, timed
from dflash_mlx.bench.suites import SUITES
from dflash_mlx.decode.words import sizes
from dflash_mlx.draft.base import DraftCache, Drafter, DraftSampling, Proposal, ReducedHead
from dflash_mlx.errors import DFlashError
from dflash_mlx.segment import Segment
from dflash_mlx.train.corpus import Text
from dflash_mlx.train.replay import Replay, replay

#: what the chosen block has to reach of the best fixed one, and of plain decoding
SHARE = 0.97
SHUFFLED = "shuffled words"
SHIPPED = tuple(name for name, suite in SUITES.items() if suite.ships)
SIDES = ("plain", "again", "auto")


def questions(suite: str, count: int) -> list[str]:
    """Prompts of a suite; of all suites in turn with their words shuffled for SHUFFLED."""
    if suite != SHUFFLED:
        return [_text(q.prompt) for q in load_questions(suite, count, None).questions[:count]]
    texts = [t for pair in zip(*(questions(s, count) for s in SHIPPED), strict=True) for t in pair]
    shuffled = []
    for number, text in enumerate(texts[:count]):
        words = text.split()
        random.Random(number).shuffle(words)
        shuffled.append(" ".join(words))
    return shuffled


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[0]["content"])


def sides(engine: Engine, blocks: Sequence[int]) -> dict[str, Engine]:
    """Engines on one loaded pair: plain decoding twice, the chosen block, and fixed ones."""

    def side(drafter: Drafter | None, block: Any) -> Engine:
        return Engine(
            engine.target, engine.tokenizer, drafter, reason="", model=engine.model,
            block_size=block,
        )  # fmt: skip

    plain, auto = side(None, None), side(engine.drafter, "auto")
    auto.calibrate()
    fixed = {f"block {n}": side(engine.drafter, n) for n in blocks}
    return {"plain": plain, "again": plain, "auto": auto} | fixed


def play(engines: dict[str, Engine], text: str, tokens: int, number: int) -> dict[str, TimedRun]:
    """Every side once on one prompt, in an order that changes from prompt to prompt."""
    order = list(engines)
    random.Random(number).shuffle(order)
    prompt = engines["plain"].prompt(text, None, None).ids

    def generation(engine: Engine) -> Iterator[list[int]]:
        return (chunk.token_ids for chunk in engine.stream(prompt, max_tokens=tokens))

    return {who: timed(partial(generation, engines[who])) for who in order}


def judge(runs: Sequence[dict[str, TimedRun]], clock: str) -> dict[str, Any]:
    """Medians over prompts: each side's speed to plain's (the mean of its two runs), the second
    plain run's to the first's, auto's to that of the best fixed block."""

    def speed(one: dict[str, TimedRun], who: str) -> float:
        both = ("plain", "again") if who == "plain" else (who,)
        return statistics.mean(one[name].rate(clock) for name in both)

    def ratio(one: str, other: str) -> float:
        return statistics.median(speed(r, one) / speed(r, other) for r in runs)

    found = {who: ratio(who, "plain") for who in runs[0] if who not in ("plain", "again")}
    found["again"] = statistics.median(
        r["again"].rate(clock) / r["plain"].rate(clock) for r in runs
    )
    fixed = {who: value for who, value in found.items() if who not in SIDES}
    best = max(fixed, key=lambda who: fixed[who], default="plain")
    if fixed.get(best, 0.0) < 1:
        best = "plain"  # a block of one row is a fixed block too
    found |= {"best": best, "auto_vs_best": ratio("auto", best)}
    return found | {"pass": found["auto_vs_best"] >= SHARE}


def compare(engine: Engine, given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for suite in given.suites:
        engines = sides(engine, given.blocks if suite != SHUFFLED else [])
        for side in engines.values():
            side.generate("Warm up.", max_tokens=8)
        runs = []
        for number, text in enumerate(questions(suite, given.samples)):
            print(f"{suite}: prompt {number + 1}", file=sys.stderr, flush=True)
            runs.append(play(engines, text, given.max_tokens, number))
        yield suite, judge(runs, given.clock)


class Reduced:
    """A drafter that drafts with `rows` frequent tokens and those of the text; None is all.

    Gathering the rows is not timed: the decode loop does it only when a new token was emitted.
    """

    def __init__(self, drafter: Drafter, rows: int | None, width: int) -> None:
        self.drafter, self.rows, self.width = drafter, rows, width
        self.block_size, self.taps, self.head_rows = (
            drafter.block_size, drafter.taps, drafter.head_rows,
        )  # fmt: skip
        self.make_cache, self.observe = drafter.make_cache, drafter.observe
        self.ids: tuple[int, ...] = ()
        self.known: set[int] = set()
        if rows is not None:
            assert drafter.head_rows is not None
            self.known.update(drafter.head_rows.order[:rows].tolist())
        self.seconds: list[float] = []

    def propose(
        self,
        anchor: mx.array,
        n: int,
        sampling: DraftSampling | None,
        cache: DraftCache,
        head: ReducedHead | None = None,
    ) -> Proposal:
        if self.rows is not None:
            assert self.head_rows is not None
            seen = dict.fromkeys(self.ids[: cache.length + 1])
            head = self.head_rows.reduced(self.rows, [t for t in seen if t not in self.known])
            mx.eval(head.ids, head.parts[-1](mx.zeros((1, 1, self.width))))
        mx.eval(cache.arrays())
        start = now()
        proposal = self.drafter.propose(anchor, n, sampling, cache, head)
        mx.eval(proposal.tokens)
        self.seconds.append(now().since(start).cpu)
        return proposal


def head_sizes(engine: Engine, given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each suite and size: drafting's CPU seconds to the whole head's, and τ to its τ."""
    drafter, target = engine.drafter, engine.target
    assert drafter is not None
    plain = sides(engine, [])["plain"]
    ends = engine.tokenizer.end_ids
    for suite in given.suites:
        all_sizes = (None, *sizes(target.vocab_size))
        drafters = {rows: Reduced(drafter, rows, target.hidden_size) for rows in all_sizes}
        found = {rows: Replay() for rows in drafters}
        for number, text in enumerate(questions(suite, given.samples)):
            print(f"{suite}: prompt {number + 1}", file=sys.stderr, flush=True)
            prompt = plain.prompt(text, None, None).ids
            answer = plain.generate(prompt, max_tokens=given.max_tokens).token_ids
            whole = Text(f"{suite}/{number}", tuple(prompt), tuple(answer))
            segment = Segment(mx.array(list(whole.ids), mx.int32), target.make_cache())
            _, features = target.forward([segment], drafter.taps)
            mx.eval(features)
            for rows, one in drafters.items():
                one.ids = whole.ids
                found[rows].add(replay(one, whole, features[0], ends, given.max_tokens))
        whole_head = statistics.median(drafters[None].seconds)
        taus = {rows: replayed.tokens_per_cycle for rows, replayed in found.items()}
        yield (
            suite,
            {
                str(rows or target.vocab_size): {
                    "drafting": statistics.median(one.seconds) / whole_head,
                    "tokens_per_cycle": taus[rows],
                    "kept": taus[rows] / taus[None],
                }
                for rows, one in drafters.items()
            },
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("auto", "head"))
    parser.add_argument("--model", default="SmolLM2-135M")
    parser.add_argument("--suites", default=",".join((*SHIPPED, SHUFFLED)))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--blocks",
        help="fixed blocks to compare with; without it 2, 3, 4, 6, 8, 12, 16, as far as "
        "the drafter goes",
    )
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    given = parser.parse_args(arguments)
    given.suites = given.suites.split(",")
    given.blocks = [int(block) for block in given.blocks.split(",")] if given.blocks else []
    if unknown := set(given.suites) - {*SUITES, SHUFFLED}:
        parser.error(f"there is no suite {', '.join(unknown)}")
    if given.samples < 1 or given.max_tokens < 4 or min(given.blocks, default=2) < 2:
        parser.error("give --samples from 1, --max-tokens from 4, --blocks from 2")
    found: dict[str, dict[str, Any]] = {}
    try:
        engine = load(given.model)
        if not given.blocks:
            given.blocks = [n for n in (2, 3, 4, 6, 8, 12, 16) if n <= engine.block_size]
        for suite, result in (compare if given.what == "auto" else head_sizes)(engine, given):
            found[suite] = result
            print(suite, json.dumps(result, indent=1), flush=True)
    except DFlashError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({given.what: found}))
    return 0 if all(result.get("pass", True) for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
