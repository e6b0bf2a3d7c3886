"""Drafts from the target's own first layers: same text, same law, and every layer runs once per row."""

import dataclasses

import pytest
from conftest import scaled
from law import chi_square, joint_law

torch = pytest.importorskip("torch")

from exit_toys import EarlyDriver, EarlySequence, TinyTarget  # noqa: E402
from session_loops import BUSY, GREEDY, PROMPT, RULES, header_after  # noqa: E402

from outrider.lm.exit_block import ExitContext  # noqa: E402
from outrider.sampling.params import Finish, StoppingParams  # noqa: E402
from outrider.serving.messages import TargetOpening  # noqa: E402
from target_worker.exit_drafter import HeldExit  # noqa: E402
from target_worker.session import TargetSession  # noqa: E402

TARGET = TinyTarget(16)
DRAFT_IDS = range(1, 15)
HELD = {"exit": HeldExit("exit", "folder", TARGET.adapter(DRAFT_IDS), 16)}


def session_with(sampling, *, target=TARGET, held=HELD, prompt=PROMPT, max_tokens=24):
    opening = TargetOpening(
        epoch=1,
        prompt_ids=prompt,
        max_draft_tokens=8,
        sampling=sampling,
        stopping=StoppingParams(max_tokens=max_tokens),
    )
    limits = dict(vocab_size=target.vocab_size, context_length=4096, max_draft_tokens=16)
    session = TargetSession(opening, **limits, drafters=held)
    session.sequence = EarlySequence(session.reserved_length, target)
    return session


def run(session, gamma, *, target=TARGET, how="verify", driver=None):
    driver = driver or EarlyDriver(target.row)
    verdicts = [driver.run(session.open())]
    while session.finish is Finish.NONE:
        header, wish = session.log.header, dict(drafter="exit" if gamma else "", num_draft_tokens=gamma)
        if how == "verify":
            verdicts.append(driver.run(session.verify(header, **wish)))
        else:
            driver.run(session.decode(header, (), 7, verdicts.append, **wish))
        assert not verdicts[-1].proposal_fault
        assert session.sequence.token_ids == session.log.ids[:-1]
    return verdicts


def text_of(verdicts):
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_text_is_that_of_plain_decoding(rule, busy, gamma, how):
    sampling = dataclasses.replace(RULES[rule], **busy)
    verdicts = run(session_with(sampling), gamma, how=how)
    assert text_of(verdicts) == text_of(run(session_with(sampling), 0))
    assert 0 < sum(v.num_accepted for v in verdicts) < sum(v.num_draft_tokens for v in verdicts), "INCONCLUSIVE"


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_first_layers_run_once_per_token(gamma):
    """Every row of a pass has all layers computed once, those before the exit while it was drafted but for the last
    draft's, which nobody drafted on."""
    driver, session = EarlyDriver(TARGET.row), session_with(GREEDY)
    verdicts = run(session, gamma, driver=driver)
    num_drafted = sum(verdict.num_draft_tokens for verdict in verdicts)
    num_rows = len(PROMPT) + (len(verdicts) - 1) + num_drafted
    assert num_drafted > 0
    assert (driver.num_first, driver.num_last) == (num_rows, num_rows)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token"])
def test_drafts_are_a_function_of_the_prefix(rule):
    """A session that has drafted all along and one that begins with the same text draft the same."""
    sampling = RULES[rule]
    old = session_with(sampling)
    driver = EarlyDriver(TARGET.row)
    driver.run(old.open())
    for _ in range(3):
        driver.run(old.verify(old.log.header, drafter="exit", num_draft_tokens=4))
    fresh = session_with(sampling)
    driver.run(fresh.open())
    missing = old.log.ids[len(fresh.log.ids) :]
    header = header_after(fresh, missing)
    verdicts = [
        driver.run(old.verify(header, drafter="exit", num_draft_tokens=4)),
        driver.run(fresh.verify(header, missing, drafter="exit", num_draft_tokens=4)),
    ]
    assert verdicts[0].drafted_ids == verdicts[1].drafted_ids
    assert len(verdicts[0].drafted_ids) == 4
    assert set(verdicts[0].drafted_ids) <= set(DRAFT_IDS)
    assert verdicts[0].committed_ids == verdicts[1].committed_ids


def test_a_long_prompt_is_read_in_parts_and_the_rounds_meanwhile_are_plain(monkeypatch):
    monkeypatch.setattr("target_worker.exit_drafter.ROWS_AT_ONCE", 4)
    prompt = tuple(range(1, 12))
    verdicts = run(session_with(GREEDY, prompt=prompt), 3)
    assert text_of(verdicts) == text_of(run(session_with(GREEDY, prompt=prompt), 0))
    assert [verdict.num_draft_tokens for verdict in verdicts[:5]] == [0, 0, 0, 0, 3]


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_drafts_before_a_failure_stand(rule, monkeypatch):
    """An adapter that fails after two drafts: they are kept, whatever they were; one that fails at once fails."""
    session, driver, calls = session_with(RULES[rule]), EarlyDriver(TARGET.row), []
    extend = ExitContext.extend

    def failing(context, states):
        calls.append(len(states))
        if len(calls) in (3, 4):
            raise RuntimeError("out of luck")
        return extend(context, states)

    monkeypatch.setattr(ExitContext, "extend", failing)
    driver.run(session.open())
    wish = dict(drafter="exit", num_draft_tokens=4)
    verdicts = [driver.run(session.verify(session.log.header, **wish)) for _ in range(3)]
    assert [verdict.num_draft_tokens for verdict in verdicts] == [2, 0, 4]
    assert ["out of luck" in verdict.proposal_fault for verdict in verdicts] == [False, True, False]


@pytest.mark.parametrize("busy", [{}, {"top_k": 3, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_text_has_the_targets_law(rule, busy):
    target = TinyTarget(5, seed=1)
    held = {"exit": HeldExit("exit", "folder", target.adapter(range(4)), 5)}
    params = dataclasses.replace(RULES[rule], **busy)
    counts, num_drafted, num_accepted = {}, 0, 0
    for seed in range(scaled(4000, at_least=500)):
        session = session_with(
            dataclasses.replace(params, seed=seed), target=target, held=held, prompt=(0, 1), max_tokens=4
        )
        verdicts = run(session, 3, target=target)
        text = tuple(text_of(verdicts)[:3])
        counts[text] = counts.get(text, 0) + 1
        num_drafted += sum(verdict.num_draft_tokens for verdict in verdicts)
        num_accepted += sum(verdict.num_accepted for verdict in verdicts)
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, params, 3, prompt=(0, 1))) > 1e-4
