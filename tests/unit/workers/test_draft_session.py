"""The draft's session: whatever happened before, it proposes what a fresh one would."""

import dataclasses

import numpy as np
import pytest
from conftest import scaled
from session_loops import BUSY, GREEDY, PROMPT, RULES, HandDriver, ListSequence, draft_session, header_after, toy

from outrider.errors import InvalidArgument
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.messages import OutOfStep

MODEL = toy("vocab=16,seed=1")
HAND = HandDriver(MODEL.logits_for)
LONG = StoppingParams(max_tokens=400)
PARAMS = {
    **RULES,
    "busy": SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=9, temperature=0.7, top_k=8, top_p=0.9, **BUSY),
    "busy_coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=9, temperature=0.7, min_p=0.01, **BUSY),
}


def advance(session, committed_ids, num_draft_tokens, drafter=""):
    return HAND.run(session.advance(header_after(session, committed_ids), committed_ids, num_draft_tokens, drafter))


def content(proposal):
    """What must be equal: ids and exact distributions; not times."""
    q = [None if x is None else (x.ids.tolist(), x.counts.tolist()) for x in proposal.q]
    return proposal.token_ids, q, proposal.drafter


def fresh_proposal(session_like, params, committed_ids, num_draft_tokens, **kwargs):
    session = draft_session(MODEL, params, LONG, committed_ids=committed_ids, **kwargs)
    HAND.run(session.prefill())
    return HAND.run(session.advance(session.log.header, (), num_draft_tokens))


@pytest.mark.parametrize("name", PARAMS)
def test_after_any_history_it_proposes_what_a_fresh_session_does(name):
    full = partial = behind = 0
    for seed in range(scaled(60, at_least=6)):
        rng = np.random.default_rng(seed)
        session = draft_session(MODEL, PARAMS[name], LONG)
        if seed % 2:
            HAND.run(session.prefill())
        committed = [int(rng.integers(16))]
        new = list(committed)
        for _ in range(12):
            gamma = int(rng.integers(0, 7))
            proposal = advance(session, new, gamma)
            if proposal is None:
                assert gamma == 0
                new = [int(t) for t in rng.integers(16, size=rng.integers(1, 51))]
                behind += len(new) >= 50
            else:
                expected = fresh_proposal(session, PARAMS[name], committed, gamma)
                assert content(proposal) == content(expected)
                num_accepted = int(rng.integers(len(proposal) + 1))
                full += num_accepted == len(proposal)
                partial += num_accepted < len(proposal)
                wrong = (proposal.token_ids[num_accepted] + 1) % 16 if num_accepted < len(proposal) else 3
                new = [*proposal.token_ids[:num_accepted], wrong]
            committed += new
    assert full > 0
    assert partial > 0


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("ingest_between", [False, True])
def test_fifty_plain_tokens_behind(name, ingest_between):
    rng = np.random.default_rng(1)
    plain = [int(t) for t in rng.integers(16, size=50)]
    session = draft_session(MODEL, PARAMS[name], LONG)
    HAND.run(session.prefill())
    advance(session, plain[:1], 5)
    if ingest_between:
        assert advance(session, plain[1:30], 0) is None
        proposal = advance(session, plain[30:], 5)
    else:
        proposal = advance(session, plain[1:], 5)
    assert content(proposal) == content(fresh_proposal(session, PARAMS[name], plain, 5))


def test_many_plain_tokens_are_taken_in_with_a_pass_of_their_own_and_only_when_wanted():
    """So that what drafts take is told without it."""
    session, hand = draft_session(MODEL, GREEDY, LONG), HandDriver(MODEL.logits_for)
    hand.run(session.prefill())
    assert (hand.num_forwards, hand.num_rows) == (1, len(PROMPT) - 1)
    plain = [1] * 50
    proposal = hand.run(session.advance(header_after(session, plain), plain, 3))
    assert hand.num_forwards == 1 + 1 + 3
    assert proposal.num_ingested_tokens == 51
    assert proposal.catch_up_us > 0
    assert hand.num_rows == 2 + 51 + 2, "the last draft is not computed"


def test_few_plain_tokens_are_taken_in_along_with_the_first_draft():
    session, hand = draft_session(MODEL, GREEDY, LONG), HandDriver(MODEL.logits_for)
    hand.run(session.prefill())
    proposal = hand.run(session.advance(header_after(session, [1] * 5), [1] * 5, 3))
    assert hand.num_forwards == 1 + 3
    assert (proposal.num_ingested_tokens, proposal.catch_up_us) == (6, 0)


def test_wanting_the_same_again_gives_the_same():
    session = draft_session(MODEL, PARAMS["busy"], LONG)
    first = advance(session, [4], 5)
    assert content(advance(session, [], 5)) == content(first)
    assert content(advance(session, [], 3))[0] == first.token_ids[:3]


@pytest.mark.parametrize("name", ["busy", "busy_coupled", "greedy"])
def test_each_draft_counts_the_drafts_before_it(name):
    """min_tokens and penalties too: draft i is what comes first once the drafts before it are committed."""
    stopping = StoppingParams(max_tokens=400, min_tokens=4, stop_token_ids=frozenset({1, 2, 3, 4}))
    session = draft_session(MODEL, PARAMS[name], stopping)
    proposal = advance(session, [9], 6)
    assert len(proposal) >= 3
    for index, token_id in enumerate(proposal.token_ids):
        committed = [9, *proposal.token_ids[:index]]
        if committed[-1] in stopping.stop_token_ids:
            break
        alone = draft_session(MODEL, PARAMS[name], stopping, committed_ids=committed)
        first = HAND.run(alone.advance(alone.log.header, (), 1))
        assert first.token_ids == (token_id,)
        assert content(first)[1] == content(proposal)[1][index : index + 1]


@pytest.mark.parametrize("name", RULES)
def test_q_is_on_the_proposal_only_where_a_ratio_is_taken(name):
    proposal = advance(draft_session(MODEL, RULES[name]), [1], 4)
    assert len(proposal) == 4
    if name in ("greedy", "coupled"):
        assert proposal.q == ()
    else:
        assert all(int(q.counts.sum()) == 65_536 for q in proposal.q)
        assert all((q.ids == token_id).any() for q, token_id in zip(proposal.q, proposal.token_ids, strict=True))


def test_at_most_so_many_entries():
    session = draft_session(MODEL, RULES["block"], max_q_entries=3)
    assert max(len(q.ids) for q in advance(session, [1], 6).q) <= 3


def test_drafting_ends_after_a_drafted_stop_token():
    free = advance(draft_session(MODEL, GREEDY), [1], 8).token_ids
    stop_id = free[3]
    index = free.index(stop_id)
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({stop_id}))
    assert advance(draft_session(MODEL, GREEDY, stopping), [1], 8).token_ids == free[: index + 1]


@pytest.mark.parametrize(("num_left", "expected"), [(10, 8), (4, 3), (2, 1), (1, 0), (0, 0)])
def test_drafting_ends_at_max_tokens(num_left, expected):
    """Of `num_left` tokens the target yields the last one itself."""
    session = draft_session(MODEL, GREEDY, StoppingParams(max_tokens=20))
    proposal = advance(session, [1] * (20 - num_left), 8)
    assert len(proposal) == expected


@pytest.mark.parametrize("context_length", [3, 4, 8, 12])
def test_the_own_context_end_only_ends_drafting(context_length):
    """`ListSequence` refuses to outgrow the context; ids go on being committed past it."""
    session = draft_session(MODEL, GREEDY, LONG, context_length=context_length)
    HAND.run(session.prefill())
    sizes = []
    for _ in range(14):
        sizes.append(len(advance(session, [1], 4)))
        assert advance(session, [], 0) is None
    committed_before = range(4, 18)
    assert sizes == [max(0, min(4, context_length - n + 1)) for n in committed_before]
    assert session.log.ids == [*PROMPT, *[1] * 14]


def test_a_prompt_beyond_the_context_is_served_with_empty_proposals():
    session = draft_session(MODEL, GREEDY, LONG, context_length=2, prompt_ids=(1, 2, 3, 1, 2))
    assert session.reserved_length == 0
    assert session.sequence is None
    HAND.run(session.prefill())
    assert not session.needs_sequence()
    assert advance(session, [3], 4, "model").token_ids == ()


def test_out_of_step_changes_nothing():
    session = draft_session(MODEL, GREEDY, LONG, epoch=2)
    advance(session, [1], 4)
    now, ids = session.log.header, list(session.log.ids)
    ahead = header_after(session, [5, 6])
    for header, sent in [
        (ahead, []),
        (ahead, [6]),
        (ahead, [6, 5]),
        (dataclasses.replace(now, prefix_hash=1), []),
        (dataclasses.replace(now, base_length=2), []),
        (dataclasses.replace(now, epoch=3), []),
    ]:
        with pytest.raises(OutOfStep) as error:
            HAND.run(session.advance(header, sent, 3))
        assert error.value.header == now == session.log.header
        assert session.log.ids == ids
    assert session.counters.num_out_of_step == 6
    assert HAND.run(session.advance(dataclasses.replace(now, epoch=1), [], 3)) is None
    assert session.counters.num_stale_messages == 1


def test_drafters_are_chosen_by_round_and_by_name():
    session = draft_session(MODEL, GREEDY, LONG, prompt_ids=(1, 2, 3, 4, 1, 2), drafter="tree")
    assert advance(session, [3], 2).drafter == "tree"
    assert advance(session, [4], 2, "model").drafter == "model"
    assert advance(session, [1], 2).drafter == "tree"
    with pytest.raises(InvalidArgument, match=r"eagle.*model, tree"):
        advance(session, [1], 2, "eagle")
    with pytest.raises(InvalidArgument, match=r"open\.drafter"):
        draft_session(MODEL, drafter="eagle")


def test_too_many_drafts_and_bad_q_sizes_are_refused():
    with pytest.raises(InvalidArgument) as error:
        advance(draft_session(MODEL, cap=4), [1], 5)
    assert error.value.field == "advance.num_draft_tokens"
    for entries in (0, 257):
        with pytest.raises(InvalidArgument) as error:
            draft_session(MODEL, max_q_entries=entries)
        assert error.value.field == "open.max_q_entries"


def test_a_session_needs_its_cache_once():
    session = draft_session(MODEL)
    session.sequence = None
    assert session.needs_sequence("model")
    session.sequence = ListSequence(session.reserved_length)
    assert not session.needs_sequence("model")
