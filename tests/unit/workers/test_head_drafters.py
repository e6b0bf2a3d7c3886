"""Heads beside a target: they read its states and nothing else, text and law stay, lost states cost a plain round."""

import dataclasses

import pytest
from conftest import scaled
from fake_heads import EagleTable, FeatureSequence, HeldTable, MedusaTable
from law import chi_square, joint_law
from session_loops import BUSY, GREEDY, PROMPT, RULES, HandDriver, header_after, plain_text, toy

from outrider.drafting import heads as drafting_heads
from outrider.sampling.params import Finish, StoppingParams
from outrider.serving.messages import TargetOpening
from outrider.serving.session_log import SessionCounters
from target_worker.session import TargetSession

MODEL = toy("vocab=16,seed=1")
DRAFT = toy("vocab=16,seed=1,agreement=0.9")


def session_with(head, sampling=GREEDY, stopping=None, *, model=MODEL, **fields):
    opening = TargetOpening(
        **{"epoch": 1, "prompt_ids": PROMPT, "max_draft_tokens": 8, **fields},
        sampling=sampling,
        stopping=stopping or StoppingParams(max_tokens=40),
    )
    limits = dict(vocab_size=model.vocab_size, context_length=4096, max_draft_tokens=16)
    session = TargetSession(opening, **limits, drafters={head.kind: HeldTable(head)}, counters=SessionCounters())
    session.sequence = FeatureSequence(session.reserved_length, model)
    return session


def run(session, num_draft_tokens, *, model=MODEL, how="verify", before_round=lambda number: None, shape=()):
    hand = HandDriver(model.logits_for)
    asked = {"num_draft_tokens": num_draft_tokens, "tree_parents": shape}
    verdicts = [hand.run(session.open())]
    while session.finish is Finish.NONE:
        before_round(len(verdicts))
        if how == "verify":
            verdicts.append(hand.run(session.verify(session.log.header, **asked)))
        else:
            hand.run(session.decode(session.log.header, (), 7, verdicts.append, **asked))
    assert not any(verdict.proposal_fault for verdict in verdicts)
    return verdicts


def text_of(verdicts):
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


def num_drafted(verdicts):
    return sum(verdict.num_draft_tokens for verdict in verdicts)


def num_accepted(verdicts):
    return sum(verdict.num_accepted for verdict in verdicts)


HEADS = {
    "eagle": lambda model: EagleTable(model, toy(model.spec.text().removeprefix("toy:") + ",agreement=0.9")),
    "few_ids": lambda model: EagleTable(model, model, draft_ids=range(1, model.vocab_size - 2)),
    "medusa": lambda model: MedusaTable(model),
}


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("head", HEADS)
def test_text_is_that_of_plain_decoding(head, rule, busy, how):
    sampling = dataclasses.replace(RULES[rule], **busy)
    verdicts = run(session_with(HEADS[head](MODEL), sampling), 4, how=how)
    assert text_of(verdicts) == plain_text(MODEL, sampling)
    assert 0 < num_accepted(verdicts) <= num_drafted(verdicts), "INCONCLUSIVE"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("head", "busy"),
    [
        *((head, {}) for head in HEADS),
        ("few_ids", {"top_k": 3, "temperature": 1.3}),
        ("eagle", {"repetition_penalty": 1.7}),
    ],
    ids=str,
)
def test_sampled_text_has_the_targets_law(head, rule, busy):
    model = toy("vocab=5,seed=3,order=2,scale=1.2")
    params = dataclasses.replace(RULES[rule], **busy)
    counts, drafted, accepted = {}, 0, 0
    table = HEADS[head](model)
    table.prompt_id = 0
    for seed in range(scaled(5000, at_least=500)):
        session = session_with(
            table, dataclasses.replace(params, seed=seed), StoppingParams(max_tokens=6), model=model, prompt_ids=(0, 1)
        )
        verdicts = run(session, 3, model=model)
        text = tuple(text_of(verdicts)[:3])
        counts[text] = counts.get(text, 0) + 1
        drafted, accepted = drafted + num_drafted(verdicts), accepted + num_accepted(verdicts)
    assert 0 < accepted < drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(Table(model), params, 3, prompt=(0, 1))) > 1e-4


class Table:
    """A toy as `law` reads models."""

    def __init__(self, model):
        self.row = model.logits_for


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_are_drawn_as_a_model_drafter_draws_them(rule):
    """The same q and the same noise: a draft worker with the same rows proposes the same."""
    from session_loops import draft_session

    sampling = dataclasses.replace(RULES[rule], **BUSY)
    session = session_with(EagleTable(MODEL, DRAFT), sampling)
    HandDriver(MODEL.logits_for).run(session.open())
    drafter = session._own._held["eagle3"].for_session(session.log, session.sequence)
    mine = HandDriver(None).run(drafter.propose(5))
    other = draft_session(DRAFT, sampling, max_q_entries=256)
    hand = HandDriver(DRAFT.logits_for)
    theirs = hand.run(other.advance(session.log.header, session.log.ids[3:], 5, "model"))
    assert mine.token_ids == theirs.token_ids
    for a, b in zip(mine.q, theirs.q, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.counts.tolist() == b.counts.tolist()


def test_one_reading_of_each_token_and_one_step_per_further_draft():
    table = EagleTable(MODEL, MODEL)
    session = session_with(table)
    verdicts = run(session, 4)
    assert table.num_extended == len(session.log.ids) - 1 - len(verdicts[-1].committed_ids)
    assert table.num_steps == sum(max(0, verdict.num_draft_tokens - 1) for verdict in verdicts)


@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_states_that_are_gone_cost_plain_rounds(head):
    """Blocks taken between rounds: the next pass computes them again, and drafts come back."""
    session = session_with(HEADS[head](MODEL))

    def lose(number):
        session.sequence.lost = number % 3 == 0

    verdicts = run(session, 3, before_round=lose)
    assert text_of(verdicts) == plain_text(MODEL, GREEDY)
    drafted = [verdict.num_draft_tokens for verdict in verdicts[1:-2]]
    assert all((count == 0) == (number % 3 == 0) for number, count in enumerate(drafted, start=1))


def test_a_gap_is_read_once_it_is_computed():
    session, hand = session_with(EagleTable(MODEL, DRAFT)), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    missing = plain_text(MODEL, GREEDY)[1:5]
    first = hand.run(session.verify(header_after(session, missing), missing, num_draft_tokens=3))
    assert (first.num_draft_tokens, first.proposal_fault) == (0, "")
    assert hand.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 3


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    monkeypatch.setattr(drafting_heads, "PAIRS_AT_ONCE", 4)
    prompt = tuple(i % 16 for i in range(3, 21))
    table = EagleTable(MODEL, DRAFT)
    verdicts = run(session_with(table, prompt_ids=prompt), 3)
    drafted = [verdict.num_draft_tokens for verdict in verdicts]
    assert drafted[:7] == [0] * 6 + [3]  # the prompt's own verdict; then 18 and more pairs, 4 by 4


def test_what_was_drawn_stands_when_a_later_step_fails():
    table = EagleTable(MODEL, DRAFT)
    table.fails_in_step = 2
    session, hand = session_with(table, RULES["block"]), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    verdict = hand.run(session.verify(session.log.header, num_draft_tokens=6))
    assert (verdict.num_draft_tokens, verdict.proposal_fault) == (2, "")


def test_a_head_that_cannot_be_read_is_a_failure_told():
    class Broken(EagleTable):
        def row(self, ids):
            return super().row(ids) * float("nan")

    session, hand = session_with(Broken(MODEL, DRAFT)), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    verdict = hand.run(session.verify(session.log.header, num_draft_tokens=6))
    assert verdict.num_draft_tokens == 0
    assert "NaN" in verdict.proposal_fault


def test_medusa_guesses_at_a_distance_and_no_further_than_it_has_heads():
    verdicts = run(session_with(MedusaTable(MODEL)), 8)
    assert max(verdict.num_draft_tokens for verdict in verdicts) == 3
    assert num_accepted(verdicts) == num_drafted(verdicts) > 0
