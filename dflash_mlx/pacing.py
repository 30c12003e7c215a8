"""What paces the generations of one engine: a fixed block, or the policy with its costs."""

from __future__ import annotations

from dflash_mlx.calibration import Say, costs_of
from dflash_mlx.decode.costs import Costs, Refined
from dflash_mlx.decode.pace import FixedPace, Pace, PolicyPace, Trace
from dflash_mlx.decode.sampling import SamplingParams
from dflash_mlx.decode.session import MOST_HELD, Guard, Session
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.decode.words import Words
from dflash_mlx.draft.base import Drafter
from dflash_mlx.models.base import Target

#: cycles a generation needs before its speed is compared with plain decoding
COMPARED_CYCLES = 4
#: share of plain decoding's speed below which choosing the block automatically has failed
AUTOMATIC_SHARE = 0.97


class Pacing:
    """Costs are measured at their first use and refined by all generations without a seed.

    automatic: the policy chooses, up to block_size rows a cycle. trace: gets its choices. say: is
    told before the measuring.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        guard: Guard,
        block_size: int,
        *,
        automatic: bool,
        trace: Trace | None = None,
        say: Say | None = None,
    ) -> None:
        self.block_size = block_size
        self.automatic = automatic and drafter is not None and block_size > 1
        self.warnings: list[str] = []
        self._target, self._drafter, self._guard = target, drafter, guard
        self._trace, self._say = trace, say
        self._costs: Refined | None = None
        self._plain_seconds: dict[int, float] = {}  # by context length, in powers of two

    def costs(self, seconds: float | None = None, *, anew: bool = False) -> Costs:
        """What cycles cost here: as stored for this machine, else measured, in about `seconds`.

        anew: measure and store again. Needs a drafter.
        """
        return self._refined(seconds, anew).costs

    def pace(self, params: SamplingParams, words: Words | None) -> Pace:
        """For one generation."""
        if not self.automatic:
            return FixedPace(self.block_size)
        refined = self._refined()
        if params.seed is not None:
            # A seed repeats a run, so its choices may not depend on how long steps take.
            refined = Refined(refined.costs, frozen=True)
        return PolicyPace(self.block_size, refined, words, self._trace)

    def _refined(self, seconds: float | None = None, anew: bool = False) -> Refined:
        if self._costs is None or anew:
            assert self._drafter is not None
            costs, warning = costs_of(
                self._target,
                self._drafter,
                self._guard,
                self.block_size,
                seconds=seconds,
                anew=anew,
                say=self._say,
            )
            self._costs = Refined(costs)
            self.warnings += [warning] if warning else []
        return self._costs

    def compare_with_plain(self, session: Session, stats: GenerationStats) -> None:
        """Say plainly when drafting cost time; plain steps are timed once a context size."""
        speed = stats.generation_tps
        if stats.cycles < COMPARED_CYCLES or speed is None or not session.ids:
            return
        if session.held > MOST_HELD * stats.generation_seconds:
            return  # its reader or other generations held it up, so its speed tells nothing
        bucket = len(session.ids).bit_length()
        if bucket not in self._plain_seconds:
            self._plain_seconds[bucket] = session.time_plain_step()
        stats.plain_tps = 1 / self._plain_seconds[bucket]
        # The policy decodes plainly where that pays; what it lost in looking is within its bound.
        if speed < stats.plain_tps * (AUTOMATIC_SHARE if self.automatic else 1):
            stats.warn(
                f"DFlash was slower here: {speed:.1f} tok/s, where plain decoding makes about "
                f"{stats.plain_tps:.1f} tok/s. Use --no-draft for text like this."
            )
