"""Rounds sent before the verdict of the round before leave the joint law alone; so does every guess that was wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import loop_law
import pytest
import test_draft_ahead_law as ahead_law
from asking_workers import FakeTarget, Ids, Pair, Script
from conftest import scaled
from loop_law import World, total_variation

from coordinator.branches import Foretold
from coordinator.drafting import Drafted
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import HIT, Candidate, Choice
from coordinator.target_link import Timed
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule
from outrider.serving import convert
from outrider.serving.messages import AheadWish
from outrider.serving.session_calls import SealedProposal, _sealed

COUNTS = {"sent": 0, "used": 0, "lost": 0}


@dataclass
class Pipelined(FakeTarget):
    """Takes a round before the verdict of the one before, and drops it where that one turns out differently."""

    pipelines: bool = True
    _next: tuple[int, int] | None = None
    _proposal: SealedProposal | None = None

    @property
    def is_verifying(self) -> bool:  # type: ignore[override]
        header = self.stream.log.header(0)
        return self._next == (header.base_length, header.prefix_hash)

    @is_verifying.setter
    def is_verifying(self, value: bool) -> None:
        pass

    def verify_next(self, base_length: int, prefix_hash: int, token_id: int, proposal: SealedProposal) -> None:
        COUNTS["sent"] += 1
        self._next, self._proposal = (base_length, prefix_hash), proposal

    async def verify(self, sealed: SealedProposal) -> Timed:
        if self.is_verifying:
            COUNTS["used"] += 1
            assert sealed is self._proposal, "another proposal than the one that the target has"
        self._next = None
        for _ in range(3):
            await asyncio.sleep(0)  # the verdict is on its way
        return await super().verify(sealed)


@dataclass
class Dying(Pipelined):
    """Decides the round that it has before its turn at once, and dies of some outcomes before that verdict is heard.
    Another worker decides by the same coins: the same drafts come to the same."""

    _decided: tuple[tuple[int, int], SealedProposal, object] | None = None
    _is_lost: bool = False

    @property
    def is_verifying(self) -> bool:  # type: ignore[override]
        return not self._is_lost and self._is_next()

    @is_verifying.setter
    def is_verifying(self, value: bool) -> None:
        pass

    def _is_next(self) -> bool:
        header = self.stream.log.header(0)
        return self._next == (header.base_length, header.prefix_hash)

    async def verify(self, sealed: SealedProposal) -> Timed:
        header, decided = self.stream.log.header(0), self._decided
        self._decided, self._is_lost = None, False
        if decided is not None and decided[:2] == ((header.base_length, header.prefix_hash), sealed):
            COUNTS["used"] += 1
            script, self.script = self.script, Script([decided[2]])
            timed = self._commit(convert.proposal_from_pb(sealed.message))
            self.script = script
        else:
            for _ in range(3):
                await asyncio.sleep(0)  # the verdict is on its way
            timed = await FakeTarget.verify(self, sealed)
        self._decide_next(timed.verdict.committed_ids)
        return timed

    def _decide_next(self, committed_ids: Ids) -> None:
        log, sent = self.stream.log, self._proposal
        after = (log.length + len(committed_ids), hash_ids(committed_ids, log.header(0).prefix_hash))
        if sent is None or self._next != after or self.stream.num_remaining_tokens <= len(committed_ids):
            return
        prefix = (*log.prompt_ids, *log.output_ids, *committed_ids)
        branch = convert.proposal_from_pb(sent.message)
        outcome = self.script.answer(lambda: self._outcomes(prefix, branch))
        self._decided, self._is_lost = (after, sent, outcome), (*outcome[0], outcome[1])[0] == 0
        COUNTS["lost"] += self._is_lost


@dataclass
class Foretelling(ahead_law.AheadDraft):
    """Tells the likeliest of its branches."""

    async def foretold(self) -> Foretold:
        log = self.stream.log
        base = (*log.prompt_ids, *log.output_ids)
        for text, branch in self.branches.items():
            new = text[len(base) :]
            prefix_hash = hash_ids(new, log.header(0).prefix_hash)
            return Foretold(prefix_hash, len(new) - 1, new[-1], self._seal(text, branch))
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def _seal(self, text: Ids, branch: object) -> SealedProposal:
        return _sealed(convert.proposal_to_pb(branch))  # type: ignore[arg-type]

    def use(self, branch: SealedProposal, choice: Choice) -> Drafted:
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        chain = self.branches[prefix]
        self.num_drafted += len(chain)
        self.branches = self.drawn(prefix, chain, choice.num_draft_tokens)
        return Drafted(branch, ahead=HIT)


class SendsTheSure(Foretelling):
    """A round is sent early only where its first draft was likely; otherwise, and this is the fault, its branch is
    forgotten, and drawn anew."""

    async def foretold(self) -> Foretold:
        for text, branch in list(self.branches.items()):
            if branch.q_at(0).probability(branch.token_ids[0]) < 0.5:
                del self.branches[text]
        return await super().foretold()


class Ahead(FixedGamma):
    def choose(self, max_draft_tokens, max_credit_tokens, candidates, guesses=()):  # type: ignore[no-untyped-def]
        able = tuple(Candidate(c.name, max_branches=2) for c in candidates)
        choice = super().choose(max_draft_tokens, max_credit_tokens, able, guesses)
        assert not choice.candidate or isinstance(choice.ahead, AheadWish)
        return choice


class Once(Ahead):
    """Drafts in the round that it is asked about first, and in no later one."""

    num_chosen = 0

    def choose(self, max_draft_tokens, max_credit_tokens, candidates, guesses=()):  # type: ignore[no-untyped-def]
        self.num_chosen += 1
        choice = super().choose(max_draft_tokens, max_credit_tokens, candidates, guesses)
        return choice if self.num_chosen == 1 else Choice("", 0, "off", credit_tokens=1)


def distance(rule: AcceptanceRule, seed: int, gamma: int, num_tokens: int, draft: type, monkeypatch) -> float:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(loop_law, "FakeTarget", Pipelined)
    world = World(
        Pair(2, seed), rule, lambda: Ahead(gamma, drafts_ahead=True), num_tokens=num_tokens, drafter="model",
        max_drafts=gamma, fixed=gamma, make_draft=draft,
    )  # fmt: skip
    return total_variation(world.law(), world.target_law())


@pytest.mark.parametrize(("gamma", "num_tokens"), [(1, 5), (2, 4)])
@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_joint_law_is_the_targets(rule, gamma, num_tokens, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    COUNTS.update(sent=0, used=0)
    for seed in range(scaled(4, at_least=1)):
        assert distance(rule, seed, gamma, num_tokens, Foretelling, monkeypatch) < ahead_law.EXACT
    assert 0 < COUNTS["used"] < COUNTS["sent"], "INCONCLUSIVE: no guess was right, or none wrong"


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_looking_at_what_was_drawn_is_caught(rule, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert max(distance(rule, seed, 1, 4, SendsTheSure, monkeypatch) for seed in range(2)) > 1e-3


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_a_worker_that_dies_of_the_round_that_it_has_before_its_turn(rule, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Asked for over other drafts, that round had a second chance."""
    COUNTS.update(sent=0, used=0, lost=0)
    monkeypatch.setattr(loop_law, "FakeTarget", Dying)
    for seed in range(scaled(4, at_least=2)):
        world = World(
            Pair(2, seed), rule, lambda: Once(1, drafts_ahead=True), num_tokens=5, drafter="model", max_drafts=1,
            fixed=1, make_draft=Foretelling,
        )  # fmt: skip
        assert total_variation(world.law(), world.target_law()) < ahead_law.EXACT
    assert min(COUNTS.values()) > 0, "INCONCLUSIVE: no such round was decided, or none lost"
