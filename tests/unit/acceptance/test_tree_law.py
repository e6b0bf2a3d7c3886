"""Trees, decision by decision: the shipped rule and a rational twin against the target's own law, and biased twins."""

import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import round_law
from conftest import scaled
from round_law import KINDS, Tree, target_law, total_variation
from tree_law import (
    ONE_HOT,
    OTHER,
    RATIONAL,
    WITH,
    WITHOUT,
    Drafting,
    Drawn,
    expected_accepted,
    fixed,
    law_of_round,
    random_drafting,
    rational_token,
    shipped,
)

from outrider.drafting import tree
from outrider.sampling import AcceptanceRule
from target_worker import tree_acceptance

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
TOLERANCE = 1e-12

SHAPES = [
    (seed, gamma, num_nodes, kind)
    for gamma in (1, 2, 3)
    for num_nodes in (2, 3, 4, 5)
    for kind in ("mixed", *KINDS)
    for seed in range(scaled(20) if kind == "mixed" else 1)
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("seed", "gamma", "num_nodes", "kind"), SHAPES)
def test_random_trees_have_the_targets_law(
    rule: AcceptanceRule, seed: int, gamma: int, num_nodes: int, kind: str
) -> None:
    """Sampled with and without replacement, one-hot, and mixed among siblings: shipped in floats, twin exactly."""
    nodes, drafting = round_law.tree(seed, gamma, vocab_size=3, kind=kind), random_drafting(seed, gamma, num_nodes)
    assert total_variation(law_of_round(nodes, drafting, RATIONAL[rule]), target_law(nodes)) == 0
    floats = nodes.floats()
    assert total_variation(law_of_round(floats, drafting, shipped(rule)), target_law(floats)) <= TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [WITH, WITHOUT, ONE_HOT])
@pytest.mark.parametrize("vocab_size", [4, 5])
def test_larger_vocabularies(rule: AcceptanceRule, kind: str, vocab_size: int) -> None:
    nodes = round_law.tree(3, 2, vocab_size=vocab_size, kind="random")
    drafting = fixed((-1, -1, 0, 0), (kind,) * 4)
    assert total_variation(law_of_round(nodes, drafting, RATIONAL[rule]), target_law(nodes)) == 0
    floats = nodes.floats()
    assert total_variation(law_of_round(floats, drafting, shipped(rule)), target_law(floats)) <= TOLERANCE
    accepted = expected_accepted(nodes, drafting, RATIONAL[rule])
    assert expected_accepted(floats, drafting, shipped(rule)) == pytest.approx(float(accepted), abs=TOLERANCE)


def whimsical(seed: int, gamma: int, num_nodes: int) -> Drafting:
    """The shape follows the tokens: where to go on, how and whether at all is read from everything drawn before."""

    def drafting(drawn: Drawn) -> tuple[int, str] | None:
        digest = hashlib.blake2b(f"{seed} {drawn.parents} {drawn.drafts}".encode()).digest()
        if len(drawn.drafts) == num_nodes or (drawn.drafts and digest[0] < 40):
            return None
        open_nodes = [i for i in range(-1, len(drawn.drafts)) if len(tree.path(drawn.parents, i)) < gamma]
        parent = open_nodes[digest[1] % len(open_nodes)]
        kinds = {drawn.kinds[i] for i in drawn.siblings(parent)} - {ONE_HOT}
        return parent, ONE_HOT if digest[2] < 80 else (kinds.pop() if kinds else (WITH, WITHOUT)[digest[3] % 2])

    return drafting


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(scaled(60, at_least=8)))
def test_a_shape_that_follows_earlier_tokens_is_exact(rule: AcceptanceRule, seed: int) -> None:
    nodes = round_law.tree(seed, 2 + seed % 2, vocab_size=3)
    drafting = whimsical(seed, nodes.gamma, 4)
    assert total_variation(law_of_round(nodes, drafting, RATIONAL[rule]), target_law(nodes)) == 0
    floats = nodes.floats()
    assert total_variation(law_of_round(floats, drafting, shipped(rule)), target_law(floats)) <= TOLERANCE


def test_block_accepts_more_than_token_on_the_whole() -> None:
    """Not on every tree, as on every chain: a child that fails leaves its siblings less than TOKEN would."""
    accepted = []
    for seed in range(scaled(600, at_least=120)):
        nodes = round_law.tree(seed, 2 + seed % 2, vocab_size=3, kind=("mixed", "random", "zeros")[seed % 3]).floats()
        drafting = random_drafting(seed, nodes.gamma, 3 + seed % 2)
        accepted.append([expected_accepted(nodes, drafting, shipped(rule)) for rule in RULES])
    token, block = np.sum(accepted, axis=0)
    assert block > 1.01 * token
    nodes, drafting = round_law.tree(10_637, 3, vocab_size=3, kind="random"), random_drafting(10_637, 3, 4)
    token, block = (expected_accepted(nodes, drafting, RATIONAL[rule]) for rule in RULES)
    assert token - 0.1 < block < token


def test_block_gains_over_token_on_a_binary_tree() -> None:
    nodes = round_law.tree(0, 2, vocab_size=4, kind="random").floats()
    for kind in (WITH, WITHOUT):
        drafting = fixed((-1, -1, 0, 0, 1), (kind,) * 5)
        token, block = (expected_accepted(nodes, drafting, shipped(rule)) for rule in RULES)
        assert block > token + 1e-3


def test_more_siblings_accept_more_and_without_replacement_most() -> None:
    nodes = round_law.tree(0, 1, vocab_size=5, kind="random").floats()
    accepted = {
        (kind, width): expected_accepted(nodes, fixed((-1,) * width, (kind,) * width), shipped(AcceptanceRule.TOKEN))
        for kind in (WITH, WITHOUT)
        for width in (1, 2, 3)
    }
    for width in (2, 3):
        assert accepted[WITH, width] > accepted[WITH, width - 1] + 1e-3
        assert accepted[WITHOUT, width] > accepted[WITH, width] + 1e-3


# Shortcuts that come to mind, and were shipped elsewhere. The enumeration must see each of them. The first six choose
# or describe sampled drafts after looking at them.

Lie = Callable[[Tree, Drawn], Drawn]
"""What the verifier is told of a tree that was drawn."""


def _kept(drawn: Drawn, indices: list[int], q: list[Any] | None = None) -> Drawn:
    """Root children only."""
    rows = [drawn.q[i] for i in indices] if q is None else q
    return Drawn((-1,) * len(indices), tuple(drawn.drafts[i] for i in indices), tuple(rows))


def _without(row: Any, taken: list[int]) -> Any:
    left = np.array(row, dtype=float)
    left[taken] = 0.0
    return left / left.sum()


def in_confidence_order(nodes: Tree, drawn: Drawn) -> Drawn:
    order = sorted(range(len(drawn.drafts)), key=lambda i: -nodes.q[()][drawn.drafts[i]])
    tokens = [drawn.drafts[i] for i in order]
    return _kept(drawn, order, [_without(nodes.q[()], tokens[:i]) for i in range(len(tokens))])


def keeps_the_best_two(nodes: Tree, drawn: Drawn) -> Drawn:
    best = sorted(range(len(drawn.drafts)), key=lambda i: -nodes.q[()][drawn.drafts[i]])[:2]
    tokens = [drawn.drafts[i] for i in sorted(best)]
    return _kept(drawn, sorted(best), [_without(nodes.q[()], tokens[:i]) for i in range(len(tokens))])


def unconditional_q(nodes: Tree, drawn: Drawn) -> Drawn:
    return _kept(drawn, list(range(len(drawn.drafts))), [nodes.q[()]] * len(drawn.drafts))


def drops_the_unlikely(nodes: Tree, drawn: Drawn) -> Drawn:
    return drawn if nodes.q[()][drawn.drafts[0]] >= 0.2 else Drawn()


def higher_q_of_two(nodes: Tree, drawn: Drawn) -> Drawn:
    """Two drafters propose one token each; the one that was surer is used."""
    best = max(range(2), key=lambda i: drawn.q[i][drawn.drafts[i]])
    return _kept(drawn, [best])


def skips_a_duplicate(nodes: Tree, drawn: Drawn) -> Drawn:
    return drawn if drawn.drafts[0] != drawn.drafts[1] else _kept(drawn, [0])


SELECTIONS: dict[str, tuple[Lie, list[str]]] = {
    "in_confidence_order": (in_confidence_order, [WITHOUT] * 3),
    "keeps_the_best_two": (keeps_the_best_two, [WITHOUT] * 3),
    "unconditional_q": (unconditional_q, [WITHOUT] * 2),
    "drops_the_unlikely": (drops_the_unlikely, [WITHOUT]),
    "higher_q_of_two": (higher_q_of_two, [OTHER, WITH]),
    "skips_a_duplicate": (skips_a_duplicate, [ONE_HOT, WITH]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shortcut", SELECTIONS)
def test_a_selection_among_sampled_drafts_is_caught(rule: AcceptanceRule, shortcut: str) -> None:
    lie, kinds = SELECTIONS[shortcut]
    nodes = round_law.tree(1, 1, vocab_size=5, kind="random").floats()
    drafting = fixed((-1,) * len(kinds), kinds)
    honest = law_of_round(nodes, drafting, shipped(rule))
    assert total_variation(honest, target_law(nodes)) <= TOLERANCE
    biased = law_of_round(nodes, drafting, shipped(rule), told=lambda drawn: lie(nodes, drawn))
    assert total_variation(biased, target_law(nodes)) > 0.01


def prunes_by_what_came_after(nodes: Tree, drawn: Drawn) -> Drawn:
    """Keeps the root's first child only when a likely token was drawn below it: re-ranking of whole paths."""
    below = drawn.drafts[1]
    if nodes.q[drawn.drafts[:1]][below] >= 0.25:
        return drawn
    return Drawn((-1,), (drawn.drafts[2],), (drawn.q[2],))


@pytest.mark.parametrize("rule", RULES)
def test_a_re_rank_of_sampled_paths_is_caught(rule: AcceptanceRule) -> None:
    nodes = round_law.tree(1, 2, vocab_size=4, kind="random").floats()
    drafting = fixed((-1, 0, -1), (WITHOUT,) * 3)
    biased = law_of_round(nodes, drafting, shipped(rule), told=lambda drawn: prunes_by_what_came_after(nodes, drawn))
    assert total_variation(biased, target_law(nodes)) > 0.01


def _token_against_p(drawn: Drawn, p: dict[int, Any]) -> Iterator:
    """Every sibling against p itself, as if no other had been tried."""
    children = tree.children(drawn.parents)

    def walk(node: int, reached: Any) -> Iterator:
        left = p[node]
        for child in children[node + 1]:
            x, q = drawn.drafts[child], drawn.q[child]
            chance = min(Fraction(1), p[node][x] / q[x])
            yield from walk(child, reached * chance)
            reached = reached * (1 - chance)
            residual = round_law.rational_residual(left, q, Fraction(1))
            left = [r / sum(residual) for r in residual] if sum(residual) else left
        yield reached, node, left

    yield from walk(-1, Fraction(1))


def _token_last_residual_only(drawn: Drawn, p: dict[int, Any]) -> Iterator:
    """Corrects against p less the last sibling's q only."""
    children = tree.children(drawn.parents)
    for probability, node, last in rational_token(drawn, p):
        tried = children[node + 1]
        residual = round_law.rational_residual(p[node], drawn.q[tried[-1]], Fraction(1)) if tried else last
        yield probability, node, [r / sum(residual) for r in residual] if sum(residual) else last


def _a_target_draw_per_candidate(drawn: Drawn, p: dict[int, Any]) -> Iterator:
    """Match, but the target draws anew for each candidate instead of once after each prefix."""
    children = tree.children(drawn.parents)

    def walk(node: int, reached: Any) -> Iterator:
        for child in children[node + 1]:
            chance = p[node][drawn.drafts[child]]
            yield from walk(child, reached * chance)
            reached = reached * (1 - chance)
        yield reached, node, p[node]

    yield from walk(-1, Fraction(1))


TWINS = {
    "token_against_p": (_token_against_p, WITHOUT),
    "token_last_residual_only": (_token_last_residual_only, WITHOUT),
    "a_target_draw_per_candidate": (_a_target_draw_per_candidate, ONE_HOT),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_biased_twin_is_caught(twin: str) -> None:
    outcomes, kind = TWINS[twin]
    nodes = round_law.tree(0, 2, vocab_size=4, kind="random")
    drafting = fixed((-1, -1, 0, 0), (kind,) * 4)
    assert total_variation(law_of_round(nodes, drafting, RATIONAL[AcceptanceRule.TOKEN]), target_law(nodes)) == 0
    assert total_variation(law_of_round(nodes, drafting, outcomes), target_law(nodes)) > 1e-3


class _KeepsItsChance(tree_acceptance.Left):
    """BLOCK that forgets that a child in vain makes its parent less likely to stand."""

    def without(self, q: Any) -> tree_acceptance.Left:
        return _KeepsItsChance(self.chance, super().without(q).p)

    def normalised(self) -> tree_acceptance.Left:
        return _KeepsItsChance(*super().normalised())


class _UnscaledResidual(tree_acceptance.Left):
    """BLOCK whose residual forgets the chance: max(p - q, 0)."""

    def without(self, q: Any) -> tree_acceptance.Left:
        return _UnscaledResidual(super().without(q).chance, tree_acceptance.correction(self.p, q, 1.0))

    def normalised(self) -> tree_acceptance.Left:
        return _UnscaledResidual(*super().normalised())


class _ForgetsToNormalise(tree_acceptance.Left):
    """The next sibling is tried against a residual that does not sum to 1."""

    def without(self, q: Any) -> tree_acceptance.Left:
        return _ForgetsToNormalise(*super().without(q))

    def normalised(self) -> tree_acceptance.Left:
        return self


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (_KeepsItsChance, AcceptanceRule.BLOCK),
        (_UnscaledResidual, AcceptanceRule.BLOCK),
        (_ForgetsToNormalise, AcceptanceRule.BLOCK),
        (_ForgetsToNormalise, AcceptanceRule.TOKEN),
    ],
)
def test_a_fault_in_the_shipped_step_is_caught(
    monkeypatch: pytest.MonkeyPatch, fault: type, rule: AcceptanceRule
) -> None:
    nodes = round_law.tree(0, 2, vocab_size=4, kind="random").floats()
    drafting = fixed((-1, -1, 0, 0, 1), (WITHOUT,) * 5)
    assert total_variation(law_of_round(nodes, drafting, shipped(rule)), target_law(nodes)) <= TOLERANCE
    monkeypatch.setattr(tree_acceptance, "Left", fault)
    assert total_variation(law_of_round(nodes, drafting, shipped(rule)), target_law(nodes)) > 1e-3


# Noise that is used twice.

SHARED_COINS = {
    "siblings": lambda drawn, node: drawn.parents[node],
    "branches": lambda drawn, node: (len(drawn.text(node)), drawn.siblings(drawn.parents[node]).index(node)),
    "all_of_a_depth": lambda drawn, node: len(drawn.text(node)),
}
"""Keys that leave out the try index; the branch; both."""


@pytest.mark.parametrize(
    ("shared", "rule"),
    [
        ("siblings", AcceptanceRule.TOKEN),
        ("siblings", AcceptanceRule.BLOCK),
        ("all_of_a_depth", AcceptanceRule.TOKEN),
        ("all_of_a_depth", AcceptanceRule.BLOCK),
        # TOKEN never looks into a second branch of a round
        ("branches", AcceptanceRule.BLOCK),
    ],
)
@pytest.mark.parametrize("kind", [WITH, WITHOUT, ONE_HOT])
def test_coins_thrown_twice_are_caught(shared: str, rule: AcceptanceRule, kind: str) -> None:
    nodes = round_law.tree(0, 2, vocab_size=4, kind="random").floats()
    drafting = fixed((-1, -1, 0, 0, 1), (kind,) * 5)
    assert total_variation(law_of_round(nodes, drafting, shipped(rule)), target_law(nodes)) <= TOLERANCE
    biased = law_of_round(nodes, drafting, shipped(rule, SHARED_COINS[shared]))
    assert total_variation(biased, target_law(nodes)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_siblings_that_share_the_noise_they_are_drawn_with_are_caught(rule: AcceptanceRule) -> None:
    """With replacement they are all the same token, but the rule is told that they were drawn independently."""
    nodes = round_law.tree(1, 1, vocab_size=5, kind="random").floats()

    def all_the_same(drawn: Drawn) -> Drawn:
        return Drawn(drawn.parents, drawn.drafts[:1] * 3, drawn.q)

    biased = law_of_round(nodes, fixed((-1,) * 3, (WITH,) * 3), shipped(rule), told=all_the_same)
    assert total_variation(biased, target_law(nodes)) > 0.01
