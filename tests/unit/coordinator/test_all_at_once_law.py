"""Branches, rounds sent before their verdict, guesses that go on after sampled chains or stand in for late ones, and a
controller that follows it all: together they leave the joint law alone, by enumeration."""

from __future__ import annotations

import dataclasses
from typing import Any

import loop_law
import pytest
import test_draft_ahead_law as ahead_law
import test_pipelining_law as pipelining_law
from asking_workers import Pair
from conftest import scaled
from loop_law import World, total_variation, warm_policy
from test_local_drafts_law import corrections, texts

from coordinator.drafting import Drafted
from coordinator.gamma.policy import HIT, MISS, Choice, GammaPolicy
from coordinator.local_drafts import LocalDrafts
from outrider.sampling.params import AcceptanceRule
from outrider.serving.messages import AheadWish
from outrider.serving.session_calls import SealedProposal

USED: dict[str, int] = {}


class AlwaysAhead:
    """A policy whose rounds of the draft worker all want branches."""

    def __init__(self, policy: GammaPolicy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def choose(self, *args: Any) -> Choice:
        choice = self._policy.choose(*args)
        is_model = choice.candidate is not None and choice.candidate.name == "model"
        return dataclasses.replace(choice, ahead=AheadWish(2, choice.num_draft_tokens)) if is_model else choice


class Sometimes(pipelining_law.Foretelling):
    """Chains that are late for some lengths of the text are drawn all the same, and dropped whole; branches behind them
    come."""

    async def propose(self, choice: Choice) -> Drafted:
        log = self.stream.log
        late = self.is_late(log.length) and (*log.prompt_ids, *log.output_ids) not in self.branches
        drafted = await super().propose(choice)
        USED["late"] += late
        return Drafted(SealedProposal(), wait_ms=1.0) if late else drafted


class Watched(LocalDrafts):
    def continuation(self, *args: Any) -> Any:
        guess = super().continuation(*args)
        USED["continued"] += bool(guess)
        return guess


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_joint_law_is_the_targets(rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_law, "FakeTarget", pipelining_law.Pipelined)
    monkeypatch.setattr(loop_law, "LocalDrafts", Watched)
    USED.update(late=0, continued=0)
    pipelining_law.COUNTS.update(sent=0, used=0)
    ahead_law.TALLY.update({HIT: 0, MISS: 0})
    for seed in range(scaled(20, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: AlwaysAhead(warm_policy(draft_ms=0.05, accept=2, cap=1)), num_tokens=5,
            max_drafts=3, past=texts(seed, 2), corrections=corrections(seed, 2), make_draft=Sometimes,
            is_late=lambda length, seed=seed: (length + seed) % 2 == 0,  # type: ignore[misc]
        )  # fmt: skip
        assert total_variation(world.law(), world.target_law()) < ahead_law.EXACT
    told = (USED, pipelining_law.COUNTS, ahead_law.TALLY)
    assert 0 < pipelining_law.COUNTS["used"] < pipelining_law.COUNTS["sent"], f"INCONCLUSIVE: {told}"
    assert USED["late"] > 0, f"INCONCLUSIVE: {told}"
    assert USED["continued"] > 0, f"INCONCLUSIVE: {told}"
