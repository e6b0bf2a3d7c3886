"""Trees inside the target by the controller: chains on costs like a processor's, trees where rows are flat, their shape
from what is told and learnt; and what a tree tells of its chain."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coordinator.gamma.acceptance import chances_of
from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.head_trees import Gain, best_shape, chances, expected_accepted, widened
from coordinator.gamma.plans import Objective
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.gamma.told import target_candidates, tell
from coordinator.gamma.tree_acceptance import Siblings
from outrider.drafting import tree
from outrider.drafting.tree_plan import RoundCost
from outrider.lm.timing import PassTiming
from outrider.server_info import TargetDrafter
from outrider.serving.worker_calls import TARGET, WorkerDescription

CAP = 12
HEAD = Candidate("head", "weights", on_target=True)
TREE = Candidate("head-tree", "weights", on_target=True, max_width=8, trunk="head")


def described(**drafter: object) -> WorkerDescription:
    line = PassTiming(
        prefill=False, min_sequences=1, max_sequences=1, base_ms=10.0, ms_per_row=1.0, ms_per_context_token=0.0,
        spread_ms=0.1, min_rows=1, max_rows=8, num_passes=100,
    )  # fmt: skip
    told = TargetDrafter(
        "head", "eagle3", "weights", draws_trees=True, first_draft_ms=2.0, next_draft_ms=1.0, **drafter
    )  # type: ignore[arg-type]
    description: WorkerDescription = object.__new__(WorkerDescription)
    for name, value in {"role": TARGET, "timings": (line,), "target_drafters": (told,)}.items():
        object.__setattr__(description, name, value)
    return description


def play(row_ms: float, *, num_rounds: int = 240, second: float = 0.5, level_ms: float = 1.0) -> list[Choice]:
    """Steps of a controller that may ask for chains or trees of a head that is right 6 times in 10, and where it is
    not, its second guess in `second` of the cases."""
    policy, rng, choices = AdaptiveGamma(PairEstimates(), CAP), random.Random(3), []
    for _ in range(num_rounds):
        choice = policy.choose(CAP, 16, (HEAD, TREE))
        choices.append(choice)
        if not choice.num_draft_tokens:
            ms = 10.0 * choice.credit_tokens
            policy.observe(RoundReport(choice=choice, num_committed=choice.credit_tokens, verify_ms=ms, round_ms=ms))
            continue
        shape = choice.shape or tree.chain_parents(choice.num_draft_tokens)
        right = [False] * len(shape)
        for siblings in tree.children(shape):
            hit = rng.random()
            for rank, node in enumerate(siblings):
                right[node] = (hit < 0.6) if rank == 0 else (rank == 1 and 0.6 <= hit < 0.6 + 0.4 * second)
        reached = 0
        for node in range(len(shape)):
            path = tree.path(shape, node)
            reached = max(reached, len(path) * all(right[i] for i in path))
        draft_ms, verify_ms = 1.0 + level_ms * max(tree.depths(shape)), 10.0 + row_ms * len(shape)
        policy.observe(
            RoundReport(
                choice=choice, num_draft_tokens=len(shape), num_accepted=reached, num_committed=reached + 1,
                soft_acceptances=bytes(255 * hit for hit in right), parents=choice.shape, draft_ms=draft_ms,
                verify_ms=verify_ms, round_ms=draft_ms + verify_ms,
            )
        )  # fmt: skip
    return choices


def share_of_trees(choices: list[Choice]) -> float:
    drafted = [choice for choice in choices[60:] if choice.num_draft_tokens]
    return sum(bool(choice.shape) for choice in drafted) / max(1, len(drafted))


def test_chains_where_rows_are_dear_and_trees_where_they_are_flat() -> None:
    flat = play(0.02)
    assert share_of_trees(flat) > 0.9
    shapes = [choice.shape for choice in flat[60:] if choice.shape]
    assert all(len(shape) <= CAP for shape in shapes)
    assert max(len(shape) - max(tree.depths(shape)) for shape in shapes) > 3, "flat rows are used"
    assert share_of_trees(play(2.5)) < 0.1
    assert share_of_trees(play(0.05, second=0.0, num_rounds=500)[200:]) < 0.25, "second guesses that are never right"


def test_a_tree_is_bounded_by_drafts_and_depth_and_is_no_chain_where_chains_can_be_asked_for() -> None:
    objective = Objective(PairEstimates())
    for cap in (2, 3, 7, 16):
        plan = objective.best_of(TREE, cap, 32, min_width=2)
        assert plan.num_draft_tokens == len(plan.shape) <= cap
        assert not tree.is_chain(plan.shape)
    shallow = replace(TREE, max_depth=2)
    assert max(tree.depths(objective.best_of(shallow, 16, 32).shape)) <= 2
    assert objective.best_of(TREE, 1, 32).shape == (-1,)
    for count in (1, 2, 5, 16):
        fixed = FixedGamma(count).choose(16, 32, (shallow,))
        assert fixed.num_draft_tokens == len(fixed.shape) <= count
        assert max(tree.depths(fixed.shape)) <= 2
        assert fixed.is_run


def test_the_least_tree_is_a_chain_with_a_second_guess_at_its_first_place() -> None:
    dear = RoundCost(10.0, 5.0, 1.0)
    chance = chances([0.9, 0.8], Siblings())
    chain = best_shape(chance, dear, max_nodes=4, max_depth=2, is_chain=True)
    assert chain == (-1, 0)
    assert best_shape(chance, dear, max_nodes=4, max_depth=2, is_chain=False) == (-1, 0, -1)
    assert widened((-1, 0), 2) == (-1, -1)
    assert widened((-1,), 1) == (-1,)
    assert widened((-1, -1, 0), 5) == (-1, -1, 0)


def test_what_a_shape_promises() -> None:
    siblings = Siblings((0.5, 0.25))
    chance = chances([0.6, 0.5], siblings)
    assert chance(1, 0) == 0.6
    assert chance(1, 1) == pytest.approx(0.4 * 0.5)
    assert chance(1, 2) == pytest.approx(0.4 * 0.5 * 0.25)
    shape = (-1, 0, -1, 0, 2)
    expected = 0.6 + 0.6 * 0.5 + 0.2 + 0.6 * (0.5 * 0.5) + 0.2 * 0.5
    assert expected_accepted(shape, chance) == pytest.approx(expected)
    gain = Gain()
    assert gain.value() == 1.0
    for _ in range(500):
        gain.observe(3, 2.0)
    assert gain.value() == pytest.approx(1.5, abs=0.05)


def report(shape: tuple[int, ...], drawn: tuple[int, ...], soft: list[float]) -> RoundReport:
    return RoundReport(
        choice=Choice("head-tree", len(shape), "best", 9, TREE, shape=shape), num_draft_tokens=len(drawn),
        num_accepted=1, num_committed=2, soft_acceptances=bytes(round(255 * x) for x in soft),
        parents=() if tree.is_chain(drawn) else drawn,
    )  # fmt: skip


def test_only_a_tree_of_the_planned_shape_tells_how_far_chains_stand() -> None:
    """One that a head drew by what it saw is deep where the head was sure: its depth would flatter chains."""
    shape = (-1, 0, -1, 1)
    assert chances_of(report(shape, shape, [1, 0, 0, 1])) == ([1.0, 0.0, 1.0], 1)
    assert chances_of(report(shape, (-1, 0, 0, 1), [1, 0, 0, 1])) == ([1.0], 1)
    assert chances_of(report(shape, (-1, 0, 1, 2), [1, 1, 1, 1])) == ([1.0], 1)
    assert chances_of(report(shape, (), [])) == ([], 1)


def test_what_a_worker_tells_of_a_head_shapes_its_first_trees() -> None:
    shared = PairEstimates()
    about = described(
        agreement=0.5, depth_agreement=(0.5, 0.4, 0.3), rank_agreement=(0.4, 0.3, 0.0), max_draft_tokens=3
    )
    chain, trees = target_candidates(about)
    assert (chain.name, trees.name, trees.trunk, trees.asked_as) == ("head", "head-tree", "head", "head")
    assert (chain.max_draft_tokens, trees.max_draft_tokens, trees.max_depth) == (3, 0, 3)
    assert chain.learnt_as == trees.learnt_as
    assert chain.costs_as != trees.costs_as
    tell(shared, about, num_context_tokens=10)
    assert shared.prior(chain).hazards(4) == pytest.approx([0.5, 0.4, 0.3, 0.3])
    siblings = shared.siblings(trees)
    assert siblings.chance(1) == pytest.approx(0.3 / 0.6)
    assert siblings.chance(2) == siblings.chance(3) == pytest.approx(0.02)
    assert shared.costs.knows(trees)
    assert shared.costs.draft_ms(trees, 3) == pytest.approx(4.0)
    assert max(tree.depths(FixedGamma(7, shared=shared).choose(9, 32, (trees,)).shape)) <= 3


def test_levels_are_what_a_tree_takes_to_draw() -> None:
    shared = PairEstimates()
    policy = AdaptiveGamma(shared, CAP)
    shape = (-1, -1, 0, 0, 2, 2)
    for _ in range(4):
        policy.observe(
            RoundReport(
                choice=Choice("head-tree", 6, "best", 9, TREE, shape=shape), num_draft_tokens=6, num_accepted=1,
                num_committed=2, soft_acceptances=bytes(6), parents=shape, draft_ms=6.0, verify_ms=10.0, round_ms=16.0,
            )
        )  # fmt: skip
    assert shared.costs.draft_ms(TREE, 3) == pytest.approx(6.0)
    assert not shared.costs.knows(HEAD), "a level of a tree is not a draft of a chain"
