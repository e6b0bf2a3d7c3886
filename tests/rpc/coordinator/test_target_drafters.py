"""Drafters inside the target, through the real services: text, counts, statistics, choice, failover."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from stack import Stack, in_process_stack, start

import target_worker.server as target_server
from coordinator.metric_families import FALLBACKS
from outrider import results
from outrider.client import Client
from outrider.errors import InvalidArgument
from outrider.sampling.params import Origin
from outrider.settings import TargetWorkerSettings

TARGET, DRAFT = "toy:vocab=64,seed=5", "toy:vocab=64,seed=5,agreement=0.6"
HEADS = {"heads": ("good=toy:agreement=0.9", "weak=toy:agreement=0.2")}
GREEDY = {"temperature": 0.0}
COUPLED = {"temperature": 0.8, "seed": 3}
PROMPT = [1, 2, 3]


@pytest.fixture(params=[None, DRAFT], ids=["alone", "beside-a-draft-worker"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with in_process_stack(TARGET, request.param, target_worker=HEADS) as running:
        yield running


@pytest.mark.parametrize("options", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_text_does_not_depend_on_them(stack: Stack, options: dict) -> None:
    async with Client(stack.address) as client:
        plain = await client.complete(PROMPT, max_tokens=120, num_speculative_tokens=0, **options)
        assert plain.speculation.num_draft_tokens == 0
        for drafter in ("good", "weak", "good-tree", "auto"):
            for gamma in (1, 4, None):
                extra = {} if gamma is None else {"num_speculative_tokens": gamma}
                answer = await client.complete(PROMPT, max_tokens=120, drafter=drafter, **options, **extra)
                assert answer.token_ids == plain.token_ids
                if drafter != "auto":
                    assert answer.speculation.drafters in ((drafter,), ())
                    assert answer.speculation.num_draft_tokens > 0 or gamma is None, "INCONCLUSIVE"


@pytest.mark.parametrize("drafter", ["good", "good-tree"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
async def test_every_token_is_accounted_for(stack: Stack, rule: str, drafter: str) -> None:
    async with Client(stack.address) as client:
        answer = await client.complete(
            PROMPT, max_tokens=60, drafter=drafter, num_speculative_tokens=3, acceptance=rule, report_steps=True,
            temperature=1.0, logprobs=True, seed=4,
        )  # fmt: skip
    spec = answer.speculation
    assert spec.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
    assert spec.num_accepted_draft_tokens == answer.origins.count(Origin.ACCEPTED) > 0
    assert spec.num_tokens == len(answer.token_ids) == 60
    assert {use.drafter for use in spec.drafter_uses if use.num_draft_tokens} == {drafter}
    assert sum(use.num_draft_tokens for use in spec.drafter_uses) == spec.num_draft_tokens
    assert sum(use.num_rounds for use in spec.drafter_uses) == spec.num_steps
    assert spec.num_proposal_bytes == 0, "no draft crossed a wire"
    steps = [chunk.step for chunk in answer.chunks if chunk.step is not None]
    assert sum(step.num_draft_tokens for step in steps) == spec.num_draft_tokens
    drafted = [step for step in steps if step.num_draft_tokens]
    assert {step.drafter for step in drafted} == {drafter}
    assert all(step.num_draft_tokens <= step.num_draft_tokens_wanted <= 3 for step in drafted)
    assert any(step.draft_ms > 0 for step in drafted)


async def test_unknown_drafters_are_told_who_offers_what(stack: Stack) -> None:
    async with Client(stack.address) as client:
        info = await client.model_info()
        assert set(info.drafters) >= {"good", "weak", "lookup", "suffix"}
        offered = r"good, good-tree, weak, weak-tree \(target workers\), lookup, suffix \(coord"
        with pytest.raises(InvalidArgument, match=offered):
            await client.complete(PROMPT, drafter="eagle9", max_tokens=4)
        workers = (await client.server_info()).workers
        assert [w.drafters for w in workers if w.role == "target"] == [("good", "good-tree", "weak", "weak-tree")]


async def test_the_statistics_say_who_won_and_why() -> None:
    async with in_process_stack(
        TARGET + ",pass_ms=4", DRAFT + ",pass_ms=4", target_worker=HEADS, coordinator={"local_drafters": ()}
    ) as stack, Client(stack.address) as client:  # fmt: skip
        for _ in range(2):
            answer = await client.complete(PROMPT, max_tokens=200, **GREEDY)
    spec = answer.speculation
    outlooks = {outlook.drafter: outlook for outlook in spec.drafter_outlooks}
    assert set(outlooks) == {"", "model", "good", "good-tree", "weak", "weak-tree"}
    assert spec.drafter_outlooks[0].expected_tokens_per_s == max(o.expected_tokens_per_s for o in outlooks.values())
    tokens = Counter[str]()
    for use in spec.drafter_uses:
        tokens[use.drafter.removesuffix("-tree")] += use.num_accepted_draft_tokens
        assert use.reason == "prefill" or use.expected_tokens_per_s > 0
    assert max(tokens, key=lambda name: tokens[name]) == "good", "its drafts cost next to nothing and are right"


async def test_rounds_are_plain_beside_a_head_because_that_was_best_and_not_for_want_of_a_draft_worker() -> None:
    worker = {"heads": ("weak=toy:agreement=0.05,pass_ms=20",)}
    alone = {"local_drafters": ""}
    async with in_process_stack(TARGET + ",pass_ms=4", None, target_worker=worker, coordinator=alone) as stack:
        async with Client(stack.address) as client:
            answer = await client.complete(PROMPT, max_tokens=200, ignore_eos=True, **GREEDY)
    plain = {use.reason for use in answer.speculation.drafter_uses if not use.drafter}
    assert "best" in plain
    assert {use.reason for use in answer.speculation.drafter_uses} & set(FALLBACKS) == set()


@pytest.mark.parametrize("drafter", ["good", "auto"])
async def test_a_target_without_that_drafter_takes_over(drafter: str) -> None:
    """The stream goes on with what is there, and its text is the same."""
    common = {"port": 0, "drain_grace_s": 0.0, "log_level": "warning", "model": TARGET + ",pass_ms=5"}
    bare = await start(target_server.serve, TargetWorkerSettings(**common))
    try:
        async with in_process_stack(
            TARGET + ",pass_ms=5", None, target_worker={**HEADS, "drain_grace_s": 0.0},
            coordinator={"local_drafters": (), "draft_workers": ()},
        ) as other:  # fmt: skip
            addresses = (other.target[0].address, bare.address)
            async with (
                in_process_stack(TARGET + ",pass_ms=5", None, num_targets=0, coordinator={"target_workers": addresses})
                as stack,
                Client(stack.address) as client,
            ):  # fmt: skip
                options = {**GREEDY, "max_tokens": 500, "drafter": drafter, "num_speculative_tokens": 3}
                plain = await client.complete(PROMPT, **{**options, "num_speculative_tokens": 0, "drafter": "auto"})
                ids: list[int] = []
                complete = None
                async for event in client.generate(PROMPT, **options):
                    if isinstance(event, results.Chunk):
                        ids += event.token_ids
                        if len(ids) > 20 and not other.target[0].stop.is_set():
                            await other.target[0].close()
                    if isinstance(event, results.Complete):
                        complete = event
    finally:
        await bare.close()
    assert tuple(ids) == plain.token_ids
    assert complete is not None
    assert "good" in complete.speculation.drafters, "INCONCLUSIVE: the worker with heads never had the stream"
    if drafter == "good":
        assert complete.speculation.num_plain_tokens > 10, "the one drafter that was named is gone"
    else:
        assert set(complete.speculation.drafters) <= {"good", "good-tree", "lookup", "suffix"}
