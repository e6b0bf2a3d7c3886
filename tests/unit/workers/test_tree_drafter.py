"""The tree drafter: plain text under every exact rule, the law under the others, fewer rounds than its own trunk."""

from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square, joint_law, table_pair
from session_loops import BUSY, RULES, HandDriver, Rounds, plain_text, target_session, toy
from session_loops import draft_session as make_draft_session

from draft_worker.session import KNOWN_DRAFTERS, DraftSession
from draft_worker.tree_drafter import NAME
from outrider.drafting import tree
from outrider.drafting.proposal import check
from outrider.errors import Internal, InvalidArgument
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.8")
EXACT = {
    "greedy": SamplingParams(temperature=0.0, **BUSY),
    "coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3, temperature=0.7, top_k=6, **BUSY),
}


def draft_session(model, sampling, stopping=None, *, width: int = 2, **fields) -> DraftSession:
    session = make_draft_session(model, sampling, stopping, drafters=KNOWN_DRAFTERS, width=width, **fields)
    assert session.needs_sequence(NAME) == (session.sequence is None)
    return session


def rounds(sampling, stopping, num_draft_tokens, *, width: int = 2, target=TARGET, draft=DRAFT, **fields) -> Rounds:
    hands = [HandDriver(getattr(model, "logits_for", None) or model.row) for model in (target, draft)]
    return Rounds(
        target_session(target, sampling, stopping, **fields),
        draft_session(draft, sampling, stopping, width=width, **fields),
        *hands,
        num_draft_tokens if callable(num_draft_tokens) else lambda _: num_draft_tokens,
        drafter=NAME,
    )


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_text_is_that_of_plain_decoding(name: str, width: int) -> None:
    stopping = StoppingParams(max_tokens=120, min_tokens=3, stop_token_ids=frozenset({15}))
    loop = rounds(EXACT[name], stopping, lambda index: (0, 6, 1, 4, 9)[index % 5], width=width)
    assert loop.run() == plain_text(TARGET, EXACT[name], stopping)
    assert 0 < loop.num_accepted < loop.num_drafted, "INCONCLUSIVE"


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_second_guess_saves_rounds_at_the_same_number_of_draft_passes(rule: str) -> None:
    stopping = StoppingParams(max_tokens=300)
    wide, narrow = rounds(RULES[rule], stopping, 8, width=2), rounds(RULES[rule], stopping, 4, width=1)
    for loop in (wide, narrow):
        loop.run()
    assert len(wide.verdicts) < len(narrow.verdicts)
    per_round = [loop.draft_driver.num_forwards / len(loop.verdicts) for loop in (wide, narrow)]
    assert per_round[0] == pytest.approx(per_round[1], rel=0.1)


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("width", [2, 3])
def test_the_law_is_the_targets(rule: AcceptanceRule, width: int) -> None:
    target, draft = table_pair(3, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = 0
    for seed in range(scaled(8_000)):
        loop = rounds(
            SamplingParams(acceptance=rule, seed=seed), StoppingParams(max_tokens=5), lambda index: 2 + 3 * (index % 2),
            width=width, target=target, draft=draft, prompt_ids=(0, 1),
        )  # fmt: skip
        counts[tuple(loop.run()[:3])] += 1
        num_drafted += loop.num_drafted
        num_accepted += loop.num_accepted
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, SamplingParams(), 3)) > FALSE_ALARM


@pytest.mark.parametrize("rule", RULES)
def test_a_proposal_is_a_trunk_with_leaves_and_a_function_of_the_prefix(rule: str) -> None:
    sessions = [draft_session(DRAFT, RULES[rule], width=3) for _ in range(2)]
    hand = HandDriver(DRAFT.logits_for)
    first, second = (hand.run(session.advance(session.log.header, (), 8, NAME)) for session in sessions)
    assert (first.token_ids, first.parents, first.drafter) == (second.token_ids, second.parents, "tree")
    assert first.parents == (-1, -1, -1, 0, 0, 0, 3, 3)
    assert tree.depths(first.parents)[-1] == hand.num_forwards / 2
    assert [q is None for q in first.q] == [False] * (8 if rule in ("token", "block") else 0)
    check(first, vocab_size=16, max_draft_tokens=8)
    chain = draft_session(DRAFT, RULES[rule])
    trunk = hand.run(chain.advance(chain.log.header, (), 3, "model"))
    assert [first.token_ids[i] for i in (0, 3, 6)] == list(trunk.token_ids)


def test_the_number_of_passes_does_not_follow_from_what_was_sampled() -> None:
    """Not even where a stop token is drawn, or q has fewer tokens than the tree is wide."""
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({1, 2}))
    num_stops = 0
    for seed in range(60):
        session = draft_session(DRAFT, SamplingParams(seed=seed, top_k=1 + seed % 3), stopping, width=2)
        hand = HandDriver(DRAFT.logits_for)
        proposal = hand.run(session.advance(session.log.header, (), 6, NAME))
        assert hand.num_forwards == 3
        num_stops += bool({1, 2} & set(proposal.token_ids))
    assert num_stops > 0, "INCONCLUSIVE"


def test_a_bad_row_ends_the_tree_before_its_children() -> None:
    good = HandDriver(DRAFT.logits_for)
    session = draft_session(DRAFT, RULES["block"])
    whole = good.run(session.advance(session.log.header, (), 6, NAME))
    length = len(session.log.ids)
    for bad in (0, 2):
        session = draft_session(DRAFT, RULES["block"])
        hand = HandDriver(
            lambda ids, bad=bad: DRAFT.logits_for(ids) if len(ids) < length + bad else np.full(16, np.nan, np.float32)
        )
        program = session.advance(session.log.header, (), 6, NAME)
        if bad:
            assert hand.run(program).token_ids == whole.token_ids[:4]
        else:
            with pytest.raises(Internal, match="NaN"):
                hand.run(program)
        assert session.log.history.num_output_tokens == 0


def test_a_round_may_ask_for_another_width() -> None:
    session, hand = draft_session(DRAFT, RULES["block"], width=2), HandDriver(DRAFT.logits_for)
    for tree_width, parents in ((3, (-1, -1, -1, 0, 0, 0)), (1, ()), (0, (-1, -1, 0, 0, 2, 2))):
        proposal = hand.run(session.advance(session.log.header, (), 6, NAME, tree_width))
        assert proposal.parents == parents
    with pytest.raises(InvalidArgument, match="tree_width is 17, must be at most 16"):
        hand.run(session.advance(session.log.header, (), 6, NAME, 17))
