"""In simulation: the merger of a draft worker's drafter and local guesses is no slower than the best of its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from conftest import scaled

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.chances import Chances
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from outrider.drafting.guess import OWN, Evidence, Guess

CAP = 8
MODEL = Candidate("model")
GOOD, BAD = Evidence(OWN, 7, 3), Evidence(OWN, 2, 1)


@dataclass
class World:
    """Simulated costs in ms. At each round a guess of good or bad evidence is there with some chance, and its tokens
    are right with another; both kinds look as likely to who has measured nothing as their priors say."""

    accept: float = 0.6
    draft_ms: float = 1.0
    verify_ms: float = 20.0
    row_ms: float = 0.3
    rtt_ms: float = 0.5
    good: tuple[float, float] = (0.2, 0.9)
    bad: tuple[float, float] = (0.5, 0.1)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def guess(self, chances: Chances) -> tuple[tuple[Guess, ...], float]:
        """(what a local drafter has, how often its tokens are right)."""
        for evidence, (there, right) in ((GOOD, self.good), (BAD, self.bad)):
            if self.rng.random() < there:
                return (Guess("suffix", (1,) * CAP, (evidence,) * CAP, (chances.chance(evidence),) * CAP),), right
        return (), 0.0

    def run(self, num_tokens: int, *, model: bool, local: bool) -> float:
        """ms a token of the adaptive controller with what it is given; plain with neither."""
        policy, chances = AdaptiveGamma(PairEstimates(), CAP), Chances()
        done, clock = 0, 0.0
        while done < num_tokens:
            guesses, right = self.guess(chances)
            offered = guesses if local else ()
            choice = policy.choose(CAP, 4, (MODEL,) if model else (), offered)
            report = self.round(choice, choice.drafter == "suffix", right)
            policy.observe(report)
            for guess in offered:  # judged by what was committed, used or not
                chances.observe(guess.evidence[0], self.rng.random() < right)
            done, clock = done + report.num_committed, clock + report.round_ms
        return clock / done

    def round(self, choice: Choice, is_local: bool, right: float) -> RoundReport:
        def jitter(value: float) -> float:
            return value * self.rng.uniform(0.95, 1.05)

        num_drafts = choice.num_draft_tokens
        if not num_drafts:
            verify, rtt = choice.credit_tokens * jitter(self.verify_ms), jitter(self.rtt_ms)
            return RoundReport(choice=choice, num_committed=choice.credit_tokens, verify_ms=verify,
                               verify_network_ms=rtt, round_ms=verify + rtt)  # fmt: skip
        num_accepted = 0
        while num_accepted < num_drafts and self.rng.random() < (right if is_local else self.accept):
            num_accepted += 1
        draft, draft_rtt = (0.0, 0.0) if is_local else (jitter(self.draft_ms) * num_drafts, jitter(self.rtt_ms))
        verify, rtt = jitter(self.verify_ms + self.row_ms * num_drafts), jitter(self.rtt_ms)
        return RoundReport(
            choice=choice, is_local=is_local, num_draft_tokens=num_drafts, num_local=num_drafts if is_local else 0,
            num_accepted=num_accepted, num_committed=num_accepted + 1, draft_ms=draft, draft_network_ms=draft_rtt,
            verify_ms=verify, verify_network_ms=rtt, round_ms=draft + verify + draft_rtt + rtt,
        )  # fmt: skip


WORLDS = {
    "both help": World(),
    "the model is good": World(accept=0.9, draft_ms=0.5),
    "the model is dear": World(draft_ms=30.0),
    "much is copied": World(good=(0.8, 0.95), accept=0.5),
    "rows are dear": World(row_ms=6.0, draft_ms=3.0),
    "guesses look good and are not": World(good=(0.7, 0.02), bad=(0.3, 0.02)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_merger_is_no_slower_than_the_best_of_its_parts(name: str) -> None:
    world, num_tokens = WORLDS[name], scaled(20_000, at_least=8_000)
    plain = world.run(num_tokens, model=False, local=False)
    alone = world.run(num_tokens, model=True, local=False)
    guessing = world.run(num_tokens, model=False, local=True)
    merged = world.run(num_tokens, model=True, local=True)
    assert guessing <= 1.03 * plain
    assert merged <= 1.06 * min(plain, alone, guessing)
    if name == "both help":
        assert merged < 0.93 * min(plain, alone, guessing), "each part has rounds that the other has not"
