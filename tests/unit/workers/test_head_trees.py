"""Heads beside a target draw trees: text and law stay, as many nodes as asked for, and every level is one run."""

import dataclasses

import numpy as np
import pytest
from conftest import scaled
from fake_heads import EagleTable, MedusaTable
from law import chi_square, joint_law
from session_loops import BUSY, GREEDY, RULES, HandDriver, plain_text, toy
from test_head_drafters import DRAFT, HEADS, MODEL, Table, num_accepted, num_drafted, run, session_with, text_of

from outrider.drafting import tree
from outrider.errors import InvalidArgument
from outrider.sampling.params import StoppingParams

SHAPE = (-1, 0, -1, 1, 0, 2)


def is_tree(verdict):
    return bool(verdict.drafted_parents)


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("head", HEADS)
def test_text_is_that_of_plain_decoding(head, rule, busy, how):
    sampling = dataclasses.replace(RULES[rule], **busy)
    verdicts = run(session_with(HEADS[head](MODEL), sampling), len(SHAPE), how=how, shape=SHAPE)
    assert text_of(verdicts) == plain_text(MODEL, sampling)
    assert 0 < num_accepted(verdicts) <= num_drafted(verdicts), "INCONCLUSIVE"
    assert sum(map(is_tree, verdicts)) > 2, "INCONCLUSIVE: no trees"
    for verdict in verdicts:
        assert verdict.num_draft_tokens <= len(SHAPE)
        assert max(tree.depths(verdict.drafted_parents), default=0) <= max(tree.depths(SHAPE))


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
    counts, drafted, accepted, num_trees = {}, 0, 0, 0
    table = HEADS[head](model)
    table.prompt_id = 0
    for seed in range(scaled(4000, at_least=400)):
        session = session_with(
            table, dataclasses.replace(params, seed=seed), StoppingParams(max_tokens=6), model=model, prompt_ids=(0, 1)
        )
        verdicts = run(session, 4, model=model, shape=(-1, -1, 0, 1))
        text = tuple(text_of(verdicts)[:3])
        counts[text] = counts.get(text, 0) + 1
        drafted, accepted = drafted + num_drafted(verdicts), accepted + num_accepted(verdicts)
        num_trees += sum(map(is_tree, verdicts))
    assert 0 < accepted < drafted, "INCONCLUSIVE"
    assert num_trees > 0, "INCONCLUSIVE: no trees"
    assert chi_square(counts, joint_law(Table(model), params, 3, prompt=(0, 1))) > 1e-4


def test_one_reading_of_each_token_and_one_run_a_level():
    table = EagleTable(MODEL, DRAFT)
    session = session_with(table, RULES["block"])
    verdicts = run(session, len(SHAPE), shape=SHAPE)
    assert table.num_extended == len(session.log.ids) - 1 - len(verdicts[-1].committed_ids)
    levels = [
        max(tree.depths(v.drafted_parents or tree.chain_parents(v.num_draft_tokens)), default=0) for v in verdicts
    ]
    assert table.num_steps == sum(max(0, depth - 1) for depth in levels) > 0


def test_a_shape_that_is_a_chain_is_the_chain():
    verdicts = [
        run(session_with(EagleTable(MODEL, DRAFT), RULES["token"]), 3, shape=shape) for shape in ((), (-1, 0, 1))
    ]
    assert [(v.drafted_ids, v.committed_ids) for v in verdicts[0]] == [
        (v.drafted_ids, v.committed_ids) for v in verdicts[1]
    ]


def test_states_that_are_gone_and_steps_that_fail_cost_rounds_and_drafts():
    session = session_with(EagleTable(MODEL, DRAFT))

    def lose(number):
        session.sequence.lost = number % 3 == 0

    verdicts = run(session, len(SHAPE), shape=SHAPE, before_round=lose)
    assert text_of(verdicts) == plain_text(MODEL, GREEDY)
    assert all((v.num_draft_tokens == 0) == (n % 3 == 0) for n, v in enumerate(verdicts[1:-2], start=1))
    table = EagleTable(MODEL, DRAFT)
    table.fails_in_step = 1
    session, hand = session_with(table, RULES["block"]), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    verdict = hand.run(session.verify(session.log.header, num_draft_tokens=len(SHAPE), tree_parents=SHAPE))
    assert (verdict.num_draft_tokens, verdict.drafted_parents, verdict.proposal_fault) == (2, (-1, -1), "")


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token", "block"])
def test_medusa_puts_the_best_guesses_of_a_head_beside_one_another_whatever_is_above_them(rule):
    head = MedusaTable(MODEL)
    session, hand = session_with(head, RULES[rule]), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    shape = (-1, -1, 0, 0, 1, 4, 5)  # one level more than there are heads
    verdict = hand.run(session.verify(session.log.header, num_draft_tokens=len(shape), tree_parents=shape))
    assert verdict.drafted_parents == shape[:-1]
    ids = verdict.drafted_ids
    assert ids[2] == ids[4], "the first guess of a head is the same below each parent"
    assert len({ids[0], ids[1]}) == len({ids[2], ids[3]}) == 2
    if rule != "coupled":
        rows = head.logits(session.sequence.features(2, 3, head.states)[0], 3).numpy()
        assert ids == (
            *np.argsort(-rows[0])[:2],
            *np.argsort(-rows[1])[:2],
            *np.argsort(-rows[1])[:1],
            rows[2].argmax(),
        )


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (dict(num_draft_tokens=3, tree_parents=(-1, 0)), "2 nodes, num_draft_tokens is 3"),
        (dict(num_draft_tokens=2, tree_parents=(-1, 1)), "does not come before"),
        (dict(num_draft_tokens=2, tree_parents=(-1, -2)), "does not come before"),
        (dict(num_draft_tokens=2, tree_parents=(-1, -1)), "chains only"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_asked_for(wish, told):
    session, hand = session_with(EagleTable(MODEL, DRAFT)), HandDriver(MODEL.logits_for)
    hand.run(session.open())
    if told == "chains only":
        held = session._own._held["eagle3"]
        held.description = dataclasses.replace(held.description, draws_trees=False)
    with pytest.raises(InvalidArgument, match=told) as error:
        hand.run(session.verify(session.log.header, **wish))
    assert error.value.field == "verify.tree_parents"
    with pytest.raises(InvalidArgument, match=told) as error:
        hand.run(session.decode(session.log.header, (), 9, [].append, **wish))
    assert error.value.field == "decode.tree_parents"
