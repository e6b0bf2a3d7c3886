"""A verdict may be lost because of what it says: the law stays exact, for the round is decided anew by the same coins.

The target here ends its session instead of sending a verdict that begins with the likeliest id, the first time that it
comes to it; deaths at random moments are a milder case of that. If the round were decided by other coins then, the
other ids would have a second chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import scaled
from stack import in_process_stack
from test_law import DRAFT, FALSE_ALARM, MAX_TOKENS, PROMPT, TARGET, Uniforms
from waiting import wait_for_drafts

import outrider
import target_worker.server as target_server
from coordinator.target_link import TargetLink, Timed
from outrider.errors import Aborted
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving.messages import TargetOpening
from outrider.serving.session_calls import SealedProposal


class Losing:
    """Sessions that end once before each verdict over drafts whose first id is the likeliest one."""

    def __init__(self) -> None:
        self.num_lost = 0
        self._decided: set[tuple[int, int, int]] = set()

    def wrap(self, session: Any) -> Any:
        async def losing(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
            seed = 0

            async def seen() -> AsyncIterator[Any]:
                nonlocal seed
                async for request in requests:
                    if request.WhichOneof("message") == "open":
                        seed = request.open.sampling.seed
                    yield request

            async for response in session(servicer, seen(), context):
                verdict = response.verdict
                if verdict.row_choices and verdict.row_choices[0] == verdict.committed_ids[0]:
                    round_key = (seed, verdict.header.base_length, verdict.header.prefix_hash)
                    if round_key not in self._decided:
                        self._decided.add(round_key)
                        self.num_lost += 1
                        raise Aborted("what it says is not said", reason="SESSION_LOST")
                yield response

        return losing


async def texts(rule: str, num_streams: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Uniforms, int, int]:
    """(what they are, verdicts lost, drafts accepted)."""
    losing = Losing()
    with monkeypatch.context() as patch:
        patch.setattr(target_server.TargetServicer, "Session", losing.wrap(target_server.TargetServicer.Session))
        wait_for_drafts(patch)
        async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
            requests = (
                client.complete(
                    PROMPT, temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, acceptance=rule, drafter="model",
                    num_speculative_tokens=1 + seed % 4,
                )
                for seed in range(num_streams)
            )  # fmt: skip
            answers = [await asyncio.gather(*batch) for batch in in_batches(list(requests), 16)]
    told = [answer for batch in answers for answer in batch]
    uniforms = Uniforms(seed=len(rule))
    for answer in told:
        uniforms.add(answer.token_ids, SamplingParams(acceptance=AcceptanceRule[rule.upper()]))
    return uniforms, losing.num_lost, sum(answer.speculation.num_accepted_draft_tokens for answer in told)


def in_batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_a_loss_that_depends_on_what_was_decided_leaves_the_law_alone(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_streams = scaled(400, at_least=40)
    uniforms, num_lost, num_accepted = await texts(rule, num_streams, monkeypatch)
    assert num_lost > 5 * num_streams, "INCONCLUSIVE: hardly anything was lost"
    assert num_accepted > num_streams, "INCONCLUSIVE: hardly anything was drafted"
    assert min(uniforms.p_values()) > FALSE_ALARM


async def test_a_round_that_is_decided_by_other_coins_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is asked for without its drafts: else the test above proves nothing."""
    real_open, real_verify = TargetLink.open_deferred, TargetLink.verify
    reopened = set[TargetLink]()

    async def open_deferred(link: TargetLink, opening: TargetOpening) -> None:
        reopened.add(link)
        await real_open(link, opening)

    async def verify(link: TargetLink, proposal: SealedProposal) -> Timed:
        is_first = link in reopened
        reopened.discard(link)
        return await real_verify(link, SealedProposal() if is_first else proposal)

    monkeypatch.setattr(TargetLink, "open_deferred", open_deferred)
    monkeypatch.setattr(TargetLink, "verify", verify)
    uniforms, num_lost, _ = await texts("block", 40, monkeypatch)
    assert num_lost > 200, "INCONCLUSIVE: hardly anything was lost"
    assert min(uniforms.p_values()) < FALSE_ALARM


async def test_greedy_and_coupled_texts_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    losing, model = Losing(), ToyModel(parse_toy(TARGET))
    monkeypatch.setattr(target_server.TargetServicer, "Session", losing.wrap(target_server.TargetServicer.Session))
    ids = list(PROMPT)
    for _ in range(MAX_TOKENS):
        ids.append(int(model.logits_for(ids).argmax()))
    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        for gamma in (0, 3, 5):
            options = {"max_tokens": MAX_TOKENS, "num_speculative_tokens": gamma}
            greedy = await client.complete(PROMPT, temperature=0, **options)
            assert list(greedy.token_ids) == ids[len(PROMPT) :]
        coupled = [
            await client.complete(PROMPT, temperature=1, seed=5, max_tokens=MAX_TOKENS, num_speculative_tokens=gamma)
            for gamma in (0, 2, 5)
        ]
        assert len({answer.token_ids for answer in coupled}) == 1
    assert losing.num_lost > 0, "INCONCLUSIVE"
