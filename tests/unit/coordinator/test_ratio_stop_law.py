"""Chains that end by themselves, through the coordinator's own round loop: the joint law over rounds is the target's by
enumeration, whatever the prices; and a drafter that looks at what it drew before it decides is seen."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from asking_workers import FakeDraft, Ids, Pair, Weighted
from conftest import scaled
from loop_law import World, total_variation, warm_policy

from coordinator.drafting import Drafted
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Choice, RoundReport
from outrider.drafting.confidence import sampled_confidence
from outrider.drafting.proposal import Proposal, SparseQ
from outrider.drafting.ratio_stop import EarlyStop, Price
from outrider.sampling.params import AcceptanceRule
from outrider.serving.messages import Verdict

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
EXACT = 1e-12
MAX_DRAFTS = 3
DRAFT_MS = 1.0


def taught(seed: int) -> EarlyStop:
    """What earlier streams left: high confidence is good and low is not."""
    stop, rng = EarlyStop(), random.Random(seed)
    for _ in range(40):
        confidences = [rng.random() for _ in range(MAX_DRAFTS)]
        stop.observe(Price(0.0), confidences, [0.95 if c > 0.6 else 0.15 for c in confidences])
    return stop


def price_of(rng: random.Random) -> Price:
    expected = tuple(rng.choice([0.5, 0.7, 0.9]) for _ in range(rng.randrange(MAX_DRAFTS)))
    return Price(0.7 * rng.random(), rng.choice([0.0, 0.4 * rng.random()]), expected)


class Priced(FixedGamma):
    """Prices that follow all that was seen so far, past rejections too."""

    def __init__(self, seed: int) -> None:
        super().__init__(MAX_DRAFTS)
        self._seen: list[Any] = [seed]

    def choose(self, *args: Any, **kwargs: Any) -> Choice:
        choice = super().choose(*args, **kwargs)
        rng = random.Random(str(self._seen))
        return dataclasses.replace(choice, price=price_of(rng))

    def observe(self, report: RoundReport) -> None:
        self._seen.append((report.num_accepted, report.soft_acceptances))


class DearRows(FixedGamma):
    """Every draft but the first must be likely to stand."""

    def choose(self, *args: Any, **kwargs: Any) -> Choice:
        return dataclasses.replace(super().choose(*args, **kwargs), price=Price(0.0, 0.3))


class Stopping(FakeDraft):
    """As the model drafter: whether a row is computed follows from the drafts before it, whether its draft is drawn
    also from its q. It learns from what the target told of its last chain."""

    lengths: ClassVar[Counter[int]] = Counter()
    _stop: EarlyStop | None = None
    _price = Price(0.0)
    _confidences: tuple[float, ...] = ()

    @property
    def stop(self) -> EarlyStop:
        if self._stop is None:
            self._stop = EarlyStop(taught(self.pair.seed))
        return self._stop

    def confidence(self, q: SparseQ, drawn: int) -> float:
        return sampled_confidence(q)

    async def propose(self, choice: Choice) -> Drafted:
        assert choice.price is not None
        self._price = choice.price
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        drafted = await super().propose(choice)
        # once more for what it leaves behind, along the chain that was drawn
        chain = self.stop.chain(self._price, DRAFT_MS)
        drafts = drafted.proposal.token_ids
        for length in range(choice.num_draft_tokens):
            drawn = drafts[length] if length < len(drafts) else -1
            if not chain.wants_row() or not chain.wants_draft(self.confidence(self.pair.q((*prefix, *drafts)), drawn)):
                break
            if length == len(drafts):
                break
        self._confidences = tuple(chain.confidences[: len(drafts)])
        self.lengths[len(drafts)] += 1
        return drafted

    def judge(self, verdict: Verdict, num_drafts: int) -> None:
        self.stop.observe(
            self._price, self._confidences, [byte / 255 for byte in verdict.soft_acceptances[:num_drafts]]
        )

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        found: Weighted = []

        def extend(drafts: Ids, laws: tuple[SparseQ, ...], mass: float, stop: EarlyStop, chain: Any) -> None:
            done = Proposal(drafts, laws, drafter="model")
            if len(drafts) == num_tokens or not chain.wants_row():
                found.append((done, mass))
                return
            q = self.pair.q((*prefix, *drafts))
            for x in q.ids.tolist():
                state = copy.deepcopy((stop, chain))
                if state[1].wants_draft(self.confidence(q, x)):
                    extend((*drafts, x), (*laws, q), mass * q.probability(x), *state)
                else:
                    found.append((done, mass * q.probability(x)))

        stop = copy.deepcopy(self.stop)
        extend((), (), 1.0, stop, stop.chain(self._price, DRAFT_MS))
        merged: dict[Ids, tuple[Proposal, float]] = {}
        for proposal, mass in found:
            merged[proposal.token_ids] = (proposal, merged.get(proposal.token_ids, (proposal, 0.0))[1] + mass)
        return list(merged.values())


class LooksFirst(Stopping):
    """Drops a sampled draft for what it is: its own probability decides."""

    def confidence(self, q: SparseQ, drawn: int) -> float:
        return q.probability(drawn)


class DropsTheLast(Stopping):
    """The draft that ended the chain is left out of it, where it was unlikely."""

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        return [(self.cut(proposal), mass) for proposal, mass in super().proposals(prefix, num_tokens)]

    def cut(self, proposal: Proposal) -> Proposal:
        last = len(proposal) - 1
        if last < 1 or proposal.q[last].probability(proposal.token_ids[last]) > 0.4:  # type: ignore[union-attr]
            return proposal
        return proposal.kept(range(last))


def world(rule: AcceptanceRule, draft: type[Stopping], seed: int, **fields: Any) -> World:
    values = {"num_tokens": 5, "drafter": "model", "fixed": MAX_DRAFTS, "max_drafts": MAX_DRAFTS, **fields}
    return World(Pair(2, seed, concentration=1.0), rule, lambda: Priced(seed), make_draft=draft, **values)


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_is_the_targets_whatever_drafts_must_earn(rule: AcceptanceRule) -> None:
    Stopping.lengths.clear()
    for seed in range(scaled(20, at_least=2)):
        one = world(rule, Stopping, seed)
        assert total_variation(one.law(), one.target_law()) < EXACT
    assert len(Stopping.lengths) == MAX_DRAFTS, f"INCONCLUSIVE: chains of {dict(Stopping.lengths)} drafts"


@pytest.mark.parametrize("rule", RULES)
def test_with_the_price_of_the_adaptive_controller(rule: AcceptanceRule) -> None:
    Stopping.lengths.clear()
    priced: Counter[bool] = Counter()

    class Watched(Stopping):
        async def propose(self, choice: Choice) -> Drafted:
            priced[choice.price is not None] += 1
            return await (super() if choice.price is not None else super(Stopping, self)).propose(choice)

        def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
            return (super() if num_tokens > 1 else super(Stopping, self)).proposals(prefix, num_tokens)

    for seed in range(scaled(10, at_least=1)):
        one = dataclasses.replace(
            world(rule, Watched, seed, fixed=None, num_tokens=5),
            policy=lambda: warm_policy(cap=MAX_DRAFTS, draft_ms=2.0, accept=2),
        )
        assert total_variation(one.law(), one.target_law()) < EXACT
    assert priced[True] > 0, "INCONCLUSIVE: no price"
    assert len(Stopping.lengths) > 1, "INCONCLUSIVE: no chain ended early"


@pytest.mark.parametrize("twin", [LooksFirst, DropsTheLast])
@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_looks_at_what_it_drew_is_seen(rule: AcceptanceRule, twin: type[Stopping]) -> None:
    worst = 0.0
    for seed in range(3):
        one = dataclasses.replace(world(rule, twin, seed), policy=lambda: DearRows(MAX_DRAFTS))
        worst = max(worst, total_variation(one.law(), one.target_law()))
    assert worst > 1e-3, worst
