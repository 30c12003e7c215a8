"""How many tokens a cycle would accept on a known text: the decode loop's cycles, replayed.

The drafter that runs is the one of generation; only the target's answers are already there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from dflash_mlx.draft.base import Drafter
from dflash_mlx.train.corpus import Text


@dataclass
class Replay:
    """Accepted drafts of every cycle, in order, over one text or several.

    accepts: one entry a cycle. tokens: those the cycles emitted.
    """

    accepts: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, other: Replay) -> None:
        self.accepts += other.accepts
        self.tokens += other.tokens

    @property
    def tokens_per_cycle(self) -> float:
        """τ, bonus token included; 0 without a cycle."""
        return self.tokens / len(self.accepts) if self.accepts else 0.0

    def acceptance(self, block_size: int) -> list[float]:
        """Share of cycles that accept at least k drafts, k = 1 .. block_size - 1."""
        cycles = max(1, len(self.accepts))
        return [sum(a >= k for a in self.accepts) / cycles for k in range(1, block_size)]


def replay(
    drafter: Drafter,
    text: Text,
    features: mx.array,
    end_ids: Collection[int],
    max_tokens: int | None = None,
) -> Replay:
    """Greedy cycles over `text`; features [L, T·H] are the target's at all its positions.

    max_tokens: only that many tokens of the answer count, as in a generation so limited. An answer
    that does not stop with an end token counts as limited to its own length.
    """
    answer = list(text.answer_ids if max_tokens is None else text.answer_ids[:max_tokens])
    ends = bool(answer) and answer[-1] in end_ids
    limit = len(answer) if max_tokens is None and not ends else max_tokens
    cache = drafter.make_cache()
    result = Replay()
    prompt, done = len(text.prompt_ids), 1  # the first token is the target's own
    drafter.observe(features[None, :prompt], cache)
    while done < len(answer):
        drafts = drafter.block_size - 1
        if limit is not None:  # as the session: one of the tokens left is never a draft
            drafts = min(drafts, limit - done - 1)
        accepted = 0
        if drafts:
            anchor = mx.array(answer[done - 1 : done], mx.int32)
            proposed = drafter.propose(anchor, drafts, None, cache).tokens.tolist()
            accepted = agreed(proposed, answer[done:])
        emitted = min(accepted + 1, len(answer) - done)
        if drafts:
            result.accepts.append(accepted)
            result.tokens += emitted
        at = prompt + done - 1
        drafter.observe(features[None, at : at + emitted], cache)
        done += emitted
    return result


def agreed(proposed: Sequence[int], follows: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    count = 0
    while count < min(len(proposed), len(follows)) and proposed[count] == follows[count]:
        count += 1
    return count


def replay_sets(
    drafter: Drafter,
    texts: Iterable[tuple[Text, mx.array]],
    end_ids: Collection[int],
    max_tokens: int | None = None,
) -> dict[str, Replay]:
    """`replay` over several texts, each with its features, by the set a text belongs to."""
    sets: dict[str, Replay] = {}
    for text, features in texts:
        known = replay(drafter, text, features, end_ids, max_tokens)
        sets.setdefault(text.set_name, Replay()).add(known)
        mx.clear_cache()
    return sets


def joined(sets: Mapping[str, Replay]) -> Replay:
    """All sets as one."""
    total = Replay()
    for part in sets.values():
        total.add(part)
    return total
