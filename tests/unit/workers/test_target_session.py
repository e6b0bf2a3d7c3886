"""The target's session: one committed length, idempotent verify, every way to be out of step, every way to end."""

import dataclasses

import numpy as np
import pytest
from session_loops import GREEDY, PROMPT, RULES, HandDriver, header_after, plain_text, target_session, toy

from outrider.drafting.proposal import EMPTY, Proposal
from outrider.errors import FailedPrecondition, Internal, InvalidArgument
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Finish, Origin, SamplingParams, StoppingParams
from outrider.serving.messages import Header, OutOfStep, TargetOpening
from outrider.serving.session_log import SessionCounters
from target_worker.session import TargetSession

MODEL = toy("vocab=16,seed=1")
PLAIN = plain_text(MODEL, GREEDY)
HAND = HandDriver(MODEL.logits_for)


def opened(**fields):
    session = target_session(MODEL, **fields)
    HAND.run(session.open())
    return session


def wrong(token_id):
    return (token_id + 1) % 16


@pytest.mark.parametrize("num_right", range(9))
def test_cache_and_log_after_any_number_of_accepts(num_right):
    session = opened()
    drafts = (*PLAIN[1 : 1 + num_right], *(wrong(t) for t in PLAIN[1 + num_right : 9]))
    before = session.log.header
    verdict = HAND.run(session.verify(before, (), Proposal(token_ids=drafts)))
    assert verdict.header == before
    assert verdict.num_accepted == num_right
    assert verdict.committed_ids == tuple(PLAIN[1 : 2 + num_right])
    last = Origin.BONUS if num_right == 8 else Origin.CORRECTION
    assert verdict.origins == (Origin.ACCEPTED,) * num_right + (last,)
    assert session.log.ids == [*PROMPT, *PLAIN[: 2 + num_right]]
    assert session.log.prefix_hash == hash_ids(session.log.ids)
    assert session.sequence.token_ids == session.log.ids[:-1]
    assert session.sequence.num_truncated == 8 - num_right
    again = HAND.run(session.verify(session.log.header))
    assert again.committed_ids == (PLAIN[2 + num_right],)


def test_one_pass_over_the_last_token_and_the_drafts():
    session, hand = target_session(MODEL), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    assert (hand.num_forwards, hand.num_rows) == (1, 3)
    hand.run(session.verify(session.log.header, (), Proposal(token_ids=tuple(PLAIN[1:5]))))
    assert (hand.num_forwards, hand.num_rows) == (2, 3 + 1 + 4)


def test_repeated_verify_gets_the_first_verdict_whatever_it_carries():
    session = opened()
    header = session.log.header
    first = HAND.run(session.verify(header, (), Proposal(token_ids=tuple(PLAIN[1:4]))))
    length = len(session.log.ids)
    forwards = HAND.num_forwards
    assert HAND.run(session.verify(header, (), Proposal(token_ids=(9, 9)))) is first
    assert HAND.run(session.verify(header)) is first
    assert (HAND.num_forwards, len(session.log.ids)) == (forwards, length)
    assert session.counters.num_repeated_verifies == 2


def test_repeat_of_the_opening_round_gets_the_first_token_again():
    session = target_session(MODEL)
    first = HAND.run(session.open())
    assert HAND.run(session.verify(Header(1, 3, hash_ids(PROMPT)))) is first


def out_of_step_headers(session):
    now = session.log.header
    return {
        "ahead": header_after(session, [5]),
        "behind": Header(1, 3 - 1, hash_ids(PROMPT[:2])),
        "other_prefix": dataclasses.replace(now, prefix_hash=now.prefix_hash ^ 1),
        "later_epoch": dataclasses.replace(now, epoch=2),
        "empty": Header(1, 0, 0),
    }


@pytest.mark.parametrize("case", ["ahead", "behind", "other_prefix", "later_epoch", "empty"])
@pytest.mark.parametrize("kind", ["verify", "decode"])
def test_out_of_step_tells_the_own_state_and_changes_nothing(case, kind):
    session = opened()
    HAND.run(session.verify(session.log.header))
    now, ids = session.log.header, list(session.log.ids)
    header = out_of_step_headers(session)[case]
    program = session.verify(header) if kind == "verify" else session.decode(header, (), 4, lambda verdict: None)
    with pytest.raises(OutOfStep) as error:
        HAND.run(program)
    assert error.value.header == now == session.log.header
    assert session.log.ids == ids
    assert session.counters.num_out_of_step == 1
    assert HAND.run(session.verify(now)).committed_ids == (PLAIN[2],)


def test_a_stale_epoch_is_a_no_op():
    session = opened(epoch=3)
    before = session.log.header
    assert HAND.run(session.verify(dataclasses.replace(before, epoch=2))) is None
    emitted = []
    HAND.run(session.decode(dataclasses.replace(before, epoch=2), (), 3, emitted.append))
    assert not emitted
    assert session.log.header == before
    assert session.counters.num_stale_messages == 2


@pytest.mark.parametrize("num_sent", [3, 5])
def test_missing_ids_fill_the_gap(num_sent):
    """The last three are missing; more may be sent than are missing."""
    session = opened()
    missing = PLAIN[1:4]
    header = header_after(session, missing)
    sent = [*PROMPT, PLAIN[0], *missing][-num_sent:]
    verdict = HAND.run(session.verify(header, sent, Proposal(token_ids=tuple(PLAIN[4:6]))))
    assert verdict.header == header
    assert verdict.committed_ids == tuple(PLAIN[4:7])


@pytest.mark.parametrize("sent", [[], [PLAIN[2]], [7, 7]], ids=["none", "too_few", "others"])
def test_ids_that_do_not_fill_the_gap_are_out_of_step(sent):
    session = opened()
    with pytest.raises(OutOfStep):
        HAND.run(session.verify(header_after(session, PLAIN[1:3]), sent))
    assert session.log.ids == [*PROMPT, PLAIN[0]]


def test_a_gap_of_impossible_ids_is_refused():
    session = opened()
    with pytest.raises(InvalidArgument, match="vocabulary has 16"):
        HAND.run(session.verify(header_after(session, [99]), [99]))
    assert session.log.ids == [*PROMPT, PLAIN[0]]


@pytest.mark.parametrize("at", range(1, 6))
def test_stop_token_cuts_everything_at_it(at):
    stop_id = PLAIN[at]
    at = PLAIN.index(stop_id)
    if at == 0:
        pytest.skip("the first token is this stop token")
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({stop_id}))
    session = opened(stopping=stopping, logprobs=True)
    verdict = HAND.run(session.verify(session.log.header, (), Proposal(token_ids=tuple(PLAIN[1:9]))))
    assert verdict.committed_ids == tuple(PLAIN[1 : at + 1])
    assert (verdict.finish, verdict.matched_stop_token_id) == (Finish.STOP, stop_id)
    assert verdict.num_accepted == len(verdict.origins) == len(verdict.logprobs.unpacked().token_logprobs) == at
    with pytest.raises(FailedPrecondition, match="ended"):
        HAND.run(session.verify(session.log.header))


@pytest.mark.parametrize("limit", ["max_tokens", "context"])
@pytest.mark.parametrize("left", range(1, 7))
def test_length_cuts_drafts_before_the_pass(limit, left):
    """After the first token `left` more fit: at most left - 1 drafts are of use, and no row is spent on others."""
    if limit == "max_tokens":
        session, hand = (
            target_session(MODEL, stopping=StoppingParams(max_tokens=1 + left)),
            HandDriver(MODEL.logits_for),
        )
    else:
        session, hand = target_session(MODEL, context_length=4 + left), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    verdict = hand.run(session.verify(session.log.header, (), Proposal(token_ids=tuple(PLAIN[1:9]))))
    assert verdict.num_draft_tokens == left - 1
    assert hand.num_rows == 3 + left
    assert verdict.committed_ids == tuple(PLAIN[1 : 1 + left])
    assert verdict.finish is Finish.LENGTH
    assert verdict.matched_stop_token_id is None


def test_a_single_token_is_a_whole_text():
    session = target_session(MODEL, stopping=StoppingParams(max_tokens=1))
    assert HAND.run(session.open()).finish is Finish.LENGTH


def test_min_tokens_holds_at_drafted_positions():
    stop_id = PLAIN[3]
    stopping = StoppingParams(max_tokens=12, min_tokens=8, stop_token_ids=frozenset({stop_id}))
    expected = plain_text(MODEL, GREEDY, stopping)
    assert stop_id not in expected[:8]
    session = opened(stopping=stopping)
    HAND.run(session.verify(session.log.header, (), Proposal(token_ids=tuple(PLAIN[1:6]))))
    assert session.log.ids[3:] == expected[: len(session.log.ids) - 3]


def decode(session, credit, **kwargs):
    verdicts = []
    HAND.run(session.decode(session.log.header, (), credit, verdicts.append, **kwargs))
    return verdicts


def test_decode_gives_a_verdict_per_token_and_ends_once():
    session = opened()
    verdicts = decode(session, 6)
    assert [v.committed_ids for v in verdicts] == [(t,) for t in PLAIN[1:7]]
    assert [v.decode_ended for v in verdicts] == [False] * 5 + [True]
    assert [v.header.base_length for v in verdicts] == list(range(4, 10))
    verdict = HAND.run(session.verify(session.log.header, (), Proposal(token_ids=(PLAIN[7],))))
    assert verdict.num_accepted == 1
    assert not verdict.decode_ended


def test_decode_ends_with_the_stream():
    verdicts = decode(opened(stopping=StoppingParams(max_tokens=5)), 100)
    assert [v.finish for v in verdicts] == [Finish.NONE] * 3 + [Finish.LENGTH]
    assert [v.decode_ended for v in verdicts] == [False] * 3 + [True]


def test_decode_stops_with_the_token_in_flight():
    session = opened()
    verdicts = []

    def emit(verdict):
        verdicts.append(verdict)
        if len(verdicts) == 3:
            session.stop_decoding()

    HAND.run(session.decode(session.log.header, (), 100, emit))
    assert [v.decode_ended for v in verdicts] == [False, False, False, True]


def test_a_stop_before_the_first_pass_is_not_lost_and_one_too_late_is_harmless():
    session = opened()
    verdicts = []
    program = session.decode(session.log.header, (), 100, verdicts.append)
    session.stop_decoding()
    HAND.run(program)
    assert [v.decode_ended for v in verdicts] == [True]
    session.stop_decoding()
    assert len(decode(session, 2)) == 2


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_decode_and_rounds_give_one_text(name):
    session = target_session(MODEL, RULES[name])
    HAND.run(session.open())
    decode(session, 10)
    HAND.run(session.verify(session.log.header, (), Proposal(token_ids=(1, 2, 3))))
    decode(session, 100)
    assert session.log.ids[3:] == plain_text(MODEL, RULES[name])


def test_decode_without_credit_is_refused():
    session = opened()
    with pytest.raises(InvalidArgument, match="credit_tokens"):
        session.decode(session.log.header, (), 0, print)


@pytest.mark.parametrize("name", RULES)
def test_reopening_with_what_was_committed_goes_on_from_there(name):
    plain = plain_text(MODEL, RULES[name])
    session = target_session(MODEL, RULES[name], epoch=2, committed_ids=plain[:7])
    verdict = HAND.run(session.open())
    assert verdict.header.base_length == 3 + 7
    assert verdict.committed_ids == (plain[7],)


def test_bad_logits_fail_with_internal():
    session = target_session(MODEL)
    with pytest.raises(Internal, match="NaN"):
        HandDriver(lambda ids: np.full(16, np.nan, np.float32)).run(session.open())


def test_more_drafts_than_announced_are_a_fault():
    session = opened(max_draft_tokens=2)
    verdict = HAND.run(session.verify(session.log.header, (), Proposal(token_ids=tuple(PLAIN[1:4]))))
    assert "at most 2" in verdict.proposal_fault
    assert verdict.committed_ids == (PLAIN[1],)
    assert session.counters.num_faulty_proposals == 1


def test_an_unreadable_proposal_is_a_fault_too():
    session = opened()
    verdict = HAND.run(session.verify(session.log.header, (), EMPTY, fault="7 bytes of q_ids"))
    assert verdict.proposal_fault == "7 bytes of q_ids"
    assert verdict.committed_ids == (PLAIN[1],)


REFUSED = {
    "session_id": dict(session_id=b"short"),
    "prompt_ids": dict(prompt_ids=()),
    "prompt_ids id": dict(prompt_ids=(1, 16)),
    "prompt_ids and": dict(prompt_ids=(1,) * 20),
    "committed_ids": dict(committed_ids=(1, 77)),
    "committed_ids holds": dict(committed_ids=(1,) * 10),
    "committed_ids ends": dict(committed_ids=(1, 2), stopping=StoppingParams(10, 0, frozenset({2}))),
    "max_draft_tokens": dict(max_draft_tokens=17),
    "top_logprobs": dict(logprobs=True, top_logprobs=21),
    "top_logprobs needs": dict(top_logprobs=1),
    "sampling.temperature": dict(sampling=SamplingParams(temperature=float("nan"))),
    "sampling.temperature negative": dict(sampling=SamplingParams(temperature=-1.0)),
    "sampling.temperature tiny": dict(sampling=SamplingParams(temperature=0.001)),
    "sampling.temperature inf": dict(sampling=SamplingParams(temperature=float("inf"))),
    "sampling.top_k": dict(sampling=SamplingParams(top_k=-1)),
    "sampling.top_p": dict(sampling=SamplingParams(top_p=0.0)),
    "sampling.top_p 2": dict(sampling=SamplingParams(top_p=2.0)),
    "sampling.min_p": dict(sampling=SamplingParams(min_p=1.5)),
    "sampling.repetition_penalty": dict(sampling=SamplingParams(repetition_penalty=0.0)),
    "sampling.presence_penalty": dict(sampling=SamplingParams(presence_penalty=3.0)),
    "sampling.frequency_penalty": dict(sampling=SamplingParams(frequency_penalty=float("nan"))),
    "sampling.logit_bias_ids": dict(sampling=SamplingParams(logit_bias={16: 1.0})),
    "sampling.logit_bias_values": dict(sampling=SamplingParams(logit_bias={1: 101.0})),
    "stopping.max_tokens": dict(stopping=StoppingParams(0)),
    "stopping.min_tokens": dict(stopping=StoppingParams(5, 6)),
    "stopping.stop_token_ids": dict(stopping=StoppingParams(5, 0, frozenset({16}))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_opening_refuses_by_name(case):
    values = dict(epoch=1, prompt_ids=PROMPT, sampling=GREEDY, stopping=StoppingParams(max_tokens=10))
    limits = dict(vocab_size=16, context_length=20, max_draft_tokens=16)
    TargetSession(TargetOpening(**values), **limits)
    field = f"open.{case.split()[0]}"
    with pytest.raises(InvalidArgument) as error:
        TargetSession(TargetOpening(**{**values, **REFUSED[case]}), **limits)
    assert error.value.field == field
    assert field in error.value.message


def test_counters_are_shared_between_sessions():
    counters = SessionCounters()
    for _ in range(2):
        session = target_session(MODEL, counters=counters)
        HAND.run(session.open())
        HAND.run(session.verify(session.log.header, (), EMPTY, fault="x"))
    assert (counters.num_verifies, counters.num_faulty_proposals) == (2, 2)
