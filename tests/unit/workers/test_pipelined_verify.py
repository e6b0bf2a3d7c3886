"""A verify sent before the verdict that it counts on: the same round as later, or no round at all."""

import dataclasses

import pytest
from session_loops import RULES, HandDriver, draft_session, target_session, toy

from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Finish, StoppingParams
from outrider.serving.messages import Header, OutOfStep

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.9")
LONG = StoppingParams(max_tokens=80)


def proposed(params, output, num_tokens=3):
    session = draft_session(DRAFT, params, LONG, committed_ids=tuple(output))
    return HandDriver(DRAFT.logits_for).run(session.advance(session.log.header, (), num_tokens))


def after(header, ids):
    return Header(header.epoch, header.base_length + len(ids), hash_ids(ids, header.prefix_hash))


@pytest.mark.parametrize("name", RULES)
def test_it_is_the_round_that_it_would_be_later_or_none(name):
    """Two sessions: one is told of every round in time, the other before its verdict, and of wrong guesses too."""
    params = RULES[name]
    one, other, judge = (
        target_session(TARGET, params, LONG),
        target_session(TARGET, params, LONG),
        HandDriver(TARGET.logits_for),
    )
    output = list(judge.run(one.open()).committed_ids)
    judge.run(other.open())
    num_used = 0
    for _ in range(12):
        header, chain = one.log.header, proposed(params, output)
        verdict = judge.run(one.verify(header, (), chain))
        assert judge.run(other.verify(header, (), chain)) == dataclasses.replace(
            verdict,
            queue_us=other._last.queue_us,
            compute_us=other._last.compute_us,
            sampling_us=other._last.sampling_us,
        )
        came, before = verdict.committed_ids, list(other.log.ids)
        wrong = (*came[:-1], (came[-1] + 1) % 16)
        for guess in (wrong, came[:-1], (*came, 1)):  # another token, a shorter and a longer one
            if guess:
                program = other.verify(after(header, guess), (), chain, expected_token_id=guess[-1])
                assert judge.run(program) is None
        assert judge.run(other.verify(after(header, came), (), chain, expected_token_id=(came[-1] + 1) % 16)) is None
        assert other.log.ids == before
        output += came
        following = proposed(params, output)
        a = judge.run(one.verify(after(header, came), (), following))
        b = judge.run(other.verify(after(header, came), (), following, expected_token_id=came[-1]))
        assert (a.committed_ids, a.origins, a.header) == (b.committed_ids, b.origins, b.header)
        output += a.committed_ids
        num_used += 1
    assert num_used == 12
    assert other.counters.num_dropped_verifies >= 3 * num_used
    assert other.counters.num_out_of_step == one.counters.num_dropped_verifies == 0


def test_sent_twice_or_of_another_epoch_it_commits_nothing_more():
    params, judge = RULES["block"], HandDriver(TARGET.logits_for)
    session = target_session(TARGET, params, LONG, epoch=2)
    judge.run(session.open())
    header = session.log.header
    verdict = judge.run(session.verify(header, (), proposed(params, session.log.ids[3:])))
    following = after(header, verdict.committed_ids)
    for epoch in (1, 3):
        stale = dataclasses.replace(following, epoch=epoch)
        assert judge.run(session.verify(stale, expected_token_id=verdict.committed_ids[-1])) is None
    assert judge.run(session.verify(following, expected_token_id=verdict.committed_ids[-1])) is not None
    ids = list(session.log.ids)
    assert judge.run(session.verify(following, expected_token_id=verdict.committed_ids[-1])) is None
    assert session.log.ids == ids
    # without the mark it is a repetition, which gets the same verdict
    assert judge.run(session.verify(following)) is session._last
    with pytest.raises(OutOfStep):
        judge.run(session.verify(after(following, (1, 2, 3, 4, 5))))


def test_after_the_end_of_the_text_it_is_dropped():
    params, judge = RULES["greedy"], HandDriver(TARGET.logits_for)
    session = target_session(TARGET, params, StoppingParams(max_tokens=3))
    judge.run(session.open())
    while session.finish is Finish.NONE:
        last = judge.run(session.verify(session.log.header))
    assert judge.run(session.verify(session.log.header, expected_token_id=last.committed_ids[-1])) is None
    assert session.counters.num_dropped_verifies == 1
