"""What a fleet needs: best γ, speeds and numbers of workers by load, each figure from a simulation of it.

γ is the best fixed one there, which the controller comes within a few percent of, drafted ahead of the verdict where
that is faster. Texts are of one acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.gamma.fixed import FixedGamma
from coordinator.simulator.simulation import MODEL, Outcome, Simulation
from coordinator.simulator.texts import Text, constant
from coordinator.simulator.world import World
from outrider.settings import DraftWorkerSettings

LOADS = (1, 2, 4, 8, 16, 32, 64)
"""Streams a target that plans are made for."""
MAX_STREAMS = 100_000
MAX_STREAMS_PER_TARGET = 512
NUM_TOKENS = 5000
"""Of a simulation, at least."""
TOKENS_PER_STREAM, MANY_TOKENS, FEWEST_TOKENS_PER_STREAM = 40, 50_000, 12
"""So many for each stream until there are many in all; a large fleet says much in a few rounds of each."""
MIN_GAIN = 1.01
"""Less is the noise of a simulation."""
SAME = 1.005
"""Between two γ."""
MAX_MORE_AHEAD = 2
"""Drafts beyond the best γ on demand that may be best ahead of the verdict, where longer chains have fewer hits."""
NUM_BRANCHES: int = DraftWorkerSettings.model_fields["ahead_branches"].default
AHEAD = dataclasses.replace(MODEL, max_branches=NUM_BRANCHES // 2)
"""The controller says what a branch is worth, and those of unlikely outcomes are shorter then, or left out: a pass has
about half as many rows."""
BEGIN_TOKENS = 4
"""Of each stream before anything is counted."""
TEXT_LENGTH = 1 << 13
KEPT_SHARE = 0.97
"""Of the speed that draft workers in plenty would give: fewer are enough when that much is kept."""
MAX_TARGETS_PER_DRAFT, MAX_DRAFTS_PER_TARGET = 16, 8


@dataclass(frozen=True, slots=True)
class Speed:
    """The best γ and what a stream gets with it, beside plain decoding at the same load. `drafts_ahead`: of the
    verdict. `draft_load`: share of a draft worker's time that it takes. `passes_a_round`: of the target, from one
    verdict of a stream to its next."""

    num_streams: int
    gamma: int
    drafts_ahead: bool
    tokens_per_s: float
    plain_tokens_per_s: float
    draft_load: float
    passes_a_round: float

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """`num_drafts` 0: none, or the drafter is on the targets. `tokens_per_s`: of a stream, all of them at once."""

    num_targets: int
    num_drafts: int
    streams_per_target: int
    gamma: int
    drafts_ahead: bool
    tokens_per_s: float


class Planner:
    """Of one target, its draft workers and texts of one acceptance."""

    def __init__(self, world: World, acceptance: float, *, max_draft_tokens: int) -> None:
        """world: costs and networks; its numbers of workers are not read."""
        self.world = world
        self._acceptance = acceptance
        self._text = Text(constant(acceptance), length=TEXT_LENGTH)
        self._max_draft_tokens = max_draft_tokens
        self._speeds: dict[int, Speed] = {}

    def colocated(self) -> Planner:
        """With the drafter on the target's own device."""
        world = dataclasses.replace(self.world, colocated=True)
        return Planner(world, self._acceptance, max_draft_tokens=self._max_draft_tokens)

    def speed(self, num_streams: int) -> Speed:
        """Of so many streams on one target with a draft worker of its own."""
        if num_streams not in self._speeds:
            outcomes = {gamma: self._play(gamma, num_streams) for gamma in self._gammas(num_streams)}
            most = max(outcome.tokens_per_s for outcome in outcomes.values())
            # of those that noise does not tell apart the fewest drafts
            best = next(gamma for gamma in sorted(outcomes) if outcomes[gamma].tokens_per_s * SAME >= most)
            chosen, drafts_ahead = outcomes[best], False
            for gamma in self._gammas_ahead(best):
                ahead = self._play(gamma, num_streams, drafts_ahead=True)
                if ahead.tokens_per_s > (SAME if drafts_ahead else MIN_GAIN) * chosen.tokens_per_s:
                    best, chosen, drafts_ahead = gamma, ahead, True
            rate, plain_rate = (outcome.tokens_per_s / num_streams for outcome in (chosen, outcomes[0]))
            num_rounds = sum(chosen.rounds.values()) if best else chosen.num_tokens
            passes = chosen.num_passes * num_streams / num_rounds
            self._speeds[num_streams] = Speed(
                num_streams, best, drafts_ahead, rate, plain_rate, chosen.draft_load, passes
            )
        return self._speeds[num_streams]

    def pays_up_to(self) -> int | None:
        """Most streams of a target that speculation pays for, up to the first load at which it does not; None: it pays
        at all `LOADS`."""
        pays = 0
        for load in LOADS:
            if self._pays(load):
                pays = load
                continue
            return _most(pays, load, self._pays)
        return None

    def _gammas(self, num_streams: int) -> Sequence[int]:
        """Those that may be best: beyond the loads of a plan it hardly moves."""
        if num_streams <= LOADS[-1]:
            return range(self._max_draft_tokens + 1)
        near = self.speed(LOADS[-1]).gamma
        return (0, *range(max(1, near - 2), min(near + 1, self._max_draft_tokens) + 1))

    def _gammas_ahead(self, best: int) -> Sequence[int]:
        """Those that may be best ahead of the verdict. Beside its target a drafter has no time of its own for it; where
        drafts on demand do not pay it may be the network alone that is in the way."""
        if self.world.colocated or not self.world.branch_survival:
            return ()
        return range(1, min(self._max_draft_tokens, best + MAX_MORE_AHEAD if best else self._max_draft_tokens) + 1)

    def _pays(self, num_streams: int) -> bool:
        return num_streams == 0 or self.speed(num_streams).gain > MIN_GAIN

    def streams_per_target(self, min_tokens_per_s: float, most: int = MAX_STREAMS_PER_TARGET) -> int:
        """Most streams of a target, of up to `most`, that get so much each; 0: not even one does."""
        if self.speed(1).tokens_per_s < min_tokens_per_s:
            return 0
        low, high, most = 1, 2, min(most, MAX_STREAMS_PER_TARGET)
        while high <= most and self.speed(high).tokens_per_s >= min_tokens_per_s:
            low, high = high, 2 * high
        return _most(low, min(high, most + 1), lambda n: self.speed(n).tokens_per_s >= min_tokens_per_s)

    def fleet(self, num_streams: int, min_tokens_per_s: float) -> Fleet | None:
        """Fewest targets, then fewest draft workers; None: one stream alone does not get so much."""
        per_target = self.streams_per_target(min_tokens_per_s, num_streams)
        if not per_target:
            return None
        num_targets = -(-num_streams // per_target)
        per_target = -(-num_streams // num_targets)
        best = self.speed(per_target)
        num_drafts = 0
        if best.gamma and not self.world.colocated:
            num_drafts = self._num_drafts(num_targets, best, min_tokens_per_s)
        world = dataclasses.replace(self.world, num_targets=num_targets, num_drafts=max(1, num_drafts))
        rate = self._simulate(world, best.gamma, num_streams, best.drafts_ahead).tokens_per_s / num_streams
        return Fleet(num_targets, num_drafts, per_target, best.gamma, best.drafts_ahead, rate)

    def _num_drafts(self, num_targets: int, best: Speed, min_tokens_per_s: float) -> int:
        """By the largest share of a draft worker that is enough for a target, or the fewest whole ones."""
        plenty = self._rate(1, MAX_DRAFTS_PER_TARGET, best)
        enough = min(plenty, max(KEPT_SHARE * plenty, min_tokens_per_s))
        drafts = 1
        while drafts < MAX_DRAFTS_PER_TARGET and self._rate(1, drafts, best) < enough:
            drafts += 1
        if drafts > 1:
            return drafts * num_targets
        most = min(num_targets, MAX_TARGETS_PER_DRAFT)
        return -(-num_targets // _most(1, most + 1, lambda targets: self._rate(targets, 1, best) >= enough))

    def _rate(self, num_targets: int, num_drafts: int, best: Speed) -> float:
        """Tokens/s of a stream, drafted for as is best."""
        world = dataclasses.replace(self.world, num_targets=num_targets, num_drafts=num_drafts)
        num_streams = num_targets * best.num_streams
        return self._simulate(world, best.gamma, num_streams, best.drafts_ahead).tokens_per_s / num_streams

    def _play(self, gamma: int, num_streams: int, *, drafts_ahead: bool = False) -> Outcome:
        world = dataclasses.replace(self.world, num_targets=1, num_drafts=1)
        return self._simulate(world, gamma, num_streams, drafts_ahead)

    def _simulate(self, world: World, gamma: int, num_streams: int, drafts_ahead: bool) -> Outcome:
        simulation = Simulation(
            world,
            [self._text],
            lambda *_: FixedGamma(gamma, drafts_ahead=drafts_ahead),
            num_streams=num_streams,
            max_draft_tokens=self._max_draft_tokens,
            candidates=(AHEAD if drafts_ahead else MODEL,),
        )
        simulation.run(BEGIN_TOKENS * num_streams)
        by_stream = max(FEWEST_TOKENS_PER_STREAM * num_streams, min(MANY_TOKENS, TOKENS_PER_STREAM * num_streams))
        return simulation.run(max(NUM_TOKENS, by_stream))


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `high` that fits, to a sixteenth of it; `low` does."""
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
