"""Draft and target sessions in rounds: the text is the target's own, whatever was drafted."""

from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, adaptive_gamma, chi_square, joint_law, table_pair
from session_loops import (
    BUSY,
    GREEDY,
    RULES,
    HandDriver,
    Rounds,
    draft_session,
    plain_text,
    rounds,
    target_session,
    toy,
)

from outrider.drafting.proposal import Proposal, SparseQ
from outrider.sampling.params import AcceptanceRule, Finish, Origin, SamplingParams, StoppingParams

TARGET = toy("vocab=16,seed=1")
DRAFT = toy("vocab=16,seed=1,agreement=0.8")
GAMMAS = [1, 2, 3, 5, 8, 16]
EXACT = {
    "greedy": GREEDY,
    "greedy_busy": SamplingParams(temperature=0.0, **BUSY),
    "coupled": RULES["coupled"],
    "coupled_busy": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3, temperature=0.7, top_k=6, **BUSY),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("gamma", [*GAMMAS, "varying"])
@pytest.mark.parametrize("drafter", ["model", "tree"])
def test_text_is_that_of_plain_decoding(name: str, gamma: int | str, drafter: str) -> None:
    wanted = (lambda index: (0, 5, 1, 3, 8)[index % 5]) if gamma == "varying" else gamma
    stopping = StoppingParams(max_tokens=150, min_tokens=3, stop_token_ids=frozenset({15}))
    loop = rounds(TARGET, DRAFT, EXACT[name], wanted, stopping, drafter=drafter)
    plain = plain_text(TARGET, EXACT[name], stopping)
    assert loop.run() == plain
    if len(plain) > 40:
        assert loop.num_drafted > 0, "INCONCLUSIVE"


def test_some_texts_above_are_long_and_both_drafters_had_accepts_and_rejects() -> None:
    stopping = StoppingParams(max_tokens=150)
    for drafter in ("model", "tree"):
        loop = rounds(TARGET, DRAFT, RULES["coupled"], 5, stopping, drafter=drafter)
        assert loop.run() == plain_text(TARGET, RULES["coupled"], stopping)
        assert len(loop.text) == 150
        assert 0 < loop.num_accepted < loop.num_drafted, drafter


@pytest.mark.parametrize("name", RULES)
def test_self_draft_is_accepted_whole(name: str) -> None:
    """Greedy and COUPLED draw alike on both ends. The p/q rules differ by the rounding of q to 65,536ths only."""
    loop = rounds(TARGET, TARGET, RULES[name], 4, StoppingParams(max_tokens=100))
    loop.run()
    assert loop.num_drafted >= 50
    if name in ("greedy", "coupled"):
        assert loop.num_accepted == loop.num_drafted
    else:
        assert loop.num_accepted >= loop.num_drafted - 2


@pytest.mark.parametrize("name", RULES)
def test_a_round_has_one_committed_length(name: str) -> None:
    """Origins, counts and logprobs end with the ids; `Rounds` asserts the cache after each round."""
    stopping = StoppingParams(max_tokens=60)
    loop = rounds(TARGET, DRAFT, RULES[name], 6, stopping)
    loop.target = target_session(TARGET, RULES[name], stopping, logprobs=True, top_logprobs=2)
    loop.run()
    assert loop.num_drafted > 0
    assert len(loop.text) == 60
    for verdict in loop.verdicts:
        told = verdict.logprobs.unpacked()
        assert len(told.token_logprobs) == len(verdict.committed_ids)
        assert (told.num_top, len(told.top_ids)) == (2, 2 * len(verdict.committed_ids))
        assert verdict.origins[: verdict.num_accepted] == (Origin.ACCEPTED,) * verdict.num_accepted
        assert len(verdict.soft_acceptances) == verdict.num_draft_tokens
    assert loop.verdicts[-1].finish is Finish.LENGTH
    assert loop.target_driver.num_forwards == len(loop.verdicts), "one pass a round"


def _malformed(rng: np.random.Generator, proposal: Proposal) -> Proposal:
    ids, q = list(proposal.token_ids), list(proposal.q)
    match rng.integers(5):
        case 0:
            ids[rng.integers(len(ids))] = 16 + int(rng.integers(1000))
        case 1:
            q = [SparseQ(np.array([1], np.uint32), np.array([65_535]))] * len(ids)
        case 2:
            q = [None] * (len(ids) + 1)
        case 3:
            q = [SparseQ(np.array([i, i], np.uint32), np.array([32_768, 32_768])) for i in ids]
        case 4:
            q = [SparseQ(np.array([(i + 1) % 16], np.uint32), np.array([65_536])) for i in ids]
    return Proposal(token_ids=tuple(ids), q=tuple(q))


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_malformed_proposals_are_dropped_and_counted_and_change_no_text(name: str) -> None:
    plain = plain_text(TARGET, RULES[name])
    for seed in range(scaled(200)):
        rng = np.random.default_rng(seed)

        def mangle(proposal: Proposal, rng: np.random.Generator = rng) -> Proposal:
            return _malformed(rng, proposal) if proposal.token_ids and rng.random() < 0.5 else proposal

        loop = rounds(TARGET, DRAFT, RULES[name], 4, mangle=mangle)
        assert loop.run() == plain
        faults = [verdict for verdict in loop.verdicts if verdict.proposal_fault]
        assert loop.target.counters.num_faulty_proposals == len(faults) > 0
        assert all(v.num_draft_tokens == 0 and v.origins == (Origin.PLAIN,) for v in faults)


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_well_formed_nonsense_changes_no_text(name: str) -> None:
    rng = np.random.default_rng(5)

    def mangle(proposal: Proposal) -> Proposal:
        return Proposal(token_ids=tuple(int(i) for i in rng.integers(16, size=rng.integers(9))))

    loop = rounds(TARGET, DRAFT, RULES[name], 4, mangle=mangle)
    assert loop.run() == plain_text(TARGET, RULES[name])
    assert loop.num_drafted > 0


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_joint_law_across_rounds(rule: AcceptanceRule) -> None:
    """Of the first 4 tokens over many seeds, γ following the soft acceptances past a rejection."""
    target, draft = table_pair(3, 3)
    stopping = StoppingParams(max_tokens=8)
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = 0
    for seed in range(scaled(25_000)):
        params = SamplingParams(acceptance=rule, seed=seed)
        loop = Rounds(
            target_session(target, params, stopping, prompt_ids=(0, 1)),
            draft_session(draft, params, stopping, prompt_ids=(0, 1)),
            HandDriver(target.row),
            HandDriver(draft.row),
            lambda _: 0,
        )
        loop.num_draft_tokens = lambda _, loop=loop: adaptive_gamma(loop.verdicts[-1].soft_acceptances)
        counts[tuple(loop.run()[:4])] += 1
        num_drafted += loop.num_drafted
        num_accepted += loop.num_accepted
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, SamplingParams(acceptance=rule), 4)) > FALSE_ALARM
