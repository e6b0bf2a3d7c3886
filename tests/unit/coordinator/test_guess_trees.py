"""Local guesses that disagree: a tree where rows are cheap, a chain where they cost, and the law in both."""

from __future__ import annotations

import random

import pytest
from asking_workers import Pair
from conftest import scaled
from loop_law import World, total_variation, warm_policy

from coordinator.gamma.policy import Choice
from outrider.drafting.guess import OWN, Evidence, Guess
from outrider.sampling.params import AcceptanceRule

SURE = Evidence(OWN, 16, 3)


def guess(name: str, token_ids: tuple[int, ...], chance: float) -> Guess:
    return Guess(name, token_ids, (SURE,) * len(token_ids), (chance,) * len(token_ids))


GUESSES = (guess("lookup", (1, 2, 3), 0.8), guess("suffix", (4, 5, 6), 0.15))


def choice(row_ms: float) -> Choice:
    return warm_policy(draft_ms=30.0, row_ms=row_ms, cap=8).choose(8, 64, (), GUESSES)


def test_flat_verify_costs_give_a_tree_and_a_processors_give_a_chain() -> None:
    wide = choice(0.0)
    assert wide.tree is not None
    assert (wide.drafter, wide.reason) == ("lookup+suffix", "match")
    assert wide.num_draft_tokens == len(wide.tree) == 6
    narrow = choice(2.5)
    assert (narrow.drafter, narrow.num_draft_tokens) == ("lookup", 3)
    assert narrow.tree is None
    assert choice(20.0).num_draft_tokens == 0


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_joint_law_with_trees_of_guesses(rule: AcceptanceRule) -> None:
    num_used = 0
    for seed in range(scaled(40, at_least=6)):
        rng = random.Random(seed)
        world = World(
            Pair(3, seed), rule, lambda: warm_policy(draft_ms=30.0, row_ms=0.0, cap=4), num_tokens=4, max_drafts=4,
            prompt=(0, 1, 2, 0, 1, 0, 0, 1), past=[tuple(rng.randrange(3) for _ in range(14)) for _ in range(6)],
            drafters=(),
        )  # fmt: skip
        assert total_variation(world.law(), world.target_law()) < 1e-12
        num_used += sum(count for (drafter, _), count in world.reasons.items() if "+" in drafter)
    assert num_used > 0, "INCONCLUSIVE: no two guesses were verified together"
