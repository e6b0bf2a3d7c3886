"""Drafting ahead: a branch is what would be drafted on demand, whatever became of the rounds before it."""

import dataclasses
import itertools

import pytest
from conftest import scaled
from session_loops import BUSY, GREEDY, PROMPT, RULES, HandDriver, ListSequence, header_after, target_session, toy

from draft_worker import draft_ahead
from draft_worker.branches import RowCost
from draft_worker.session import DraftSession
from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import Forward, run_program
from outrider.sampling.params import AcceptanceRule, Finish, SamplingParams, StoppingParams
from outrider.serving.messages import AheadWish, DraftOpening
from outrider.serving.session_log import SessionCounters

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.9")
PARAMS = {
    **RULES,
    "busy": SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=9, temperature=0.7, top_k=8, top_p=0.9, **BUSY),
    "busy_coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=9, temperature=0.7, min_p=0.01, **BUSY),
    "busy_greedy": dataclasses.replace(GREEDY, **BUSY),
}
LONG = StoppingParams(max_tokens=80)
WISH = AheadWish(num_branches=12, num_draft_tokens=4)
VALUED = dataclasses.replace(WISH, value_ms=20.0)


class KnownRowCost(RowCost):
    """Not what this machine takes."""

    def __init__(self, ms: float) -> None:
        self._known_ms = ms

    def observe(self, num_rows: int, ms: float) -> None:
        pass

    @property
    def ms(self) -> float:
        return self._known_ms


def ahead_session(params, stopping=LONG, committed_ids=(), **fields):
    opening = DraftOpening(epoch=1, prompt_ids=PROMPT, committed_ids=committed_ids, sampling=params, stopping=stopping)
    session = DraftSession(
        opening, vocab_size=16, context_length=4096, drafters=("model", "tree"),
        **{"max_ahead_branches": 12, **fields},
    )  # fmt: skip
    session.sequence = ListSequence(session.ahead_length)
    session.ahead._row_cost = KnownRowCost(0.1)
    return session


def content(proposal):
    q = [None if x is None else (x.ids.tolist(), x.counts.tolist()) for x in proposal.q]
    return proposal.token_ids, q, proposal.drafter, proposal.parents


def on_demand(params, committed_ids, num_draft_tokens, stopping=LONG):
    """What a fresh session that never drafts ahead proposes."""
    session = ahead_session(params, stopping, committed_ids=committed_ids, max_ahead_branches=0)
    return HandDriver(DRAFT.logits_for).run(session.advance(session.log.header, (), num_draft_tokens))


def prefixes(session, chain, branches):
    """The committed ids that each branch goes on from, found by trying all outcomes."""
    from outrider.sampling.noise import hash_ids

    outcomes = [(*chain[:a], y) for a in range(len(chain) + 1) for y in range(16)]
    by_hash = {hash_ids(ids, session.log.prefix_hash): ids for ids in outcomes}
    return {by_hash[prefix_hash]: proposal for prefix_hash, proposal in branches.proposals.items()}


@pytest.mark.parametrize("wish", [WISH, VALUED], ids=["whole", "valued"])
@pytest.mark.parametrize("name", PARAMS)
def test_a_branch_is_what_would_be_drafted_on_demand(name, wish):
    """Token for token and count for count, round after round, after hits and misses alike."""
    params, hand = PARAMS[name], HandDriver(DRAFT.logits_for)
    session = ahead_session(params)
    target, judge = target_session(TARGET, params, LONG), HandDriver(TARGET.logits_for)
    new = judge.run(target.open()).committed_ids
    num_hits = num_misses = 0
    told = {}
    for _ in range(scaled(30, at_least=6)):
        if target.finish is not Finish.NONE:
            break
        header = header_after(session, new)
        chain = hand.run(session.advance(header, new, 4))
        if header.prefix_hash in told:
            num_hits += 1
            assert content(chain) == content(told[header.prefix_hash])
        else:
            num_misses += bool(told)
            assert content(chain) == content(on_demand(params, tuple(session.log.ids[len(PROMPT) :]), 4))
        branches = hand.run(session.draft_ahead(wish))
        output = tuple(session.log.ids[len(PROMPT) :])
        told = dict(branches.proposals)
        assert 0 < len(told) <= 12
        for ids, proposal in prefixes(session, chain.token_ids, branches).items():
            assert content(proposal) == content(on_demand(params, (*output, *ids), len(proposal)))
        assert max(map(len, told.values())) == 4
        assert wish.value_ms or {len(branch) for branch in told.values()} == {4}
        new = judge.run(target.verify(target.log.header, (), chain)).committed_ids
    assert num_hits > 0, "INCONCLUSIVE: no branch was used"
    assert num_misses > 0 or name in ("coupled", "greedy", "busy_greedy", "busy_coupled"), "INCONCLUSIVE"


@pytest.mark.parametrize("name", ["block", "coupled", "greedy"])
def test_dropped_at_any_pass_it_leaves_nothing_behind(name):
    """The next message comes whenever it comes; whatever the tree has left in the cache, the next chain is the same."""
    params, hand = PARAMS[name], HandDriver(DRAFT.logits_for)
    session = ahead_session(params)
    committed = []
    for num_passes, num_accepted in itertools.product(range(6), range(4)):
        chain = hand.run(session.advance(session.log.header, (), 3))
        assert len(chain) in (3, WISH.num_draft_tokens), "as wanted, or a branch, which may have been told"
        assert content(chain) == content(on_demand(params, tuple(committed), len(chain)))
        program = session.draft_ahead(WISH)
        request = next(program)
        for _ in range(num_passes):
            try:
                request = program.send(hand.forward(request))
            except StopIteration:
                break
        program.close()
        assert session.log.history.num_output_tokens == len(committed), "drafts were left in the history"
        new = [*chain.token_ids[:num_accepted], (7 * num_passes + num_accepted) % 16]
        committed += new
        if len(committed) > 60:
            break
        hand.run(session.advance(header_after(session, new), new, 0))
    assert session.ahead.take_num_cancelled() > 0


@pytest.mark.parametrize("name", ["block", "coupled"])
def test_a_verdict_that_comes_early_lets_its_own_branch_grow_alone(name):
    hand = HandDriver(DRAFT.logits_for)
    session = ahead_session(PARAMS[name])
    chain = hand.run(session.advance(session.log.header, (), 4))
    program = session.draft_ahead(WISH)
    request = program.send(hand.forward(next(program)))
    request = program.send(hand.forward(request))
    wanted = min(session.ahead._growing)
    assert not session.ahead.waits_for(wanted ^ 1)
    assert session.ahead.waits_for(wanted)
    num_rows = []
    with pytest.raises(StopIteration) as end:
        while True:
            num_rows.append(len(request.token_ids))
            request = program.send(hand.forward(request))
    branches = end.value.value
    assert num_rows[0] > 1
    assert set(num_rows[1:]) == {1}
    assert list(branches.proposals) == [wanted]
    [(ids, branch)] = prefixes(session, chain.token_ids, branches).items()
    assert content(branch) == content(on_demand(PARAMS[name], ids, len(branch)))
    num_drafted = session.counters.num_ahead_draft_tokens
    assert session.ahead.take_num_cancelled() == num_drafted - len(branch) > 0, "what the others had is told as waste"


@pytest.mark.parametrize(("name", "background"), [("block", [False] * 4), ("coupled", [True] + [False] * 4)])
def test_a_verdict_that_comes_while_a_forward_is_made_is_not_missed(monkeypatch, name, background):
    """A branch that somebody waits for must not wait for a worker without other work."""
    hand = HandDriver(DRAFT.logits_for)
    session = ahead_session(PARAMS[name])
    hand.run(session.advance(session.log.header, (), 4))
    seen = []

    def made_meanwhile(*args, **fields):
        made = Forward(*args, **fields)  # on the engine's thread, while the other one hears of the verdict
        if session.ahead._growing:
            assert session.ahead.waits_for(min(session.ahead._growing))
        return made

    monkeypatch.setattr(draft_ahead, "Forward", made_meanwhile)

    def forward(request):
        seen.append(request.background)
        return hand.forward(request)

    run_program(session.draft_ahead(WISH), forward)
    assert seen == background


def test_all_branches_take_one_pass_a_draft():
    hand = HandDriver(DRAFT.logits_for)
    counters = SessionCounters()
    session = ahead_session(PARAMS["coupled"], counters=counters)
    chain = hand.run(session.advance(session.log.header, (), 4))
    before = hand.num_forwards
    branches = hand.run(session.draft_ahead(WISH))
    assert hand.num_forwards - before == 1 + 4
    assert counters.num_ahead_draft_tokens == sum(map(len, branches.proposals.values()))
    again = hand.run(session.advance(session.log.header, (), 4))
    assert content(again) == content(chain)


@pytest.mark.parametrize(("name", "num_passes"), [("block", 4), ("token", 4), ("coupled", 5), ("greedy", 5)])
def test_every_forward_of_it_is_in_the_background(name, num_passes):
    """Of sampled drafts the q are known: the pass over the chain is the first of the branches."""
    hand = HandDriver(DRAFT.logits_for)
    session = ahead_session(PARAMS[name])
    seen = []

    def forward(request):
        seen.append(request.background)
        return hand.forward(request)

    run_program(session.advance(session.log.header, (), 4), forward)
    assert not any(seen)
    seen.clear()
    run_program(session.draft_ahead(VALUED), forward)
    assert len(seen) == num_passes
    assert all(seen)


@pytest.mark.parametrize("name", ["block", "greedy"])
def test_near_the_end_of_the_text_no_more_is_drafted_than_it_takes(name):
    """A branch is as long as the chain would be: the last token needs no draft."""
    stopping = StoppingParams(max_tokens=8)
    hand = HandDriver(DRAFT.logits_for)
    session = ahead_session(PARAMS[name], stopping)
    chain = hand.run(session.advance(session.log.header, (), 4))
    branches = hand.run(session.draft_ahead(WISH))
    lengths = {}
    for ids, proposal in prefixes(session, chain.token_ids, branches).items():
        lengths[len(ids)] = len(proposal)
        assert content(proposal) == content(on_demand(PARAMS[name], ids, 4, stopping))
    assert all(length == min(4, 8 - num_committed - 1) for num_committed, length in lengths.items())
    assert len(set(lengths.values())) > 1, "INCONCLUSIVE: all outcomes leave the same room"


@pytest.mark.parametrize("name", ["block", "coupled", "greedy"])
def test_a_branch_may_end_the_text_from_where_its_own_tokens_allow_it(name):
    """min_tokens counts those of the branch."""
    free = on_demand(PARAMS[name], (), 8).token_ids
    found = set()
    for min_tokens in range(8):
        stopping = StoppingParams(max_tokens=80, min_tokens=min_tokens, stop_token_ids=frozenset(free[3:6]))
        session, hand = ahead_session(PARAMS[name], stopping), HandDriver(DRAFT.logits_for)
        chain = hand.run(session.advance(session.log.header, (), 2))
        branches = hand.run(session.draft_ahead(WISH))
        for ids, branch in prefixes(session, chain.token_ids, branches).items():
            assert content(branch) == content(on_demand(PARAMS[name], ids, 4, stopping))
            found |= {(min_tokens, ids, branch.token_ids)}
    assert len({branch for _, _, branch in found}) > len({ids for _, ids, _ in found}), (
        "INCONCLUSIVE: it changed nothing"
    )


def test_nothing_is_drafted_behind_the_end_of_the_text():
    hand = HandDriver(DRAFT.logits_for)
    free = hand.run(ahead_session(GREEDY).advance(ahead_session(GREEDY).log.header, (), 4)).token_ids
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({free[2]}))
    session = ahead_session(GREEDY, stopping)
    chain = hand.run(session.advance(session.log.header, (), 4))
    assert chain.token_ids == free[:3]
    branches = hand.run(session.draft_ahead(WISH))
    assert all(ids[-1] != free[2] for ids in prefixes(session, chain.token_ids, branches))
    assert all(len(ids) <= 3 for ids in prefixes(session, chain.token_ids, branches))


@pytest.mark.parametrize("name", ["block", "coupled"])
def test_as_many_branches_as_the_cache_has_room_for(name):
    for wish, lengths in ((WISH, {4}), (VALUED, {1, 2, 3, 4})):
        session, hand = ahead_session(PARAMS[name]), HandDriver(DRAFT.logits_for)
        session.sequence = ListSequence(len(PROMPT) + 4 + 3 * 4)
        hand.run(session.advance(session.log.header, (), 4))
        branches = list(hand.run(session.draft_ahead(wish)).proposals.values())
        assert 3 * 4 - 2 <= sum(map(len, branches)) <= 3 * 4
        assert set(map(len, branches)) <= lengths
    assert len(branches) > 3, "their drafts are worth more where they are likelier to be used"
    session = ahead_session(PARAMS[name])
    session.sequence = ListSequence(len(PROMPT) + 5)
    hand.run(session.advance(session.log.header, (), 4))
    assert not hand.run(session.draft_ahead(WISH)).proposals


def test_a_branch_that_saves_less_than_it_costs_is_left_out():
    session, hand = ahead_session(PARAMS["block"]), HandDriver(DRAFT.logits_for)
    hand.run(session.advance(session.log.header, (), 4))
    session.ahead._row_cost = KnownRowCost(1.0)
    few = hand.run(session.draft_ahead(dataclasses.replace(WISH, value_ms=8.0)))
    many = hand.run(session.draft_ahead(dataclasses.replace(WISH, value_ms=4000.0)))
    assert 0 < len(few.proposals) < len(many.proposals)
    assert set(few.proposals) < set(many.proposals)
    assert all(len(few.proposals[key]) <= len(many.proposals[key]) for key in few.proposals)
    assert min(map(len, few.proposals.values())) < 4, "later drafts of unlikely outcomes are left out as well"


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize(("num_drafts", "num_passes"), [(1, 2), (3, 3)])
def test_a_short_branch_behind_the_whole_chain_may_take_a_pass_of_its_own(name, num_drafts, num_passes):
    """With few drafts all of them often stand: what comes after is as likely as anything."""
    hand = HandDriver(DRAFT.logits_for)
    session = ahead_session(PARAMS[name])
    chain = hand.run(session.advance(session.log.header, (), num_drafts))
    before = hand.num_forwards
    wish = dataclasses.replace(WISH, num_draft_tokens=num_drafts, value_ms=1e6)
    branches = hand.run(session.draft_ahead(wish))
    assert hand.num_forwards - before == num_passes
    lengths = {}
    for ids, branch in prefixes(session, chain.token_ids, branches).items():
        lengths.setdefault(len(ids) - 1, set()).add(len(branch))
        assert content(branch) == content(on_demand(PARAMS[name], ids, len(branch)))
    assert lengths[num_drafts] == {num_drafts - (num_passes == num_drafts)}
    assert lengths[0] == {num_drafts}


def test_behind_a_tree_or_nothing_there_are_no_branches():
    session, hand = ahead_session(GREEDY), HandDriver(DRAFT.logits_for)
    hand.run(session.advance(session.log.header, (), 4, "tree"))
    assert hand.run(session.draft_ahead(WISH)) is None
    hand.run(session.advance(session.log.header, (), 0))
    assert hand.run(session.draft_ahead(WISH)) is None


def test_more_than_the_worker_offers_is_refused():
    session = ahead_session(GREEDY, max_ahead_branches=2, max_draft_tokens=4)
    session.check_ahead(AheadWish(2, 4))
    refused = [(AheadWish(3, 4), "advance.ahead_branches"), (AheadWish(2, 5), "advance.ahead_draft_tokens")]
    refused += [(AheadWish(2, 4, value), "advance.ahead_value_ms") for value in (-1.0, float("inf"), float("nan"))]
    for wish, field in refused:
        with pytest.raises(InvalidArgument) as error:
            session.check_ahead(wish)
        assert error.value.field == field


@pytest.mark.parametrize("name", RULES)
def test_a_row_behind_the_chain_that_cannot_be_read_costs_its_branches_alone(name):
    """Nothing may come there; what may come before is drafted for, and the next round goes on."""
    hand = HandDriver(toy("vocab=16,seed=1,agreement=0.9,nan_after=8").logits_for)
    session = ahead_session(PARAMS[name])
    chain = hand.run(session.advance(header_after(session, [4]), [4], 8))
    assert len(chain) == 8 - len(PROMPT), "it ends at the row that cannot be read"
    branches = hand.run(session.draft_ahead(WISH))
    assert branches.proposals, "INCONCLUSIVE"
    assert all(num_accepted < len(chain) for num_accepted, _ in branches.outcomes)
    new = [*chain.token_ids, 5]
    with pytest.raises(Internal, match="NaN"):
        hand.run(session.advance(header_after(session, new), new, 4))
    assert session.log.ids[-1] == 5
