"""Why a stream must not draft from what a stream of its own seed has sampled: the law would be wrong, and by much."""

from collections import Counter

import pytest
from conftest import scaled
from law import FALSE_ALARM, NO_STOP, PROMPT, chi_square, joint_law, table_pair

from outrider.drafting.proposal import Proposal
from outrider.sampling import AcceptanceRule, History, Noise, SamplingParams, hash_ids
from target_worker.acceptance import verify


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_a_draft_that_the_same_coins_have_chosen_is_biased_and_one_of_other_coins_is_not(rule: AcceptanceRule) -> None:
    target, _ = table_pair(4, 2)
    params = SamplingParams(acceptance=rule)

    def said(seed: int, draft: int) -> int:
        logits = target.rows([*PROMPT, draft], 2)
        outcome = verify(
            logits, Proposal((draft,)), params, NO_STOP, History(PROMPT), Noise(seed), hash_ids(PROMPT), len(PROMPT)
        )
        return outcome.token_ids[0]

    num_seeds = scaled(40_000)
    first = {seed: said(seed, 0) for seed in range(num_seeds)}
    law = joint_law(target, params, 1)
    own = Counter((said(seed, first[seed]),) for seed in range(num_seeds))
    others = Counter((said(seed, first[(seed + 1) % num_seeds]),) for seed in range(num_seeds))
    assert chi_square(own, law) < FALSE_ALARM / 1000
    assert chi_square(others, law) > FALSE_ALARM
