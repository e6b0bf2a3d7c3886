"""A session that takes over: the question that was asked elsewhere gets the verdict that it would have got there."""

import dataclasses

import pytest
from session_loops import GREEDY, PROMPT, RULES, HandDriver, ListSequence, draft_session, target_session, toy

from outrider.drafting.proposal import Proposal
from outrider.errors import InvalidArgument
from outrider.lm.interface import run_program
from outrider.sampling.params import StoppingParams
from outrider.serving.messages import Header, OutOfStep, TargetOpening
from target_worker.session import INGESTED_ROWS, TargetSession
from target_worker.toy_drafter import HeldToy

MODEL, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.8")
LONG = StoppingParams(max_tokens=80)
JUDGE = HandDriver(MODEL.logits_for)


def decided(verdict):
    """What a verdict says, but for its epoch and its times."""
    counts = verdict.num_accepted, verdict.num_draft_tokens, verdict.soft_acceptances
    return verdict.committed_ids, verdict.origins, verdict.finish, verdict.drafted_ids, counts


def taking_over(session, params, epoch, **fields):
    output = tuple(session.log.ids[len(PROMPT) :])
    return target_session(MODEL, params, LONG, epoch=epoch, committed_ids=output, deferred=True, **fields)


def header_in(session, epoch):
    return dataclasses.replace(session.log.header, epoch=epoch)


@pytest.mark.parametrize("name", RULES)
def test_a_round_whose_verdict_was_lost_is_decided_as_it_was(name):
    params, num_accepted = RULES[name], 0
    session = target_session(MODEL, params, LONG)
    JUDGE.run(session.open())
    for epoch in range(2, 14):
        drafts = draft_session(DRAFT, params, LONG, committed_ids=tuple(session.log.ids[len(PROMPT) :]))
        proposal = HandDriver(DRAFT.logits_for).run(drafts.advance(drafts.log.header, (), 4))
        other, header = taking_over(session, params, epoch), header_in(session, epoch)
        lost = JUDGE.run(session.verify(session.log.header, (), proposal))
        again = JUDGE.run(other.verify(header, (), proposal))
        assert decided(again) == decided(lost)
        assert again.header == header
        assert other.sequence.token_ids == session.sequence.token_ids == other.log.ids[:-1]
        num_accepted += lost.num_accepted
    assert num_accepted > 0, "INCONCLUSIVE"


@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_as_it_would_have(name):
    session, verdicts, again = target_session(MODEL, RULES[name], LONG), [], []
    JUDGE.run(session.open())
    other, header = taking_over(session, RULES[name], 2), header_in(session, 2)
    JUDGE.run(session.decode(session.log.header, (), 9, verdicts.append))
    JUDGE.run(other.decode(header, (), 9, again.append))
    assert list(map(decided, again)) == list(map(decided, verdicts))


@pytest.mark.parametrize("name", RULES)
def test_its_own_drafts_are_made_again_too(name):
    held, num_drafted = {"toy": HeldToy("toy", "toy:agreement=0.8", MODEL)}, 0

    def session_with(**fields):
        opening = TargetOpening(prompt_ids=PROMPT, sampling=RULES[name], stopping=LONG, max_draft_tokens=8, **fields)
        session = TargetSession(opening, vocab_size=16, context_length=4096, max_draft_tokens=8, drafters=held)
        session.sequence = ListSequence(session.reserved_length)
        return session

    session = session_with(epoch=1)
    JUDGE.run(session.open())
    for epoch in range(2, 10):
        other = session_with(epoch=epoch, committed_ids=session.log.ids[len(PROMPT) :], deferred=True)
        header = header_in(session, epoch)
        lost = JUDGE.run(session.verify(session.log.header, num_draft_tokens=3))
        assert decided(JUDGE.run(other.verify(header, num_draft_tokens=3))) == decided(lost)
        num_drafted += len(lost.drafted_ids)
    assert num_drafted > 0, "INCONCLUSIVE"


def test_nothing_is_decided_before_it_is_asked_and_the_first_token_can_be():
    session = target_session(MODEL, GREEDY, LONG)
    first = JUDGE.run(session.open())
    other = target_session(MODEL, GREEDY, LONG, epoch=2, deferred=True)
    assert other.log.ids == list(PROMPT)
    assert decided(JUDGE.run(other.verify(other.log.header))) == decided(first)


def test_logprobs_of_the_prompt_come_with_the_first_verdict_whoever_gives_it():
    told, again = [], []
    JUDGE.run(target_session(MODEL, GREEDY, LONG, prompt_logprobs=2).open(lambda *one: told.append(one)))
    other = target_session(MODEL, GREEDY, LONG, epoch=2, deferred=True, prompt_logprobs=2)
    verdict = JUDGE.run(other.verify(other.log.header, tell_prompt=lambda *one: again.append(one)))
    assert again == told
    assert JUDGE.run(other.verify(verdict.header, tell_prompt=lambda *one: again.append(one))) is verdict
    assert again == told, "once"


def test_a_prefix_is_computed_in_the_background_and_a_little_at_a_time():
    prompt = [i * i % 16 for i in range(3 * INGESTED_ROWS)]
    session = target_session(MODEL, GREEDY, LONG, prompt_ids=prompt, deferred=True)
    forwards, hand = [], HandDriver(MODEL.logits_for)

    def forward(request):
        forwards.append((len(request.token_ids), request.num_logits, request.background))
        return hand.forward(request)

    assert run_program(session.ingest(session.log.header), forward) == session.log.header
    assert forwards == [(INGESTED_ROWS, 0, True)] * 2 + [(INGESTED_ROWS - 1, 0, True)]
    assert session.sequence.committed_length == len(prompt) - 1
    longer = Header(1, len(prompt) + 2, target_session(MODEL, prompt_ids=[*prompt, 3, 4]).log.prefix_hash)
    forwards.clear()
    assert run_program(session.ingest(longer, (3, 4)), forward) == longer
    assert forwards == [(2, 0, True)]
    assert run_program(session.ingest(longer, (3, 4)), forward) == longer, "repeated"
    assert len(forwards) == 1
    with pytest.raises(OutOfStep) as ahead:
        run_program(session.ingest(dataclasses.replace(longer, base_length=len(prompt) + 9), (1,)), forward)
    assert ahead.value.header == longer
    assert run_program(session.ingest(dataclasses.replace(longer, epoch=0)), forward) == longer, "stale"
    verdict = hand.run(session.verify(longer, (), Proposal()))
    assert verdict.num_draft_tokens == 0


def test_a_suspect_that_wants_a_token_at_once_is_refused():
    with pytest.raises(InvalidArgument) as refusal:
        target_session(MODEL, GREEDY, num_suspect_tokens=1)
    assert refusal.value.field == "open.num_suspect_tokens"
