"""Trees of drafters inside the target through the round loop: the joint law by enumeration, of shapes that are asked
for, that follow what was accepted, or that are extreme."""

from __future__ import annotations

import random

import asking_workers
import pytest
from asking_workers import Pair, head_trees
from conftest import scaled
from loop_law import World, total_variation, warm_policy

from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from outrider.drafting.grown_tree import GrownTree, planned
from outrider.drafting.tree import PREFIX
from outrider.sampling.params import AcceptanceRule

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12
KINDS = ("eagle", "medusa")


def candidates(kind: str) -> tuple[Candidate, Candidate]:
    """A head's chains and its trees."""
    return Candidate(kind, on_target=True), Candidate(f"{kind}-tree", on_target=True, max_width=4, trunk=kind)


def check(world: World) -> None:
    assert total_variation(world.law(), world.target_law()) < EXACT


@pytest.mark.parametrize("shape", [(-1, -1), (-1, 0, -1, 1), (-1, -1, 1), (-1, -1, -1, 0)], ids=str)
def test_what_is_drawn_of_a_shape_has_the_law_that_it_says(shape: tuple[int, ...]) -> None:
    """The chances of all drawings sum to 1, and q of each token is its chance given those drawn before it."""
    for seed in range(scaled(10, at_least=2)):
        pair = Pair(3, seed)
        drawn = head_trees(pair, (0, 1), shape, "eagle", AcceptanceRule.TOKEN)
        assert sum(mass for _, mass in drawn) == pytest.approx(1, abs=1e-12)
        for proposal, mass in drawn:
            product = 1.0
            for index, token_id in enumerate(proposal.token_ids):
                q = proposal.q_at(index)
                assert q is not None
                product *= q.probability(token_id)
            assert mass == pytest.approx(product, rel=1e-12)
        ((_, certain),) = head_trees(pair, (0, 1), shape, "medusa", AcceptanceRule.TOKEN)
        assert certain == 1.0


class Shapes(FixedGamma):
    """The shape of each round hangs on the last row of the one before, on or off the path that stood."""

    def __init__(self, tree: Candidate, seed: int) -> None:
        super().__init__(3)
        self._tree, self._seed, self._last = tree, seed, b""

    def choose(self, max_draft_tokens: int, max_credit_tokens: int, candidates: object, guesses: object = ()) -> Choice:
        if max_draft_tokens < 1:
            return Choice("", 0, "no-room", max_credit_tokens)
        rng = random.Random(f"{self._seed} {self._last[-1:].hex()}")
        shape = tuple(rng.randrange(PREFIX, index) for index in range(min(max_draft_tokens, rng.choice([1, 2, 3]))))
        credit = min(max_credit_tokens, rng.choice([2, 4]))
        return Choice(self._tree.name, len(shape), "fixed", credit, self._tree, shape=shape)

    def observe(self, report: RoundReport) -> None:
        self._last = report.soft_acceptances


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_any_shape_and_one_that_follows_rows_past_a_rejection(rule: AcceptanceRule, kind: str) -> None:
    num_trees = 0
    for seed in range(scaled(40, at_least=4)):
        world = World(
            Pair(2 + seed % 2, seed), rule, lambda seed=seed: Shapes(candidates(kind)[1], seed),
            num_tokens=4 - seed % 2, max_drafts=3, drafter=f"{kind}-tree", drafters=(), inside=candidates(kind)[1:],
        )  # fmt: skip
        check(world)
        num_trees += world.num_trees
    assert num_trees > 0, "INCONCLUSIVE: no trees were drawn"


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_that_is_ranked_again_after_it_was_drawn_is_found_out(
    rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What EAGLE-2 does with certain drafts: of the sampled ones only the likeliest are kept."""

    def ranked(grown: GrownTree, *arguments: object) -> list[int]:
        order = planned(grown, *arguments)  # type: ignore[arg-type]
        return sorted(order, key=lambda node: -grown.nodes[node].child.probability)[:1]

    monkeypatch.setattr(asking_workers, "planned", ranked)
    found = 0.0
    for seed in range(3):
        world = World(
            Pair(2, seed), rule, lambda: FixedGamma(2), num_tokens=4, drafter="eagle-tree", fixed=2, drafters=(),
            inside=candidates("eagle")[1:],
        )  # fmt: skip
        found = max(found, total_variation(world.law(), world.target_law()))
    assert found > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_fixed_number_of_drafts(rule: AcceptanceRule, kind: str) -> None:
    num_trees = 0
    for seed in range(scaled(10, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: FixedGamma(3), num_tokens=4, max_drafts=3, drafter=f"{kind}-tree", fixed=3,
            drafters=(), inside=candidates(kind)[1:],
        )  # fmt: skip
        check(world)
        num_trees += world.num_trees
    assert num_trees > 0, "INCONCLUSIVE: no trees were drawn"


def weighed(kind: str, level_ms: float) -> GammaPolicy:
    """Costs of a model, plain runs, and a head each level of which takes so long, for chains and trees alike."""
    policy = warm_policy(draft_ms=8.0, row_ms=0.05, accept=1, cap=3)
    for candidate in candidates(kind):
        shape = (-1, 0, -1) if candidate.trunk else ()
        draft_ms = level_ms * (2 if shape else 3)
        for _ in range(4):
            policy.observe(
                RoundReport(
                    choice=Choice(candidate.name, 3, "best", 8, candidate, shape=shape), num_draft_tokens=3,
                    num_accepted=1, num_committed=2, parents=shape, draft_ms=draft_ms, verify_ms=10.15,
                    round_ms=draft_ms + 10.15,
                )
            )  # fmt: skip
    return policy


@pytest.mark.parametrize("level_ms", [0.1, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_chosen_round_by_round_among_chains_trees_model_and_plain(
    rule: AcceptanceRule, kind: str, level_ms: float
) -> None:
    num_trees = 0
    for seed in range(scaled(8, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: weighed(kind, level_ms), num_tokens=4, max_drafts=3, inside=candidates(kind),
            prompt=(0, 1),
        )  # fmt: skip
        check(world)
        num_trees += world.num_trees
    assert num_trees > 0 or level_ms < 1, "INCONCLUSIVE: no trees were drawn"
