"""Drafters inside the target through the round loop: the joint law by enumeration, alone and in every merger."""

from __future__ import annotations

import random

import pytest
from asking_workers import Pair
from conftest import scaled
from loop_law import MODEL, World, total_variation, warm_policy

from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from outrider.sampling.params import AcceptanceRule

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12
HEAD = Candidate("head", on_target=True)


def check(world: World) -> None:
    assert total_variation(world.law(), world.target_law()) < EXACT


def past(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2) for _ in range(12)) for _ in range(3)]


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_inside_the_target_alone(rule: AcceptanceRule) -> None:
    num_used = 0
    for seed in range(scaled(30, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: FixedGamma(2), num_tokens=4, drafter="head", fixed=2, drafters=(),
            inside=(HEAD,),
        )  # fmt: skip
        check(world)
        num_used += world.reasons["head", "fixed"]
    assert num_used > 0, "INCONCLUSIVE: nothing was drafted"


def weighed(head_ms: float) -> GammaPolicy:
    """Costs of a model, of plain runs, and of a head whose two drafts take so long."""
    policy = warm_policy(draft_ms=1.0, accept=1, cap=3)
    for _ in range(4):
        policy.observe(
            RoundReport(
                choice=Choice("head", 2, "best", 8, HEAD), num_draft_tokens=2, num_accepted=1, num_committed=2,
                draft_ms=head_ms, verify_ms=10.2, round_ms=head_ms + 10.2,
            )
        )  # fmt: skip
    return policy


@pytest.mark.parametrize("head_ms", [0.1, 2.2, 40.0])
@pytest.mark.parametrize("rule", RULES)
def test_chosen_round_by_round_among_model_guesses_and_plain(rule: AcceptanceRule, head_ms: float) -> None:
    """By what was accepted before and by rows past rejections: nothing that the choice sees may bias the text."""
    used: set[str] = set()
    for seed in range(scaled(16, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: weighed(head_ms), num_tokens=4, max_drafts=3, inside=(HEAD,), past=past(seed),
        )  # fmt: skip
        check(world)
        used |= {drafter for drafter, _ in world.reasons}
    assert used, "INCONCLUSIVE: nothing was drafted"
    if head_ms < 1:
        assert "head" in used


@pytest.mark.parametrize("rule", RULES)
def test_a_policy_that_follows_rows_past_a_rejection(rule: AcceptanceRule) -> None:
    """An extreme one: drafter and number of the next round hang on the last row of this one, on or off the path."""

    class FollowsRows(FixedGamma):
        def __init__(self) -> None:
            super().__init__(2)
            self._last = b""

        def choose(
            self, max_draft_tokens: int, max_credit_tokens: int, candidates: object, guesses: object = ()
        ) -> Choice:
            if max_draft_tokens < 1:
                return Choice("", 0, "no-room", max_credit_tokens)
            high = bool(self._last) and self._last[-1] > 100
            drafter = HEAD if high else MODEL
            gamma = min(max_draft_tokens, 1 + (self._last[-1:] > b"\x40"))
            return Choice(drafter.name, gamma, "fixed", min(max_credit_tokens, 3) if high else 0, drafter)

        def observe(self, report: RoundReport) -> None:
            self._last = report.soft_acceptances

    used: set[str] = set()
    for seed in range(scaled(16, at_least=2)):
        world = World(Pair(2, seed), rule, FollowsRows, num_tokens=4, max_drafts=2, inside=(HEAD,))
        check(world)
        used |= {drafter for drafter, _ in world.reasons}
    assert used == {"model", "head"}, "INCONCLUSIVE: one of the two was never used"
