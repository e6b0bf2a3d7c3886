"""A chain that is cut by its time limit or by the death of its worker: used are the drafts that have come.

Through the coordinator's own round loop the joint law over rounds is the target's by enumeration, whenever the cuts
fall. To drop the whole chain is seen, where it may end early, as those that do get through, and where its worker dies
over what it drew.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from typing import ClassVar

import pytest
from asking_workers import FakeDraft, Ids, Weighted
from conftest import scaled
from loop_law import World, total_variation
from test_ratio_stop_law import DRAFT_MS, EXACT, MAX_DRAFTS, RULES, DearRows, Stopping, world

from coordinator.gamma.fixed import FixedGamma
from outrider.drafting.proposal import Proposal
from outrider.sampling.params import AcceptanceRule


class Cut(Stopping):
    """Each draft comes as soon as its row is computed, the worker falls silent after some rows: how many is decided by
    the length of the text, which is no draw of the round at hand."""

    cuts: ClassVar[Counter[str]] = Counter()

    def num_rows(self, prefix: Ids) -> int:
        return random.Random(f"{self.pair.seed} {len(prefix)}").randrange(MAX_DRAFTS + 2)

    def arrived(self, proposal: Proposal, num_computed: int, num_rows: int) -> Proposal:
        """num_computed: rows that the whole proposal takes. num_rows: rows until the silence."""
        return proposal.kept(range(min(len(proposal), num_rows)))

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        num_rows, masses = self.num_rows(prefix), dict[Ids, tuple[Proposal, float]]()
        for proposal, mass in super().proposals(prefix, num_tokens):
            cut = self.arrived(proposal, self.num_computed(prefix, proposal, num_tokens), num_rows)
            self.cuts["whole" if cut == proposal else "part" if len(cut) else "nothing"] += 1
            masses[cut.token_ids] = cut, masses.get(cut.token_ids, (cut, 0.0))[1] + mass
        return list(masses.values())

    def num_computed(self, prefix: Ids, proposal: Proposal, num_tokens: int) -> int:
        """A row more than drafts where the chain was ended by what that row says."""
        stop = copy.deepcopy(self.stop)
        chain = stop.chain(self._price, DRAFT_MS)
        for length in range(len(proposal)):
            assert chain.wants_row()
            assert chain.wants_draft(self.confidence(self.pair.q((*prefix, *proposal.token_ids[:length])), -1))
        return len(proposal) + (len(proposal) < num_tokens and chain.wants_row())


class DroppedWhole(Cut):
    """As if it were one message that comes at its end, or not at all. The worker falls silent after two rows."""

    def num_rows(self, prefix: Ids) -> int:
        return 2

    def arrived(self, proposal: Proposal, num_computed: int, num_rows: int) -> Proposal:
        return proposal if num_computed <= num_rows else Proposal(drafter="model")


class Deadly(FakeDraft):
    """A chain as long as it is wanted. The pass over a draft of id 1 kills the worker, which has told that draft."""

    ends: ClassVar[Counter[str]] = Counter()

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        masses = dict[Ids, tuple[Proposal, float]]()
        for proposal, mass in super().proposals(prefix, num_tokens):
            passed_over = proposal.token_ids[:-1]
            came = self.arrived(proposal, passed_over.index(1) + 1) if 1 in passed_over else proposal
            self.ends["whole" if came == proposal else "dead"] += 1
            masses[came.token_ids] = came, masses.get(came.token_ids, (came, 0.0))[1] + mass
        return list(masses.values())

    def arrived(self, proposal: Proposal, num_told: int) -> Proposal:
        return proposal.kept(range(num_told))


class DeadlyUntold(Deadly):
    """As one message at its end."""

    def arrived(self, proposal: Proposal, num_told: int) -> Proposal:
        return Proposal(drafter="model")


def cut_world(rule: AcceptanceRule, draft: type[Stopping], seed: int) -> World:
    return dataclasses.replace(world(rule, draft, seed), policy=lambda: DearRows(MAX_DRAFTS))


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_is_the_targets_whenever_a_chain_is_cut(rule: AcceptanceRule) -> None:
    Cut.cuts.clear()
    for seed in range(1, 1 + scaled(20, at_least=3)):
        one = cut_world(rule, Cut, seed)
        assert total_variation(one.law(), one.target_law()) < EXACT
    assert min(Cut.cuts[how] for how in ("whole", "part", "nothing")) > 0, f"INCONCLUSIVE: {dict(Cut.cuts)}"


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_that_is_dropped_whole_for_the_time_it_takes_is_seen(rule: AcceptanceRule) -> None:
    one = cut_world(rule, DroppedWhole, 1)
    assert total_variation(one.law(), one.target_law()) > 1e-3


def deadly_world(rule: AcceptanceRule, draft: type[FakeDraft], seed: int) -> World:
    one = world(rule, Stopping, seed)
    return dataclasses.replace(one, make_draft=draft, policy=lambda: FixedGamma(MAX_DRAFTS))


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_is_the_targets_though_a_worker_dies_over_what_it_drew(rule: AcceptanceRule) -> None:
    Deadly.ends.clear()
    for seed in range(1, 1 + scaled(20, at_least=3)):
        one = deadly_world(rule, Deadly, seed)
        assert total_variation(one.law(), one.target_law()) < EXACT
    assert min(Deadly.ends[how] for how in ("whole", "dead")) > 0, f"INCONCLUSIVE: {dict(Deadly.ends)}"


@pytest.mark.parametrize("rule", RULES)
def test_a_death_that_takes_its_drafts_along_is_seen(rule: AcceptanceRule) -> None:
    one = deadly_world(rule, DeadlyUntold, 1)
    assert total_variation(one.law(), one.target_law()) > 1e-3
