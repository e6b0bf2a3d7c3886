"""A target that drafts by itself: same text, same law, fewer passes; and whatever its drafter does costs speed only."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import scaled
from law import chi_square, joint_law
from session_loops import (
    BUSY,
    GREEDY,
    PROMPT,
    RULES,
    HandDriver,
    ListSequence,
    header_after,
    plain_text,
    toy,
)

from outrider.drafting.proposal import Proposal
from outrider.errors import DeadEnd, InvalidArgument
from outrider.lm.interface import Forward
from outrider.sampling.params import Finish, StoppingParams
from outrider.server_info import TargetDrafter
from outrider.serving.messages import TargetOpening
from outrider.serving.session_log import SessionCounters
from target_worker.drafters import MAX_FAILURES
from target_worker.session import TargetSession
from target_worker.toy_drafter import HeldToy

MODEL = toy("vocab=16,seed=1")
GOOD = {"toy": HeldToy("toy", "toy:agreement=0.9", MODEL)}


def session_with(drafters, sampling=GREEDY, stopping=None, *, model=MODEL, **fields):
    opening = TargetOpening(
        **{"epoch": 1, "prompt_ids": PROMPT, "max_draft_tokens": 8, **fields},
        sampling=sampling,
        stopping=stopping or StoppingParams(max_tokens=40),
    )
    limits = dict(vocab_size=model.vocab_size, context_length=4096, max_draft_tokens=16)
    session = TargetSession(opening, **limits, drafters=drafters, counters=SessionCounters())
    session.sequence = ListSequence(session.reserved_length)
    return session


def run(session, num_draft_tokens, *, model=MODEL, how="verify", drafter=""):
    """Verdicts of the whole stream."""
    hand = HandDriver(model.logits_for)
    verdicts = [hand.run(session.open())]
    wish = dict(drafter=drafter, num_draft_tokens=num_draft_tokens)
    while session.finish is Finish.NONE:
        if how == "verify":
            verdicts.append(hand.run(session.verify(session.log.header, **wish)))
        else:
            hand.run(session.decode(session.log.header, (), 7, verdicts.append, **wish))
        assert session.sequence.token_ids == session.log.ids[:-1]
    return verdicts


def text_of(verdicts):
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_text_is_that_of_plain_decoding(rule, busy, gamma, how):
    sampling = dataclasses.replace(RULES[rule], **busy)
    session = session_with(GOOD, sampling)
    verdicts = run(session, gamma, how=how)
    assert text_of(verdicts) == plain_text(MODEL, sampling)
    num_drafted = sum(verdict.num_draft_tokens for verdict in verdicts)
    assert 0 < sum(verdict.num_accepted for verdict in verdicts) < num_drafted, "INCONCLUSIVE"
    assert len(verdicts) < 40
    assert session.log.history.num_output_tokens == 40


def test_the_verdict_tells_what_was_drafted():
    session = session_with(GOOD)
    for verdict in run(session, 4)[1:]:
        assert len(verdict.drafted_ids) == verdict.num_draft_tokens == len(verdict.soft_acceptances)
        accepted = verdict.committed_ids[: verdict.num_accepted]
        assert verdict.drafted_ids[: verdict.num_accepted] == accepted
        assert verdict.drafted_parents == ()
        assert len(verdict.row_choices) == verdict.num_draft_tokens + 1 or not verdict.num_draft_tokens
        assert (verdict.draft_us > 0) == bool(verdict.drafted_ids)


@pytest.mark.parametrize("busy", [{}, {"top_k": 3, "temperature": 1.3}, {"repetition_penalty": 1.7}], ids=str)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("how", ["verify", "decode"])
def test_sampled_text_has_the_targets_law(rule, busy, how):
    """The first tokens of many streams, against plain sampling enumerated."""
    model = toy("vocab=5,seed=3,order=2,scale=1.2")
    held = {"toy": HeldToy("toy", "toy:agreement=0.6", model)}
    params = dataclasses.replace(RULES[rule], **busy)
    counts, num_drafted, num_accepted = {}, 0, 0
    for seed in range(scaled(6000, at_least=1200)):
        session = session_with(
            held, dataclasses.replace(params, seed=seed), StoppingParams(max_tokens=6), model=model, prompt_ids=(0, 1)
        )
        verdicts = run(session, 3, model=model, how=how)
        text = tuple(text_of(verdicts)[:3])
        counts[text] = counts.get(text, 0) + 1
        num_drafted += sum(verdict.num_draft_tokens for verdict in verdicts)
        num_accepted += sum(verdict.num_accepted for verdict in verdicts)
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(Table(model), params, 3, prompt=(0, 1))) > 1e-4


class Table:
    """A toy as `law` reads models."""

    def __init__(self, model):
        self._model = model

    def row(self, ids):
        return self._model.logits_for(ids)


def test_drafts_given_are_used_as_they_are():
    session, hand = session_with(GOOD), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    given = Proposal(token_ids=(9, 9))
    verdict = hand.run(session.verify(session.log.header, (), given, drafter="toy", num_draft_tokens=5))
    assert (verdict.num_draft_tokens, verdict.drafted_ids, verdict.draft_us) == (2, (), 0)


def test_a_repeated_verify_drafts_nothing_again():
    session, hand = session_with(GOOD), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    header = session.log.header
    first = hand.run(session.verify(header, num_draft_tokens=4))
    assert first.num_draft_tokens == 4
    num_forwards = hand.num_forwards
    assert hand.run(session.verify(header, num_draft_tokens=2)) is first
    assert hand.run(session.verify(header)) is first
    assert hand.num_forwards == num_forwards


def test_after_a_gap_it_drafts_on():
    session, hand = session_with(GOOD), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    missing = plain_text(MODEL, GREEDY)[1:5]
    verdict = hand.run(session.verify(header_after(session, missing), missing, num_draft_tokens=3))
    assert verdict.num_draft_tokens == 3
    assert session.log.ids[3:] == plain_text(MODEL, GREEDY)[: len(session.log.ids) - 3]


@pytest.mark.parametrize("left", [1, 2, 4])
def test_the_end_of_the_stream_cuts_the_wish(left):
    session, hand = session_with(GOOD, stopping=StoppingParams(max_tokens=1 + left)), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    assert hand.run(session.verify(session.log.header, num_draft_tokens=8)).num_draft_tokens == left - 1


@pytest.mark.parametrize("credit", [1, 2, 3, 10])
def test_a_credit_is_never_overdrawn(credit):
    session, hand = session_with(GOOD), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    verdicts = []
    hand.run(session.decode(session.log.header, (), credit, verdicts.append, num_draft_tokens=8))
    assert len(text_of(verdicts)) == credit
    assert [verdict.decode_ended for verdict in verdicts] == [False] * (len(verdicts) - 1) + [True]


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize(
    ("drafters", "wish", "field", "told"),
    [
        (GOOD, dict(drafter="medusa"), "drafter", "offers toy"),
        (GOOD, dict(drafter="medusa", num_draft_tokens=1), "drafter", "offers toy"),
        ({}, dict(drafter="toy", num_draft_tokens=1), "drafter", "no drafters of its own"),
        ({}, dict(num_draft_tokens=1), "num_draft_tokens", "no drafters of its own"),
        (GOOD, dict(num_draft_tokens=9), "num_draft_tokens", "announced 8"),
    ],
)
def test_what_cannot_be_asked_for(how, drafters, wish, field, told):
    session, hand = session_with(drafters), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    with pytest.raises(InvalidArgument, match=told) as error:
        if how == "verify":
            hand.run(session.verify(session.log.header, **wish))
        else:
            hand.run(session.decode(session.log.header, (), 4, [].append, **wish))
    assert error.value.field == f"{how}.{field}"


class Scripted:
    """Drafts what `script` returns or raises, call after call; a program of target passes may come before."""

    def __init__(self, script):
        self.description = TargetDrafter("scripted", "test")
        self.name = "scripted"
        self._calls = itertools.count()
        self._script = script

    def for_session(self, log, sequence):
        self._log, self._sequence = log, sequence
        return self

    def propose(self, num_draft_tokens):
        return (yield from self._script(next(self._calls), self._log, self._sequence))

    def ingest(self):
        return
        yield


def raises(call, log, sequence):
    raise RuntimeError("no luck")
    yield


def raises_midway(call, log, sequence):
    log.history.push(3)
    log.history.push(3)
    yield Forward(sequence, [log.ids[-1], 5])
    raise ValueError("midway")


def nonsense(call, log, sequence):
    return Proposal(token_ids=(99,))
    yield


def too_many(call, log, sequence):
    return Proposal(token_ids=(1,) * 7)
    yield


@pytest.mark.parametrize("script", [raises, raises_midway, nonsense, too_many], ids=lambda script: script.__name__)
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("how", ["verify", "decode"])
def test_a_failing_drafter_costs_speed_only(script, rule, how):
    sampling = dataclasses.replace(RULES[rule], **BUSY)
    session = session_with({"scripted": Scripted(script), **GOOD}, sampling)
    verdicts = run(session, 3, how=how)
    assert text_of(verdicts) == plain_text(MODEL, sampling)
    assert not any(verdict.num_draft_tokens for verdict in verdicts)
    assert all("scripted" in verdict.proposal_fault for verdict in verdicts[1 : 1 + MAX_FAILURES])
    assert "set aside" in verdicts[2 + MAX_FAILURES].proposal_fault
    assert session.counters.num_failed_drafts == MAX_FAILURES


def has_no_token(call, log, sequence):
    log.history.push(3)
    yield Forward(sequence, [log.ids[-1], 5])
    raise DeadEnd("its vocabulary has nothing that masks leave")


@pytest.mark.parametrize("how", ["verify", "decode"])
def test_a_drafter_whom_masks_leave_no_token_has_not_failed(how):
    scripted = Scripted(has_no_token)
    session = session_with({"scripted": scripted})
    verdicts = run(session, 3, how=how)
    assert text_of(verdicts) == plain_text(MODEL, GREEDY)
    assert not any(verdict.num_draft_tokens or verdict.proposal_fault for verdict in verdicts)
    assert session.counters.num_failed_drafts == 0


def test_failures_of_one_drafter_do_not_silence_another():
    session, hand = session_with({"scripted": Scripted(raises), **GOOD}), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    for _ in range(MAX_FAILURES + 1):
        assert hand.run(session.verify(session.log.header, num_draft_tokens=2)).proposal_fault
    verdict = hand.run(session.verify(session.log.header, drafter="toy", num_draft_tokens=2))
    assert (verdict.num_draft_tokens, verdict.proposal_fault) == (2, "")


def test_a_toy_head_whose_rows_cannot_be_read_ends_its_chain_before_them():
    held = {"toy": HeldToy("toy", "toy:agreement=1;nan_after=7", MODEL)}
    verdicts = run(session_with(held), 8)
    assert text_of(verdicts) == plain_text(MODEL, GREEDY)
    assert [verdict.num_draft_tokens for verdict in verdicts[1:3]] == [4, 0]
    assert "NaN" in verdicts[2].proposal_fault
    assert not verdicts[1].proposal_fault


def test_a_toy_head_is_its_target_with_other_keys():
    assert np.array_equal(
        HeldToy("toy", "toy:agreement=1", MODEL).for_session(None, None)._model.logits_for(PROMPT),
        MODEL.logits_for(PROMPT),
    )
    with pytest.raises(InvalidArgument, match="toy target"):
        HeldToy("toy", "toy:agreement=1", object())
