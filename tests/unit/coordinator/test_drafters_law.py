"""Every kind of drafter through the coordinator's own round loop: the joint law over rounds is the target's, by
enumeration; and each shortcut that comes to mind is seen there.

Draws are those of the shipped functions. What a drafter would ask a model is asked of tables.
"""

import itertools
import random
from collections.abc import Iterator

import pytest
from asking_workers import FakeDraft, Ids, Pair, Weighted
from conftest import scaled
from loop_law import World, total_variation, warm_policy

from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Choice
from outrider.drafting.proposal import Proposal, SparseQ, check
from outrider.drafting.tree_draw import without
from outrider.sampling.params import AcceptanceRule

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12
MAX_DRAFTS = 3


def siblings(q: SparseQ, count: int, *, replacement: bool = False) -> Iterator[tuple[list[tuple[int, SparseQ]], float]]:
    """Every way to draw `count` tokens one after the other, fewer where q has no more: ((token, q) of each, mass)."""
    left: SparseQ | None = q
    if count == 0 or left is None:
        yield [], 1.0
        return
    for x in left.ids.tolist():
        rest = left if replacement else without(left, x)
        later = siblings(rest, count - 1, replacement=replacement) if rest is not None else iter([([], 1.0)])
        for drawn, mass in later:
            yield [(x, left), *drawn], left.probability(x) * mass


class Trees(FakeDraft):
    """Two or three children of the prefix, and a child below the first: `tree`. Sometimes a chain by chance."""

    replacement = False

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        width = 1 + (num_tokens > 1) + (num_tokens > 2 and len(prefix) % 2)
        found: Weighted = []
        for drawn, mass in siblings(self.pair.q(prefix), width, replacement=self.replacement):
            parents = (-1,) * len(drawn)
            if len(drawn) == num_tokens:
                found.append((tree_of(parents, drawn), mass))
                continue
            for below, mass_below in siblings(self.pair.q((*prefix, drawn[0][0])), 1):
                found.append((tree_of((*parents, 0), [*drawn, *below]), mass * mass_below))
        return found


class TreesWithReplacement(Trees):
    """Siblings may repeat one another."""

    replacement = True


class GuessBesideSamples(FakeDraft):
    """A one-hot guess first, and sampled siblings beside it that may say the same."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        guess = (guessed(self.pair, prefix), None)
        drawings = siblings(self.pair.q(prefix), num_tokens - 1)
        return [(tree_of((-1,) * (1 + len(drawn)), [guess, *drawn]), mass) for drawn, mass in drawings]


class Text(FakeDraft):
    """Certain ids and no q, as words of a draft model with another tokenizer: `text`. Short of tokens at times."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        ids = list(prefix)
        for _ in range(max(1, num_tokens - len(prefix) % 2)):
            ids.append(guessed(self.pair, ids))
        return [(Proposal(tuple(ids[len(prefix) :]), drafter="text"), 1.0)]


class SampledThenCertain(FakeDraft):
    """One chain: its first token sampled, the others the likeliest after it."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        found: Weighted = []
        for drawn, mass in siblings(self.pair.q(prefix), 1):
            ids = [*prefix, drawn[0][0]]
            while len(ids) < len(prefix) + num_tokens:
                q = self.pair.q(ids)
                ids.append(int(q.ids[q.counts.argmax()]))
            rest = (None,) * (num_tokens - 1)
            found.append((Proposal(tuple(ids[len(prefix) :]), (drawn[0][1], *rest), drafter="model"), mass))
        return found


def tree_of(parents: tuple[int, ...], drawn: list) -> Proposal:
    shape = () if parents == (-1, 0, 1, 2)[: len(parents)] else parents
    return Proposal(tuple(x for x, _ in drawn), tuple(q for _, q in drawn), drafter="tree", parents=shape)


def guessed(pair: Pair, ids: Ids | list[int]) -> int:
    return random.Random(str((pair.seed, *ids))).randrange(pair.vocab_size)


PAIRS = {
    "alike": {"concentration": 2.0},
    "far apart": {"concentration": 0.4},
    "nearly certain": {"concentration": 0.05},
}
DRAFTERS = [FakeDraft, Trees, TreesWithReplacement, GuessBesideSamples, Text, SampledThenCertain]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab_size", "num_tokens"), [(3, 4), (2, 5)], ids=["wide", "long"])
def test_the_joint_law_is_the_targets(
    rule: AcceptanceRule, drafter: type[FakeDraft], pair: str, vocab_size: int, num_tokens: int
) -> None:
    num_used = 0
    for seed in range(scaled(6, at_least=1)):
        world = World(
            Pair(vocab_size, seed, **PAIRS[pair]), rule, lambda: FixedGamma(MAX_DRAFTS), num_tokens=num_tokens,
            drafter="model", max_drafts=MAX_DRAFTS, fixed=MAX_DRAFTS, make_draft=drafter,
        )  # fmt: skip
        law = world.law()
        assert total_variation(law, world.target_law()) < EXACT
        num_used += sum(world.reasons.values())
    assert num_used > 0, "INCONCLUSIVE: nothing was drafted"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
def test_merged_with_local_guesses(rule: AcceptanceRule, drafter: type[FakeDraft]) -> None:
    """The adaptive controller chooses round by round; chains go on in guesses, late proposals are replaced by them."""
    used: set[str] = set()
    for seed in range(scaled(10, at_least=1)):
        world = World(
            Pair(2, seed), rule, lambda: warm_policy(cap=MAX_DRAFTS, draft_ms=1.0, accept=1), num_tokens=5,
            max_drafts=MAX_DRAFTS, is_late=lambda length: length % 5 == 3, make_draft=drafter,
            past=[(0, 1, 1, 0, 1, 0, 0, 1)],
        )  # fmt: skip
        assert total_variation(world.law(), world.target_law()) < EXACT
        used |= {name for name, _ in world.reasons}
    assert len(used) > 1, f"INCONCLUSIVE: only {used} drafted"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_they_propose_is_well_formed(drafter: type[FakeDraft]) -> None:
    """The fakes draw as the services do: what the target would drop proves nothing."""
    draft = drafter(stream=None, pair=Pair(3, 1), script=None)  # type: ignore[arg-type]
    for prefix in ((0, 1), (0, 1, 2)):
        proposals = draft.proposals(prefix, MAX_DRAFTS)
        assert sum(mass for _, mass in proposals) == pytest.approx(1.0)
        for proposal, _ in proposals:
            check(proposal, vocab_size=3, max_draft_tokens=MAX_DRAFTS)


# Shortcuts, each with what makes it wrong: something is decided after looking at a sample, or told not as it was drawn.


class ConfidenceOrder(FakeDraft):
    """Sampled siblings, tried in the order of their q instead of the order in which they were drawn."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        q = self.pair.q(prefix)
        return [(retold(q, sorted(tokens(drawn), key=q.probability, reverse=True)), mass)
                for drawn, mass in siblings(q, num_tokens)]  # fmt: skip


class BestTwoOfThree(FakeDraft):
    """More samples than are sent, and those that the draft found likelier are sent."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        q = self.pair.q(prefix)
        return [(retold(q, kept(q, tokens(drawn))), mass) for drawn, mass in siblings(q, 3)]


class UnconditionalQ(FakeDraft):
    """Siblings drawn without replacement, told as if each had been drawn from all of q."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        q = self.pair.q(prefix)
        return [(tree_of((-1,) * len(drawn), [(x, q) for x in tokens(drawn)]), mass)
                for drawn, mass in siblings(q, num_tokens)]  # fmt: skip


class DropsTheUnlikely(FakeDraft):
    """A sample that its own q finds unlikely is not sent."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        q = self.pair.q(prefix)
        return [(tree_of((-1,), drawn) if q.probability(drawn[0][0]) >= 0.3 else Proposal(), mass)
                for drawn, mass in siblings(q, 1)]  # fmt: skip


class SurerOfTwo(FakeDraft):
    """Two models draw a token each, and the one that was surer is sent."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        one, other = self.pair.q(prefix), Pair(self.pair.vocab_size, self.pair.seed + 1000).q(prefix)
        found: Weighted = []
        for (a, mass_a), (b, mass_b) in itertools.product(siblings(one, 1), siblings(other, 1)):
            drawn = a if one.probability(a[0][0]) >= other.probability(b[0][0]) else b
            found.append((tree_of((-1,), drawn), mass_a * mass_b))
        return found


class SkipsADuplicate(FakeDraft):
    """A sample that says what the guess before it said is left out."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        guess = guessed(self.pair, prefix)
        return [(tree_of((-1, -1)[: 2 - (drawn[0][0] == guess)],
                         [(guess, None), *(pair for pair in drawn if pair[0] != guess)]), mass)
                for drawn, mass in siblings(self.pair.q(prefix), 1)]  # fmt: skip


class OneDrawForAllSiblings(FakeDraft):
    """Noise used for every branch: siblings told as independent draws that are one and the same."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        return [(tree_of((-1,) * num_tokens, drawn * num_tokens), mass)
                for drawn, mass in siblings(self.pair.q(prefix), 1)]  # fmt: skip


def tokens(drawn: list[tuple[int, SparseQ]]) -> list[int]:
    return [x for x, _ in drawn]


def kept(q: SparseQ, drawn: list[int]) -> list[int]:
    best = sorted(drawn, key=q.probability, reverse=True)[:2]
    return [x for x in drawn if x in best]


def retold(q: SparseQ, ids: list[int]) -> Proposal:
    """As if these had been drawn in this order without replacement."""
    told: list[tuple[int, SparseQ]] = []
    left: SparseQ | None = q
    for x in ids:
        assert left is not None
        told.append((x, left))
        left = without(left, x)
    return tree_of((-1,) * len(told), told)


SHORTCUTS = [ConfidenceOrder, BestTwoOfThree, UnconditionalQ, DropsTheUnlikely, SurerOfTwo, SkipsADuplicate,
             OneDrawForAllSiblings]  # fmt: skip


@pytest.mark.parametrize("shortcut", SHORTCUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_shortcut_is_caught_over_rounds(rule: AcceptanceRule, shortcut: type[FakeDraft]) -> None:
    world = World(
        Pair(3, 1, concentration=1.0), rule, lambda: FixedGamma(2), num_tokens=4, drafter="model", max_drafts=2,
        fixed=2, make_draft=shortcut,
    )  # fmt: skip
    assert total_variation(world.law(), world.target_law()) > 1e-3


class Continues(FixedGamma):
    """One draft, then whatever the guess has."""

    def num_continued(self, choice: Choice, num_drafted: int, guess: object) -> int:
        return len(guess)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_how_long_a_chain_goes_on_may_depend_on_its_samples(rule: AcceptanceRule) -> None:
    """A continuation is certain, so its length may follow what was drawn before it."""
    num_mixed = 0
    for seed in range(scaled(10, at_least=2)):
        for drafter in (FakeDraft, SampledThenCertain, Text):
            world = World(
                Pair(2, seed), rule, lambda: Continues(1), num_tokens=4, max_drafts=3, make_draft=drafter,
            )  # fmt: skip
            assert total_variation(world.law(), world.target_law()) < EXACT
            num_mixed += world.num_mixed
    assert num_mixed > 0, "INCONCLUSIVE: no chain went on"
