"""Drafting ahead leaves the joint law alone: branches drawn before the verdict are taken whole, and never looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from asking_workers import FakeDraft, Ids, Pair
from conftest import scaled
from loop_law import World, total_variation

from coordinator.drafting import Drafted
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import HIT, MISS, Choice
from draft_worker.branches import Place, RatioOutlook, likeliest_outcomes
from outrider.drafting.proposal import Proposal
from outrider.sampling.params import AcceptanceRule
from outrider.serving import convert
from outrider.serving.session_calls import _sealed

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12
NUM_BRANCHES = 2


@dataclass
class AheadDraft(FakeDraft):
    """Behind the likeliest outcomes of each chain, found as the draft worker finds them, the next chain is drawn at
    once; it is kept until the verdict is there."""

    branches: dict[Ids, Proposal] = field(default_factory=dict)
    statuses: list[str] = field(default_factory=list)

    async def propose(self, choice: Choice) -> Drafted:
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        chain = self.kept(prefix)
        TALLY[HIT if chain is not None else MISS] += 1
        if chain is None:
            chain = self.script.answer(lambda: self.proposals(prefix, choice.num_draft_tokens))
        self.num_drafted += len(chain)
        self.branches = self.drawn(prefix, chain, choice.num_draft_tokens)
        return Drafted(_sealed(convert.proposal_to_pb(chain)))

    def kept(self, prefix: Ids) -> Proposal | None:
        return self.branches.get(prefix)

    def drawn(self, prefix: Ids, chain: Proposal, num_tokens: int) -> dict[Ids, Proposal]:
        places = []
        for i in range(len(chain) + 1):
            q = self.pair.q((*prefix, *chain.token_ids[:i]))
            places.append(Place(q.ids.astype(np.int64), q.counts.astype(np.float64)))
        outcomes = likeliest_outcomes(places, chain.token_ids, RatioOutlook(), NUM_BRANCHES)
        branches: dict[Ids, Proposal] = {}
        for rank, (num_accepted, token_id, _) in enumerate(outcomes):
            text = (*prefix, *chain.token_ids[:num_accepted], token_id)
            room = self.stream.num_remaining_tokens - num_accepted - 2
            if room > 0:
                count = min(max(1, num_tokens - rank), room)  # less behind what is less likely
                branches[text] = self.script.answer(
                    lambda text=text, count=count: self.branch(text, chain, count)  # type: ignore[misc]
                )
        return branches

    def branch(self, text: Ids, chain: Proposal, num_tokens: int) -> list:
        return self.proposals(text, num_tokens)


TALLY = {HIT: 0, MISS: 0}


def law_of(rule: AcceptanceRule, seed: int, gamma: int, num_tokens: int, draft: type[FakeDraft]) -> float:
    """Distance of the text's law from the target's."""
    TALLY.update({HIT: 0, MISS: 0})
    world = World(
        Pair(2, seed), rule, lambda: FixedGamma(gamma), num_tokens=num_tokens, drafter="model", max_drafts=gamma,
        fixed=gamma, make_draft=draft,
    )  # fmt: skip
    return total_variation(world.law(), world.target_law())


@pytest.mark.parametrize(("gamma", "num_tokens"), [(1, 5), (2, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_is_the_targets(rule: AcceptanceRule, gamma: int, num_tokens: int) -> None:
    num_hits = num_misses = 0
    for seed in range(scaled(6, at_least=1)):
        assert law_of(rule, seed, gamma, num_tokens, AheadDraft) < EXACT
        num_hits, num_misses = num_hits + TALLY[HIT], num_misses + TALLY[MISS]
    assert num_hits > 0, "INCONCLUSIVE: no branch was used"
    assert num_misses > 0, "INCONCLUSIVE: every branch was used"


# Shortcuts: each looks at what was drawn in a branch, or draws it from what was used before.


class OnlyTheSure(AheadDraft):
    """A branch is used where the draft finds its first token likely, and otherwise drawn anew."""

    def kept(self, prefix: Ids) -> Proposal | None:
        found = self.branches.get(prefix)
        return found if found is not None and found.q_at(0).probability(found.token_ids[0]) >= 0.5 else None


class CutsTheUnsure(AheadDraft):
    """An unlikely token ends a branch, and is left out of it."""

    def kept(self, prefix: Ids) -> Proposal | None:
        found = self.branches.get(prefix)
        if found is None:
            return None
        unsure = (i for i in range(len(found)) if found.q_at(i).probability(found.token_ids[i]) < 0.5)
        return found.kept(range(next(unsure, len(found))))


class SoonerForWhatWasDrawn(AheadDraft):
    """Branches that begin with one token come in time, the others too late: their chains are drawn anew."""

    def kept(self, prefix: Ids) -> Proposal | None:
        found = self.branches.get(prefix)
        return found if found is not None and found.token_ids[0] == 0 else None


class GoesOnWithTheOldChain(AheadDraft):
    """What was drawn behind a draft that fell is told as the branch of what came instead."""

    def branch(self, text: Ids, chain: Proposal, num_tokens: int) -> list:
        num_accepted = len(text) - 1 - len(self.stream.log.prompt_ids) - len(self.stream.log.output_ids)
        left = chain.token_ids[num_accepted + 1 :][:num_tokens]
        if not left:
            return self.proposals(text, num_tokens)
        q = tuple(self.pair.q((*text, *left[:i])) for i in range(len(left)))
        return (
            [(Proposal(left, q, drafter="model"), 1.0)]
            if all((one.ids == x).any() for one, x in zip(q, left, strict=True))
            else self.proposals(text, num_tokens)
        )


@pytest.mark.parametrize("shortcut", [OnlyTheSure, CutsTheUnsure, SoonerForWhatWasDrawn])
@pytest.mark.parametrize("rule", RULES)
def test_a_shortcut_is_caught(rule: AcceptanceRule, shortcut: type[FakeDraft]) -> None:
    assert max(law_of(rule, seed, 1, 4, shortcut) for seed in range(2)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_a_chain_that_fell_are_no_branch(rule: AcceptanceRule) -> None:
    assert law_of(rule, 0, 2, 4, GoesOnWithTheOldChain) > 1e-3
