"""The policy that knows the text: what could be gained by knowing each place's chance of acceptance, but not the coins.

V(t), the least expected time from place t to the end, by dynamic programming from the end (Bellman 1957):

    V(t) = min over γ of T(γ) + sum over accepted a of P(exactly a of γ) V(t + a + 1),    T(0) = a token of a plain run
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.simulator.texts import Text
from coordinator.simulator.world import World
from outrider.drafting.guess import Guess
from outrider.results import DrafterOutlook


def unloaded_ms(world: World, num_draft_tokens: int) -> float:
    """Of a round while no other stream is there; 0: of a token of a plain run."""
    context = world.context_tokens
    verify_ms = world.target(num_draft_tokens + 1, context, 1)
    if not num_draft_tokens:
        return verify_ms
    draft_rtt_ms = 0.0 if world.colocated else world.draft_rtt_ms
    draft_ms = num_draft_tokens * world.draft(1, context, 1)
    return draft_rtt_ms + draft_ms + world.target_rtt_ms + world.overhead_ms + verify_ms


class Clairvoyant:
    """Of one stream that begins at a place of its text and knows what its rounds take while it is alone."""

    def __init__(
        self, text: Text, place: int, num_tokens: int, round_ms: Callable[[int], float], max_draft_tokens: int
    ) -> None:
        """round_ms: by γ."""
        self._done = 0
        self._gammas = _best_gammas(text, place, num_tokens, round_ms, max_draft_tokens)

    def choose(
        self,
        max_draft_tokens: int,
        max_credit_tokens: int,
        candidates: tuple[Candidate, ...],
        guesses: tuple[Guess, ...] = (),
    ) -> Choice:
        gammas = self._gammas[self._done : self._done + max_credit_tokens] or [0]
        if gammas[0] and max_draft_tokens:
            gamma = min(gammas[0], max_draft_tokens)
            return Choice(candidates[0].name, gamma, "best", candidate=candidates[0])
        run = next((i for i, gamma in enumerate(gammas) if gamma), len(gammas))
        return Choice("", 0, "best", max(1, run))

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        return False

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        return 0

    def observe(self, report: RoundReport) -> None:
        self._done += report.num_committed

    def outlooks(self) -> tuple[DrafterOutlook, ...]:
        return ()


def _best_gammas(
    text: Text, place: int, num_tokens: int, round_ms: Callable[[int], float], max_draft_tokens: int
) -> list[int]:
    """γ at each of the next `num_tokens` places."""
    times = [round_ms(gamma) for gamma in range(max_draft_tokens + 1)]
    left = [0.0] * (num_tokens + max_draft_tokens + 2)
    gammas = [0] * num_tokens
    for t in range(num_tokens - 1, -1, -1):
        best_ms, best_gamma = times[0] + left[t + 1], 0
        ended_ms, reached = 0.0, 1.0
        for gamma in range(1, max_draft_tokens + 1):
            chance = text.chance(place + t + gamma - 1, gamma - 1)
            ended_ms += reached * (1 - chance) * left[t + gamma]
            reached *= chance
            ms = times[gamma] + ended_ms + reached * left[t + gamma + 1]
            if ms < best_ms:
                best_ms, best_gamma = ms, gamma
        left[t], gammas[t] = best_ms, best_gamma
    return gammas
