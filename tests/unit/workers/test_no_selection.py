"""Nothing selects among sampled drafts: neither a row that cannot be read, nor how long a proposal takes."""

from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, PROMPT, TableModel, chi_square, joint_law, table_pair
from session_loops import GREEDY, HandDriver, Rounds, draft_session, target_session, toy

from outrider.drafting.proposal import EMPTY, Proposal
from outrider.errors import Internal
from outrider.sampling import AcceptanceRule, History, Noise, SamplingParams, distribution, hash_ids
from outrider.sampling.params import Finish, StoppingParams
from target_worker.acceptance import verify

RATIO_RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
NO_STOP = StoppingParams(max_tokens=1000)
POISON = 2


def poisoned(model: TableModel) -> TableModel:
    """Rows right after the token POISON cannot be read."""
    logits = model.logits.copy()
    logits[:, POISON] = np.nan
    return TableModel(logits)


def never_poison(model: TableModel) -> TableModel:
    """The token POISON is impossible."""
    logits = model.logits.copy()
    logits[:, :, POISON] = -np.inf
    return TableModel(logits)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_bad_row_of_the_draft_ends_the_proposal_and_the_law_is_exact(rule: AcceptanceRule) -> None:
    """Dropping a whole proposal because of a row after its first draft would drop that draft for what it was."""
    target, _ = table_pair(3, 4, spread=0.5)
    draft = poisoned(target)
    counts: Counter[tuple[int, ...]] = Counter()
    num_cut = num_drafted = 0
    for seed in range(scaled(20_000)):
        params = SamplingParams(acceptance=rule, seed=seed)
        session = draft_session(toy("vocab=3"), params, prompt_ids=PROMPT)
        try:
            proposal = HandDriver(draft.row).run(session.advance(session.log.header, (), 3)) or EMPTY
        except Internal:
            proposal = EMPTY  # as a coordinator does
        num_cut += len(proposal) < 3
        num_drafted += len(proposal)
        rows = target.rows([*PROMPT, *proposal.token_ids], len(proposal) + 1)
        noise = Noise(seed)
        outcome = verify(rows, proposal, params, NO_STOP, History(PROMPT), noise, hash_ids(PROMPT), len(PROMPT))
        counts[outcome.token_ids[:1]] += 1
    assert 0 < num_cut < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, SamplingParams(), 1)) > FALSE_ALARM


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_of_the_target_that_nobody_reaches_hurts_nobody(rule: AcceptanceRule, temperature: float) -> None:
    """The target never says POISON, the draft does, and the target's rows after it are bad: the law is plain's."""
    target, draft = table_pair(3, 4)
    target = poisoned(never_poison(target))
    params = SamplingParams(acceptance=rule, temperature=temperature)
    counts: Counter[tuple[int, ...]] = Counter()
    num_poisoned = 0
    for seed in range(scaled(20_000)):
        noise = Noise(seed)
        drafter = draft_session(toy("vocab=3"), SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=seed),
                                prompt_ids=PROMPT)  # fmt: skip
        proposal = HandDriver(draft.row).run(drafter.advance(drafter.log.header, (), 3)) or EMPTY
        if temperature == 0.0 or rule is AcceptanceRule.COUPLED:
            proposal = Proposal(proposal.token_ids)
        num_poisoned += POISON in proposal.token_ids[:-1]
        rows = target.rows([*PROMPT, *proposal.token_ids], len(proposal) + 1)
        history = History(PROMPT)
        outcome = verify(rows, proposal, params, NO_STOP, history, noise, hash_ids(PROMPT), len(PROMPT))
        assert history.num_output_tokens == 0
        assert len(outcome.soft_acceptances) == len(proposal)
        counts[outcome.token_ids[:1]] += 1
    assert num_poisoned > 0, "INCONCLUSIVE"
    if temperature:
        assert chi_square(counts, joint_law(target, SamplingParams(), 1)) > FALSE_ALARM
    else:
        assert len(counts) == 1


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_sampled_proposal_is_as_long_as_asked_whatever_was_drawn(rule: AcceptanceRule) -> None:
    """Else one with a stop token would come sooner, be late less often, and stop tokens would be drafted too often."""
    model = toy("vocab=8,seed=1")
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({1, 2}))
    num_stops = 0
    for seed in range(scaled(200)):
        session = draft_session(model, SamplingParams(acceptance=rule, seed=seed), stopping)
        proposal = HandDriver(model.logits_for).run(session.advance(session.log.header, (), 6))
        assert proposal is not None
        assert len(proposal) == len(proposal.q) == 6
        num_stops += bool({1, 2} & set(proposal.token_ids[:-1]))
    assert num_stops > 0, "INCONCLUSIVE"


def test_the_target_spends_nothing_on_drafts_after_a_stop_token() -> None:
    model = toy("vocab=16,seed=1")
    hand = HandDriver(model.logits_for)
    session = target_session(model, GREEDY, StoppingParams(max_tokens=40, stop_token_ids=frozenset({9})))
    first = hand.run(session.open())
    assert not first.finish
    verdict = hand.run(session.verify(session.log.header, (), Proposal((4, 9, 5, 6))))
    assert verdict is not None
    assert verdict.num_draft_tokens == len(verdict.soft_acceptances) == 2


def text_law(target: TableModel, params: SamplingParams, stopping: StoppingParams) -> dict[tuple[int, ...], float]:
    """P(text) of plain decoding to its end, by enumeration: texts that a stop token or `max_tokens` ends."""
    ended: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    while open_texts:
        text, probability = open_texts.popitem()
        p = distribution(target.row([*PROMPT, *text]), params, stopping, History(PROMPT, text))
        for token_id in np.nonzero(p)[0].tolist():
            longer = (*text, token_id)
            ends = token_id in stopping.stop_token_ids or len(longer) == stopping.max_tokens
            (ended if ends else open_texts)[longer] = probability * float(p[token_id])
    return ended


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_law_of_whole_texts_that_stop_tokens_and_limits_end(rule: AcceptanceRule) -> None:
    """Stop tokens are drafted, accepted, drafted over and, at first, masked; penalties count the drafts."""
    target, draft = table_pair(3, 6)
    stopping = StoppingParams(max_tokens=5, min_tokens=2, stop_token_ids=frozenset({1}))
    busy = {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = num_stopped = 0
    for seed in range(scaled(30_000)):
        params = SamplingParams(acceptance=rule, seed=seed, **busy)
        loop = Rounds(
            target_session(target, params, stopping, prompt_ids=PROMPT),
            draft_session(draft, params, stopping, prompt_ids=PROMPT),
            HandDriver(target.row),
            HandDriver(draft.row),
            lambda index, seed=seed: 1 + (index + seed) % 4,
        )
        counts[tuple(loop.run())] += 1
        num_drafted += loop.num_drafted
        num_accepted += loop.num_accepted
        num_stopped += loop.text[-1] == 1
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert num_stopped > 0, "INCONCLUSIVE"
    assert chi_square(counts, text_law(target, SamplingParams(acceptance=rule, **busy), stopping)) > FALSE_ALARM


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_after_a_stop_token_is_nobodys(rule: AcceptanceRule, temperature: float) -> None:
    """Plain decoding never computes it."""
    target, _ = table_pair(3, 4, spread=0.5)
    target = poisoned(target)
    params = SamplingParams(acceptance=rule, temperature=temperature)
    stopping = StoppingParams(max_tokens=100, stop_token_ids=frozenset({POISON}))
    row = target.row(PROMPT)
    row[POISON] = 50.0  # the target is sure of it
    session = target_session(toy("vocab=3"), params, stopping, prompt_ids=(0,))
    session.log.append(1)
    hand = HandDriver(lambda ids: row if len(ids) == 2 else target.row(ids))
    verdict = hand.run(session.verify(session.log.header, (), Proposal((POISON, 0))))
    assert verdict is not None
    assert (verdict.committed_ids, verdict.num_accepted, verdict.num_draft_tokens) == ((POISON,), 1, 1)
    assert verdict.finish is Finish.STOP
    assert len(verdict.origins) == 1
