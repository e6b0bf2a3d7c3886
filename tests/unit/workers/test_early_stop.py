"""The draft worker's sessions under a price: chains end, and where they do follows from nothing that was just drawn."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import scaled
from session_loops import RULES, HandDriver, draft_session, header_after, toy

from draft_worker.early_stop import MAX_UNJUDGED, SessionStop, StopMemory
from draft_worker.session import DraftSession
from outrider.drafting.confidence import matched_confidence, sampled_confidence
from outrider.drafting.proposal import Proposal, SparseQ
from outrider.drafting.ratio_stop import Judged, Price
from outrider.sampling.history import History
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams

MODEL = toy("vocab=8,seed=3")
DEAR = Price(0.0, 0.5)


def propose(session: DraftSession, num_tokens: int, price: Price | None, judged: Judged | None = None) -> Proposal:
    program = session.advance(session.log.header, (), num_tokens, price=price, judged=judged or Judged())
    return HandDriver(MODEL.logits_for).run(program)


def teach(session: DraftSession, chance: float, num_rounds: int = 40) -> None:
    """Rounds that were judged like that. The text stays where it is."""
    for _ in range(num_rounds):
        proposal = propose(session, 6, Price(0.0))
        judged = Judged(session.log.prefix_hash, bytes([round(255 * chance)] * len(proposal)))
        propose(session, 1, None, judged)


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_is_as_long_as_it_pays_and_a_part_of_what_it_would_be(rule: str) -> None:
    session = draft_session(MODEL, RULES[rule])
    whole = propose(session, 6, None)
    assert len(whole) == 6
    assert propose(session, 6, DEAR).token_ids == whole.token_ids, "nothing is known yet"
    teach(session, 0.1)
    short = propose(session, 6, DEAR)
    assert len(short) == 1
    assert short.token_ids == whole.token_ids[:1]
    assert propose(session, 6, None).token_ids == whole.token_ids, "without a price nothing ends"
    teach(session, 1.0, 400)
    assert propose(session, 6, DEAR).token_ids == whole.token_ids


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_where_a_chain_ends_follows_from_the_drafts_before_alone(rule: AcceptanceRule) -> None:
    """Over many seeds: chains that begin alike go on alike, whatever they draw next."""
    memory = StopMemory()
    prior = memory.prior(("model", "", "sampled"))
    for confidence in np.linspace(0.02, 0.99, 300).tolist():
        prior.observe(Price(0.0), [confidence] * 2, [0.1 if 0.5 < confidence < 0.65 else 0.95] * 2)
    goes_on: dict[tuple[int, ...], set[bool]] = {}
    for seed in range(scaled(1500, at_least=150)):
        opening = draft_session(MODEL, SamplingParams(acceptance=rule, seed=seed))
        opening.stop = SessionStop(memory, "", opening.log.sampling)
        opening._drafters.clear()
        drafts = propose(opening, 4, Price(0.0, 0.2)).token_ids
        for length in range(1, len(drafts) + (len(drafts) < 4)):
            goes_on.setdefault(drafts[:length], set()).add(length < len(drafts))
    assert all(len(answers) == 1 for answers in goes_on.values())
    assert {answer for answers in goes_on.values() for answer in answers} == {True, False}, "INCONCLUSIVE"


def test_the_worker_says_that_it_has_begun_before_it_draws() -> None:
    session, order = draft_session(MODEL, RULES["block"]), []
    session.stop.begun = lambda: order.append("begun")
    program = session.advance(session.log.header, (), 3, price=Price(0.0))

    def rows(ids: list[int]) -> np.ndarray:
        order.append("row")
        return MODEL.logits_for(ids)

    HandDriver(rows).run(program)
    assert order == ["row", "begun", "row", "row"]


def test_tenants_and_rules_learn_apart_and_what_a_draft_takes_is_known_to_all() -> None:
    memory = StopMemory()
    one, two = SamplingParams(seed=1), SamplingParams(temperature=0.0)
    SessionStop(memory, "a", one).drafted(4.0)
    assert memory.draft_ms.value() == 4.0
    scopes = [("model", tenant, kind) for tenant in "ab" for kind in ("sampled", "greedy")]
    assert len({id(memory.prior(scope)) for scope in scopes}) == 4
    stop = SessionStop(memory, "a", two)
    for prefix_hash in range(40):
        stop.price = Price(0.0)
        chain = stop.chain("model")
        assert chain is not None
        chain.wants_draft(0.5)
        stop.proposed(prefix_hash, "model", chain)
        stop.judge(Judged(prefix_hash, b"\x00"))
        stop.judge(Judged(prefix_hash, b"\xff"))  # judged once
    assert memory.prior(("model", "a", "greedy")).is_ready
    assert not memory.prior(("model", "b", "greedy")).is_ready
    assert not memory.prior(("model", "a", "sampled")).is_ready


def test_what_is_never_judged_is_forgotten() -> None:
    stop = SessionStop(StopMemory(), "", SamplingParams())
    stop.price = Price(0.0)
    for prefix_hash in range(100):
        chain = stop.chain("model")
        assert chain is not None
        stop.proposed(prefix_hash, "model", chain)
    assert len(stop._unjudged) == MAX_UNJUDGED


def test_confidence_of_a_draft() -> None:
    q = SparseQ(np.array([3, 5], np.uint32), np.array([16_384, 49_152], np.int64))
    assert sampled_confidence(q) == 0.75
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    plain, stopping, history = SamplingParams(temperature=1.0), StoppingParams(9), History(())
    assert matched_confidence(1, logits, plain, stopping, history) == pytest.approx(0.3)
    assert matched_confidence(0, logits, SamplingParams(temperature=0.0), stopping, history) == pytest.approx(0.5)
    hot = SamplingParams(temperature=1.0, logit_bias={2: 2.0})
    biased = 0.2 * np.exp(2.0) / (0.8 + 0.2 * np.exp(2.0))
    assert matched_confidence(2, logits, hot, stopping, history) == pytest.approx(biased, rel=1e-6)


def test_a_session_goes_on_over_rounds_with_prices_and_verdicts() -> None:
    """The cache and the learnt chances stay in step with a text that moves on."""
    session, driver = draft_session(MODEL, RULES["block"], StoppingParams(200)), HandDriver(MODEL.logits_for)
    lengths, judged, committed = [], Judged(), ()
    for _ in range(60):
        header = header_after(session, committed)
        proposal = driver.run(session.advance(header, committed, 4, price=Price(0.0, 0.4), judged=judged))
        lengths.append(len(proposal))
        judged = Judged(header.prefix_hash, bytes([40] * len(proposal)))
        committed = (*proposal.token_ids[:1], 1)
    assert lengths[0] == 4
    assert lengths[-1] == 1
