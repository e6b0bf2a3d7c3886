"""Trees of a draft worker: as wide as the measured cost of rows allows, learnt from every node, and exact."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from asking_workers import FakeDraft, Ids, Pair, Weighted, candidate_of
from conftest import scaled
from loop_law import MODEL, World, total_variation, warm_policy
from test_drafters_law import siblings, tree_of

from coordinator.drafting import Drafted
from coordinator.gamma.acceptance import chances_of
from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.policy import Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.gamma.tree_acceptance import Siblings, trunk_of
from outrider.sampling.params import AcceptanceRule

CAP = 12
TREE = replace(candidate_of("tree"), max_width=4)


def play(row_ms: float, *, num_rounds: int = 300, chance: float = 0.6, second: float = 0.5) -> list[Choice]:
    """Rounds of a controller that can ask for the chain or the tree, over a model that is right so often."""
    policy, rng, choices = AdaptiveGamma(PairEstimates(), CAP), random.Random(3), []
    for _ in range(num_rounds):
        choice = policy.choose(CAP, 16, (MODEL, TREE))
        choices.append(choice)
        num_drafts = choice.num_draft_tokens
        if not num_drafts:
            ms = 10.0 * choice.credit_tokens
            policy.observe(RoundReport(choice=choice, num_committed=choice.credit_tokens, verify_ms=ms, round_ms=ms))
            continue
        width = max(1, choice.tree_width)
        levels = num_drafts // width
        parents = tuple(width * (level - 1) if level else -1 for level in range(levels) for _ in range(width))
        right = [[rng.random() < (second if t else chance) for t in range(width)] for _ in range(levels)]
        num_accepted = 0
        for level in right:
            num_accepted += any(level)
            if not level[0]:
                break
        draft_ms, verify_ms = 1.0 * levels, 10.0 + row_ms * num_drafts
        policy.observe(
            RoundReport(
                choice=choice, num_draft_tokens=num_drafts, num_accepted=num_accepted, num_committed=num_accepted + 1,
                soft_acceptances=bytes(255 * hit for level in right for hit in level),
                parents=parents if width > 1 else (), draft_ms=draft_ms, verify_ms=verify_ms,
                round_ms=draft_ms + verify_ms,
            )
        )  # fmt: skip
    return choices


def share_of_trees(choices: list[Choice]) -> float:
    drafted = [choice for choice in choices[50:] if choice.num_draft_tokens]
    return sum(choice.tree_width > 1 for choice in drafted) / max(1, len(drafted))


def test_costs_like_a_processors_give_chains_and_flat_ones_give_trees() -> None:
    flat = play(0.02)
    assert share_of_trees(flat) > 0.9
    assert max(choice.tree_width for choice in flat) > 2, "siblings that are right so often are worth more rows"
    assert share_of_trees(play(2.5)) < 0.1


def test_siblings_that_are_never_right_are_dropped_though_rows_are_cheap() -> None:
    assert share_of_trees(play(0.05, num_rounds=600, second=0.0)[200:]) < 0.2


def test_what_a_tree_tells_of_its_chain_and_of_its_siblings() -> None:
    parents = (-1, -1, 0, 0, 2, 2)
    assert trunk_of(parents) == [0, 2, 4]
    report = RoundReport(
        choice=Choice("tree", 6, "best", candidate=TREE, tree_width=2), num_draft_tokens=6, num_accepted=2,
        num_committed=3, soft_acceptances=bytes([255, 0, 0, 255, 51, 102]), parents=parents,
    )  # fmt: skip
    assert chances_of(report) == ([1.0, 0.0, 0.2], 2)
    seen = Siblings()
    before = seen.chance(1)
    for _ in range(400):
        seen.observe(report)
    assert before != pytest.approx(seen.chance(1))
    assert seen.chance(1) == pytest.approx((0 + 1 + 0.4) / 3, abs=0.02)
    assert seen.chance(2) == pytest.approx(Siblings().chance(2)), "no third guess was seen"
    wide, narrow = (seen.expected_tokens([0.5, 0.5], width) for width in (2, 1))
    assert narrow == [1.0, 1.5, 1.75]
    assert wide[1] == pytest.approx(1.5 + 0.5 * seen.chance(1))


class Trunk(FakeDraft):
    """The shipped tree drafter's shape: siblings at each level, the first of which goes on."""

    width = 2
    widths: ClassVar[set[int]] = set()

    async def propose(self, choice: Choice) -> Drafted:
        self.width = max(1, choice.tree_width) if choice.drafter == "tree" else 1
        self.widths.add(self.width)
        return await super().propose(choice)

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        found: list[tuple[tuple[Any, ...], list[Any], int, Ids, float]] = [((), [], -1, prefix, 1.0)]
        for level in range(0, num_tokens, self.width):
            found = [
                ((*parents, *(trunk,) * len(more)), [*drawn, *more], len(drawn), (*text, more[0][0]), mass * chance)
                for parents, drawn, trunk, text, mass in found
                for more, chance in siblings(self.pair.q(text), min(self.width, num_tokens - level))
            ]
        return [(tree_of(parents, drawn), mass) for parents, drawn, _, _, mass in found]


@pytest.mark.parametrize("row_ms", [0.0, 1.0])
@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_joint_law_when_the_shape_follows_what_was_accepted(rule: AcceptanceRule, row_ms: float) -> None:
    Trunk.widths.clear()
    for seed in range(scaled(16, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: warm_policy(draft_ms=6.0, row_ms=row_ms, cap=4), num_tokens=4, max_drafts=4,
            drafters=("model", "tree"), make_draft=Trunk, prompt=(0, 1),
        )  # fmt: skip
        assert total_variation(world.law(), world.target_law()) < 1e-12
    assert Trunk.widths, "INCONCLUSIVE: nothing was drafted"
    assert row_ms or max(Trunk.widths) > 1, "INCONCLUSIVE: no tree was drafted"
