"""Under TOKEN and BLOCK nothing that a stream of the same seed came to may decide anything: it threw the same coins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.local_drafts import LocalDrafts, LocalMemory
from coordinator.pool import SessionPool
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.drafting.guess import Evidence
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.settings import CoordinatorSettings

MODEL = Candidate("model")
PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0)


class Directory:
    """Of no workers."""

    def healthy(self, model: str) -> list[Any]:
        return []


def request(sampling: SamplingParams, **fields: Any) -> ResolvedRequest:
    return ResolvedRequest(
        request_id="r", model="toy", prompt_ids=PROMPT, prompt_hash=hash_ids(PROMPT), sampling=sampling,
        stopping=StoppingParams(99), max_speculative_tokens=4, **fields,
    )  # fmt: skip


def sampled(rule: AcceptanceRule) -> SamplingParams:
    return SamplingParams(acceptance=rule, seed=7)


CASES = [
    (sampled(AcceptanceRule.BLOCK), {}, False),
    (sampled(AcceptanceRule.TOKEN), {}, False),
    (sampled(AcceptanceRule.BLOCK), {"has_fresh_seed": True}, True),
    (sampled(AcceptanceRule.COUPLED), {}, True),
    (GREEDY, {}, True),
]


@pytest.mark.parametrize(("sampling", "fields", "learns"), CASES)
def test_how_drafts_fared_is_learnt_from_others_only_where_they_had_other_coins(
    sampling: SamplingParams, fields: dict[str, Any], learns: bool
) -> None:
    directory: Any = Directory()
    pool = SessionPool(directory, CoordinatorSettings())
    first, second = pool.policy(request(sampling, **fields)), pool.policy(request(sampling, **fields))
    bad = RoundReport(
        choice=Choice("model", 4, "best", candidate=MODEL), num_draft_tokens=4, num_committed=1,
        soft_acceptances=bytes(4), draft_ms=16.0, verify_ms=12.0, round_ms=28.0,
    )  # fmt: skip
    for _ in range(64):
        first.observe(bad)
    plain = RoundReport(choice=Choice("", 0, "best"), num_committed=4, verify_ms=40.0, round_ms=40.0)
    first.observe(plain)
    choice = second.choose(4, 64, (MODEL,))
    # what work takes is known from the other stream in any case: nothing is tried out for it
    assert choice.reason in ("best", "prior")
    assert choice.num_draft_tokens == 0 if learns else choice.num_draft_tokens > 0
    assert (choice.price is None) or learns, "a draft worker ends chains by what it learnt of all streams"


@pytest.mark.parametrize(("sampling", "fields", "learns"), CASES)
def test_so_are_the_chances_of_guesses(sampling: SamplingParams, fields: dict[str, Any], learns: bool) -> None:
    memory = LocalMemory(CoordinatorSettings())
    evidence = Evidence("lookup", 4, 2)

    def drafts() -> LocalDrafts:
        return LocalDrafts(Stream(dataclasses.replace(request(sampling, **fields)), 0, ToyCodec(94)), memory)

    unlearnt = drafts()._chances.chance(evidence)
    first = drafts()
    for _ in range(64):
        first._chances.observe(evidence, 0.0)
    assert (drafts()._chances.chance(evidence) < unlearnt) == learns
