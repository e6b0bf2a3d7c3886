"""One round of speculation, enumerated: the exact law of the emitted tokens, by drafts, coins and corrections.

The machinery is generic over numbers (float64 arrays or fractions) and over the rule, so that the shipped functions,
their rational twin and deliberately biased twins all go through the same enumeration.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from outrider.drafting.proposal import Q_TOTAL
from outrider.sampling import AcceptanceRule
from target_worker.acceptance import DraftQ, acceptances, correction, count_accepted

Vector = Sequence[Any]
Text = tuple[int, ...]
Outcomes = Callable[[Sequence[Vector], Sequence[Vector], Text], Iterator[tuple[Any, int, Vector]]]
"""(p rows after 0..γ drafts, q rows, drafts) -> (probability, drafts that stand, law of the token after them)."""


@dataclass(frozen=True)
class Tree:
    """p and q after every text shorter than γ + 1 (q: γ), as fractions; every q is in units of 1/65,536."""

    vocab_size: int
    gamma: int
    p: dict[Text, list[Fraction]]
    q: dict[Text, list[Fraction]]

    def floats(self) -> Tree:
        """The same, rounded to float64 (the q's exactly)."""
        return Tree(
            self.vocab_size,
            self.gamma,
            {text: np.array([float(x) for x in row]) for text, row in self.p.items()},
            {text: np.array([float(x) for x in row]) for text, row in self.q.items()},
        )


def tree(seed: int, gamma: int, *, vocab_size: int = 5, kind: str = "mixed") -> Tree:
    """p and q at each node of one kind, or of a kind drawn anew at each node ("mixed")."""
    rng = random.Random(f"{seed} {gamma} {kind}")
    p, q = {}, {}
    for length in range(gamma + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            p[text], q_here = _node(rng, vocab_size, rng.choice(KINDS) if kind == "mixed" else kind)
            if length < gamma:
                q[text] = q_here
    return Tree(vocab_size, gamma, p, q)


KINDS = ("random", "equal", "disjoint", "one_hot_p", "one_hot_q", "one_hot_both", "zeros", "nearly_equal", "skewed")


def _node(rng: random.Random, vocab_size: int, kind: str) -> tuple[list[Fraction], list[Fraction]]:
    ids = list(range(vocab_size))
    rng.shuffle(ids)
    half = vocab_size // 2
    q = _counts(rng, vocab_size, ids)
    p = _random(rng, vocab_size, ids)
    if kind == "equal":
        p = q
    elif kind == "disjoint":
        p, q = _random(rng, vocab_size, ids[:half]), _counts(rng, vocab_size, ids[half:])
    elif kind == "one_hot_p":
        p = _random(rng, vocab_size, ids[:1])
    elif kind == "one_hot_q":
        q = _counts(rng, vocab_size, ids[:1])
    elif kind == "one_hot_both":
        p, q = _random(rng, vocab_size, ids[:1]), _counts(rng, vocab_size, [rng.choice(ids)])
    elif kind == "zeros":
        p, q = _random(rng, vocab_size, ids[:-half]), _counts(rng, vocab_size, ids[half - 1 :])
    elif kind == "nearly_equal":
        p = list(q)
        p[ids[0]] += Fraction(1, 2**40) * p[ids[1]]
        p[ids[1]] *= 1 - Fraction(1, 2**40)
    elif kind == "skewed":
        p = [Fraction(1, 10**9 * vocab_size) + (1 - Fraction(1, 10**9)) * (x == ids[0]) for x in range(vocab_size)]
    return p, q


def _random(rng: random.Random, vocab_size: int, ids: Sequence[int]) -> list[Fraction]:
    weights = {x: rng.randint(1, 30) for x in ids}
    return [Fraction(weights.get(x, 0), sum(weights.values())) for x in range(vocab_size)]


def _counts(rng: random.Random, vocab_size: int, ids: Sequence[int]) -> list[Fraction]:
    cuts = sorted(rng.sample(range(1, Q_TOTAL), len(ids) - 1))
    sizes = dict(zip(ids, (b - a for a, b in itertools.pairwise([0, *cuts, Q_TOTAL])), strict=True))
    return [Fraction(sizes.get(x, 0), Q_TOTAL) for x in range(vocab_size)]


def law_of_round(nodes: Tree, outcomes: Outcomes, *, told: Tree | None = None) -> dict[Text, Any]:
    """P(first γ + 1 tokens): what a round emits, continued by plain sampling from p.

    Drafts come from `nodes.q`; the rule is told `told.q` (the same unless a twin lies).
    """
    emitted: dict[Text, Any] = defaultdict(int)
    for drafts, path, p, q in _paths(nodes, told or nodes):
        for probability, stand, last in outcomes(p, q, drafts):
            for x in range(nodes.vocab_size):
                if last[x]:
                    emitted[(*drafts[:stand], x)] += path * probability * last[x]
    law: dict[Text, Any] = {(): 0}
    for _ in range(nodes.gamma + 1):
        law = {
            (*text, x): begun * nodes.p[text][x] + emitted.get((*text, x), 0)
            for text, begun in law.items()
            for x in range(nodes.vocab_size)
        }
    return law


def expected_accepted(nodes: Tree, outcomes: Outcomes) -> Any:
    """E[drafts that stand] of a round."""
    return sum(
        path * probability * stand
        for drafts, path, p, q in _paths(nodes, nodes)
        for probability, stand, _ in outcomes(p, q, drafts)
    )


def _paths(nodes: Tree, told: Tree) -> Iterator[tuple[Text, Any, list[Vector], list[Vector]]]:
    for drafts in itertools.product(range(nodes.vocab_size), repeat=nodes.gamma):
        path: Any = 1
        for index, x in enumerate(drafts):
            path = path * nodes.q[drafts[:index]][x]
        if path:
            yield (
                drafts,
                path,
                [nodes.p[drafts[:index]] for index in range(nodes.gamma + 1)],
                [told.q[drafts[:index]] for index in range(nodes.gamma)],
            )


def target_law(nodes: Tree) -> dict[Text, Any]:
    """P(first γ + 1 tokens) of p alone."""
    law: dict[Text, Any] = {(): 1}
    for _ in range(nodes.gamma + 1):
        law = {(*t, x): mass * nodes.p[t][x] for t, mass in law.items() for x in range(nodes.vocab_size)}
    return law


def total_variation(a: dict[Text, Any], b: dict[Text, Any]) -> Any:
    assert a.keys() == b.keys()
    return sum(abs(a[text] - b[text]) for text in a) / 2


def draft_q(row: Vector) -> DraftQ:
    """A dense q as the shipped functions take it: only ids with mass."""
    (ids,) = np.nonzero(row)
    return DraftQ(ids, np.asarray(row)[ids])


def patterns(chances: Sequence[Any]) -> Iterator[tuple[Any, list[bool]]]:
    """Every possible result of independent coins, with its probability."""
    for coins in itertools.product([True, False], repeat=len(chances)):
        probability: Any = 1
        for success, chance in zip(coins, chances, strict=True):
            probability = probability * (chance if success else 1 - chance)
        if probability:
            yield probability, list(coins)


def shipped(rule: AcceptanceRule) -> Outcomes:
    """The functions that `verify` runs on."""

    def outcomes(p: Sequence[Vector], q: Sequence[Vector], drafts: Text) -> Iterator[tuple[Any, int, Vector]]:
        sparse = [draft_q(row) for row in q]
        chances, scales = acceptances(rule, p[:-1], sparse, drafts)
        for probability, coins in patterns(chances):
            stand = count_accepted(rule, coins)
            last = p[stand] if stand == len(drafts) else correction(p[stand], sparse[stand], scales[stand])
            yield probability, stand, last / last.sum()

    return outcomes


def rational_token(p: Sequence[Vector], q: Sequence[Vector], drafts: Text) -> Iterator[tuple[Any, int, Vector]]:
    """TOKEN, written from the paper: Leviathan et al. 2023, algorithm 1."""
    reached = Fraction(1)
    for index, x in enumerate(drafts):
        chance = min(Fraction(1), p[index][x] / q[index][x])
        if chance < 1:
            yield reached * (1 - chance), index, _normalised(rational_residual(p[index], q[index], Fraction(1)))
        reached *= chance
    if reached:
        yield reached, len(drafts), p[len(drafts)]


def rational_block(p: Sequence[Vector], q: Sequence[Vector], drafts: Text) -> Iterator[tuple[Any, int, Vector]]:
    """BLOCK, written from the paper: Sun et al. 2025, algorithm 2. Walks back from the last draft to a success."""
    joint, chances = block_chances(p, q, drafts)
    all_later_failed = Fraction(1)
    for stand in range(len(drafts), -1, -1):
        chance = chances[stand]
        if all_later_failed * chance:
            last = p[stand] if stand == len(drafts) else rational_residual(p[stand], q[stand], joint[stand])
            yield all_later_failed * chance, stand, _normalised(last)
        all_later_failed *= 1 - chance


def block_chances(p: Sequence[Vector], q: Sequence[Vector], drafts: Text) -> tuple[list[Fraction], list[Fraction]]:
    """(P_0..P_γ, h_0..h_γ) with h_0 = 1: no coin is thrown for standing nowhere."""
    joint = [Fraction(1)]
    for index, x in enumerate(drafts):
        joint.append(min(Fraction(1), joint[-1] * p[index][x] / q[index][x]))
    chances = [Fraction(1)]
    for index in range(1, len(drafts)):
        surplus = sum(rational_residual(p[index], q[index], joint[index]))
        below = surplus + 1 - joint[index]
        chances.append(surplus / below if below else Fraction(1))
    return joint, chances + joint[-1:] if drafts else chances


def rational_residual(p: Vector, q: Vector, scale: Fraction) -> list[Fraction]:
    return [max(scale * p_x - q_x, Fraction(0)) for p_x, q_x in zip(p, q, strict=True)]


def _normalised(row: Vector) -> Vector:
    total = sum(row)
    return [x / total for x in row]


RATIONAL = {AcceptanceRule.TOKEN: rational_token, AcceptanceRule.BLOCK: rational_block}
