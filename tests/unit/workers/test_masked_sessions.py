"""Masks through both sessions: no masked token under any rule, drafter and γ, drafts and round ends counted alike."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from conftest import scaled
from session_loops import RULES, HandDriver, draft_session, plain_text, rounds, target_session, toy

from outrider.errors import InvalidArgument
from outrider.sampling.params import StoppingParams

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.8")
STOPPING = StoppingParams(max_tokens=60)
GAMMAS = (1, 2, 3, 5, 8)


def masked_at(text, params):
    """Positions whose token completes a bad word or is not allowed."""
    bad = [i for i, t in enumerate(text) if params.allowed_token_ids and t not in params.allowed_token_ids]
    for word in params.bad_words:
        bad += [i for i in range(len(text)) if tuple(text[max(0, i + 1 - len(word)) : i + 1]) == word]
    return bad


def cases(rule):
    """Masks made to bite: words are runs of the text that the stream would give without them."""
    rng = random.Random(rule)
    for case in range(scaled(40, at_least=4)):
        params = dataclasses.replace(RULES[rule], seed=case)
        free = plain_text(TARGET, params, STOPPING)
        words = [tuple(free[i : i + n]) for n in (1, 2, 2, 3, 4) for i in [rng.randrange(len(free) - 4)]]
        allowed = rng.sample(range(16), 11) if case % 2 else ()
        masked = dataclasses.replace(params, bad_words=tuple(words), allowed_token_ids=allowed)
        assert masked_at(free, masked), "these masks would change nothing"
        yield masked


@pytest.mark.parametrize("rule", RULES)
def test_masked_tokens_never_come_and_matched_text_does_not_depend_on_drafts(rule):
    num_drafted = num_accepted = num_in_trees = 0
    for params in cases(rule):
        plain = plain_text(TARGET, params, STOPPING)
        assert not masked_at(plain, params)
        for gamma, drafter in itertools.product(GAMMAS, ("model", "tree")):
            run = rounds(TARGET, DRAFT, params, gamma, STOPPING, drafter=drafter)
            text = run.run()
            assert len(text) == 60
            assert not masked_at(text, params), f"γ={gamma}, {drafter}"
            if rule in ("greedy", "coupled"):
                assert text == plain, f"γ={gamma}, {drafter}"
            num_in_trees += run.num_drafted * (drafter == "tree")
            if drafter == "model":
                num_drafted += run.num_drafted
                num_accepted += run.num_accepted
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE: nothing was drafted, or nothing rejected"
    assert num_in_trees > 0


@pytest.mark.parametrize("rule", RULES)
def test_the_draft_masks_what_the_target_masks(rule):
    """A draft equal to the target is always accepted, whatever the masks, so both apply the same ones everywhere."""
    for params in cases(rule):
        run = rounds(TARGET, TARGET, params, 4, STOPPING)
        run.run()
        assert run.num_drafted > 0
        if rule in ("greedy", "coupled"):
            assert run.num_accepted == sum(min(v.num_draft_tokens, len(v.committed_ids)) for v in run.verdicts)
        for verdict in run.verdicts:
            # p and q differ by the rounding of q's counts alone; a masked draft would have no overlap at all
            assert all(byte >= 254 for byte in verdict.soft_acceptances)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_word_is_found_wherever_a_round_ends_within_it(rule):
    """Every split of a three-token word between committed tokens and drafts occurs, and each is caught."""
    params = dataclasses.replace(RULES[rule], seed=3)
    free = plain_text(TARGET, params, STOPPING)
    splits = set()
    for start, gamma in itertools.product(range(len(free) - 3), (1, 2, 3, 5)):
        word = tuple(free[start : start + 3])
        masked = dataclasses.replace(params, bad_words=(word,))
        run = rounds(TARGET, DRAFT, masked, gamma, STOPPING)
        text = run.run()
        assert text == plain_text(TARGET, masked, STOPPING)
        assert not masked_at(text, masked)
        # where the first mask fell: drafts before it in its round
        first = next(i for i in range(len(free)) if tuple(free[max(0, i - 2) : i + 1]) == word)
        begun = 0
        for verdict in run.verdicts:
            if begun + len(verdict.committed_ids) > first:
                splits.add(min(first - begun, 3))
                break
            begun += len(verdict.committed_ids)
    assert splits == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": (3, 16)}, "open.sampling.allowed_token_ids"),
        ({"bad_words": ((1,), (2, 16))}, "open.sampling.bad_word_ids"),
        ({"bad_words": tuple((1, i % 16) for i in range(513))}, "open.sampling.bad_word_sizes"),
        ({"allowed_token_ids": (3,), "bad_words": ((2, 3),)}, "open.sampling.allowed_token_ids"),
    ],
)
@pytest.mark.parametrize("side", ["draft", "target"])
def test_workers_refuse_masks_by_name(side, fields, field):
    sampling = dataclasses.replace(RULES["block"], **fields)
    with pytest.raises(InvalidArgument) as refusal:
        target_session(TARGET, sampling) if side == "target" else draft_session(DRAFT, sampling)
    assert refusal.value.field == field


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize("num_left", [0, 2])
def test_where_masks_leave_no_token_a_proposal_ends_and_nothing_fails(num_left, drafter, rule):
    """Of a draft model that can say 3 and nothing else, or after two tokens no more than that."""

    def rows(ids):
        only_3 = np.full(16, -np.inf, np.float32)
        only_3[3] = 0.0
        return only_3 if len(ids) >= 3 + num_left else DRAFT.logits_for(ids)

    session = draft_session(DRAFT, dataclasses.replace(RULES[rule], bad_words=((3,),)), width=1)
    proposal = HandDriver(rows).run(session.advance(session.log.header, (), 4, drafter))
    assert (len(proposal), proposal.drafter) == (num_left, drafter)
    assert session.log.history.num_output_tokens == 0
