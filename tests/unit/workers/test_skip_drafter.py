"""Drafts from the target without some layers, by hand: a second cache that is kept in step; same text, same law."""

import dataclasses
from types import SimpleNamespace

import pytest
from conftest import scaled
from law import chi_square, joint_law
from session_loops import BUSY, GREEDY, PROMPT, RULES, HandDriver, ListSequence, header_after, plain_text, toy

from outrider.errors import InvalidArgument, ResourceExhausted
from outrider.sampling.params import Finish, StoppingParams
from outrider.server_info import TargetDrafter
from outrider.serving.messages import TargetOpening
from target_worker.session import TargetSession
from target_worker.skip_drafter import HeldSkip, SkipDrafter, parse_layers

SPEC = "vocab=16,seed=1"


class Pair:
    """A drafter that all sessions hold, and a driver whose model depends on which of the two caches is asked."""

    def __init__(self, spec=SPEC, agreement=0.8):
        self.whole, self.skipping = toy(spec), toy(f"{spec},agreement={agreement}")
        self.description = TargetDrafter("skip", "skip")
        self.opening = SimpleNamespace(sequence=None, error=None, close=lambda: None)

    def for_session(self, log, sequence):
        return SkipDrafter("skip", log, self.opening)

    def session(self, sampling=GREEDY, max_tokens=40, prompt=PROMPT):
        opening = TargetOpening(
            epoch=1, prompt_ids=prompt, max_draft_tokens=8, sampling=sampling,
            stopping=StoppingParams(max_tokens=max_tokens),
        )  # fmt: skip
        limits = dict(vocab_size=self.whole.vocab_size, context_length=4096, max_draft_tokens=16)
        session = TargetSession(opening, **limits, drafters={"skip": self})
        session.sequence = ListSequence(session.reserved_length)
        self.opening.sequence = ListSequence(session.reserved_length)
        return session

    def run(self, program):
        whole, skipping = HandDriver(self.whole.logits_for), HandDriver(self.skipping.logits_for)

        def forward(request):
            return (skipping if request.sequence is self.opening.sequence else whole).forward(request)

        return HandDriver.run(SimpleNamespace(forward=forward), program)

    def verdicts(self, session, gamma=4):
        verdicts = [self.run(session.open())]
        while session.finish is Finish.NONE:
            verdicts.append(self.run(session.verify(session.log.header, num_draft_tokens=gamma)))
            assert not verdicts[-1].proposal_fault
        return verdicts


def text_of(verdicts):
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_text_is_that_of_plain_decoding(rule, busy, gamma):
    sampling = dataclasses.replace(RULES[rule], **busy)
    pair = Pair()
    verdicts = pair.verdicts(pair.session(sampling), gamma)
    assert text_of(verdicts) == plain_text(pair.whole, sampling)
    assert 0 < sum(v.num_accepted for v in verdicts) < sum(v.num_draft_tokens for v in verdicts), "INCONCLUSIVE"


@pytest.mark.parametrize("busy", [{}, {"top_k": 3, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_text_has_the_targets_law(rule, busy):
    pair = Pair("vocab=5,seed=3,order=2,scale=1.2", 0.6)
    params = dataclasses.replace(RULES[rule], **busy)
    counts, num_drafted, num_accepted = {}, 0, 0
    for seed in range(scaled(6000, at_least=1200)):
        session = pair.session(dataclasses.replace(params, seed=seed), max_tokens=5, prompt=(0, 1))
        verdicts = pair.verdicts(session, 3)
        text = tuple(text_of(verdicts)[:3])
        counts[text] = counts.get(text, 0) + 1
        num_drafted += sum(verdict.num_draft_tokens for verdict in verdicts)
        num_accepted += sum(verdict.num_accepted for verdict in verdicts)
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    law = joint_law(SimpleNamespace(row=pair.whole.logits_for), params, 3, prompt=(0, 1))
    assert chi_square(counts, law) > 1e-4


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token"])
def test_drafts_are_a_function_of_the_prefix(rule):
    pair = Pair()
    old = pair.session(RULES[rule])
    pair.run(old.open())
    for _ in range(3):
        pair.run(old.verify(old.log.header, num_draft_tokens=4))
    header = old.log.header
    expected = pair.run(old.verify(header, num_draft_tokens=4))
    fresh = pair.session(RULES[rule])
    pair.run(fresh.open())
    missing = old.log.ids[len(fresh.log.ids) : header.base_length]
    assert header_after(fresh, missing) == header
    verdict = pair.run(fresh.verify(header, missing, num_draft_tokens=4))
    assert verdict.drafted_ids == expected.drafted_ids
    assert len(verdict.drafted_ids) == 4
    assert verdict.committed_ids == expected.committed_ids


def test_rounds_are_plain_until_there_is_room_and_a_refusal_is_told():
    pair = Pair()
    session = pair.session()
    sequence, pair.opening.sequence = pair.opening.sequence, None
    pair.run(session.open())
    waiting = pair.run(session.verify(session.log.header, num_draft_tokens=3))
    assert (waiting.num_draft_tokens, waiting.proposal_fault) == (0, "")
    pair.opening.sequence = sequence
    assert pair.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 3
    pair.opening.error = ResourceExhausted("no blocks left")
    refused = pair.run(session.verify(session.log.header, num_draft_tokens=3))
    assert refused.num_draft_tokens == 0
    assert "no blocks left" in refused.proposal_fault


def test_what_a_drafter_holds_is_given_back_once_it_fails_or_its_stream_ends():
    pair, closed = Pair(), []
    pair.opening.close = lambda: closed.append(True)
    session = pair.session()
    pair.run(session.open())
    session.close()
    assert closed == []
    assert pair.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 0
    session = pair.session()
    pair.run(session.open())
    assert pair.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 3
    pair.opening.error = ResourceExhausted("no blocks left")
    pair.run(session.verify(session.log.header, num_draft_tokens=3))
    assert closed == [True]
    pair.opening.error = None
    assert pair.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 3
    session.close()
    assert closed == [True, True]
    assert pair.run(session.verify(session.log.header, num_draft_tokens=3)).num_draft_tokens == 0


def test_layers_are_named_or_refused():
    assert parse_layers("") == ()
    assert parse_layers("1;2;10") == (1, 2, 10)
    for text in ("2;1", "1;1", "x", "-1", "1;;x"):
        with pytest.raises(InvalidArgument, match="rising order") as error:
            parse_layers(text)
        assert error.value.field == "heads"
    with pytest.raises(InvalidArgument, match="cannot leave out layers"):
        HeldSkip("skip", (1,), object())
