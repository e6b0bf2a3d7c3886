"""Streams that break wherever they can, over and over: whoever reads them cannot tell, but by a number in their end."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from breaking import BARE, CUT, QUICK, TOLD, WAYS, breaking
from conftest import scaled
from stack import in_process_stack
from test_law import DRAFT, PROMPT, TARGET, Uniforms
from test_one_end import VOCAB, check_identities, model, random_options

import outrider
from outrider import results
from outrider.errors import DeadlineExceeded, Internal, InvalidArgument, OutriderError, Unavailable
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving import endpoints

LENGTHS = (0, 1, 1, 2, 3, 5)
"""Messages before a break; the first of a stream is `started`."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was lost may be tried again at once."""
    monkeypatch.setattr(endpoints, "HOLD", QUICK)


def options_of(rng: random.Random) -> dict[str, Any]:
    return {**random_options(rng), "num_speculative_tokens": rng.choice((0, 1, 3, 8)), "drafter": "model"}


async def test_a_text_that_breaks_anywhere_is_the_undisturbed_one() -> None:
    """Greedy and coupled: ids, text, logprobs, stop strings across the breaks, usage, and every count."""
    rng = random.Random(5)
    num_resumes = num_drafted = num_stopped = 0
    async with in_process_stack(model(1.0), model(0.85)) as stack, outrider.Client(stack.address) as client:
        async with breaking(stack.address, 6, LENGTHS) as (address, broken):
            async with outrider.Client(address, resume=QUICK) as patient:
                for number in range(scaled(300, at_least=25)):
                    options = options_of(rng)
                    prompt = [rng.randrange(VOCAB - 2) for _ in range(3)]
                    whole = await client.complete(prompt, **options)
                    answer = await patient.complete(prompt, **options)
                    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text), (number, options)
                    assert (answer.finish_reason, answer.matched_stop) == (whole.finish_reason, whole.matched_stop)
                    assert answer.logprobs == whole.logprobs
                    assert dataclasses.replace(answer.usage, cached_tokens=0) == dataclasses.replace(
                        whole.usage, cached_tokens=0
                    )
                    check_identities(answer, (), options)
                    num_resumes += answer.num_resumes
                    num_drafted += answer.speculation.num_draft_tokens
                    num_stopped += isinstance(whole.matched_stop, str)
    assert set(broken.broken) == set(WAYS), "INCONCLUSIVE"
    assert num_resumes > 0, "INCONCLUSIVE"
    assert num_drafted > 0, "INCONCLUSIVE"
    assert num_stopped > 0, "INCONCLUSIVE"


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
async def test_choices_that_break_go_on_apart(rule: str) -> None:
    """Each has its own text and end; the first that breaks breaks all of them."""
    rng = random.Random(rule)
    apart: Counter[int] = Counter()
    async with in_process_stack(model(1.0), model(0.85)) as stack, outrider.Client(stack.address) as client:
        async with breaking(stack.address, 7, (2, 4, 7, 30)) as (address, broken):
            async with outrider.Client(address, resume=QUICK) as patient:
                for _ in range(scaled(60, at_least=8)):
                    options = options_of(rng) | {"acceptance": rule, "temperature": 0.9, "n": 3, "prompt_logprobs": 1}
                    prompt = [rng.randrange(VOCAB - 2) for _ in range(3)]
                    whole, answer = await choices(client, prompt, options), await choices(patient, prompt, options)
                    for index in range(3):
                        check_identities(answer[index], (), options)
                        assert answer[index].prompt_logprobs == whole[index].prompt_logprobs
                        apart[answer[index].num_resumes] += 1
                        if rule == "coupled":
                            assert answer[index].token_ids == whole[index].token_ids
                            assert answer[index].text == whole[index].text
                            assert answer[index].finish_reason == whole[index].finish_reason
    assert max(apart) > 1, "INCONCLUSIVE"
    assert {request.output.n for request in broken.requests} == {1, 3}
    assert {request.resume_choice for request in broken.requests} == {0, 1, 2}


async def choices(client: outrider.Client, prompt: list[int], options: dict[str, Any]) -> list[results.Completion]:
    """All of a request's, each put together from its own events."""
    started: list[results.Started] = []
    told: list[results.PromptLogprobs] = []
    chunks: dict[int, list[results.Chunk]] = {0: [], 1: [], 2: []}
    ends: dict[int, results.Complete] = {}
    async for event in client.generate(prompt, **options):  # type: ignore[arg-type]
        match event:
            case results.Started():
                started.append(event)
            case results.PromptLogprobs():
                assert not any(chunks.values()), "before the first chunk"
                told.append(event)
            case results.Chunk():
                assert event.index not in ends
                chunks[event.index].append(event)
            case results.Complete():
                ends[event.index] = event
    assert len(started) == 1
    return [results.Completion.join(started[0], chunks[index], ends[index], told) for index in range(3)]


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_the_law_of_texts_that_break(rule: str) -> None:
    """What follows a break has the target's law given what was delivered before, whatever was on its way."""
    uniforms, num_accepted, num_resumes = Uniforms(seed=17), 0, 0
    async with in_process_stack(TARGET, DRAFT) as stack, breaking(stack.address, 8, (1, 2, 3, 4)) as (address, _):
        async with outrider.Client(address, resume=QUICK) as client:

            async def one(seed: int) -> results.Completion:
                return await client.complete(
                    PROMPT, temperature=1.0, seed=seed, max_tokens=40, acceptance=rule, drafter="model",
                    num_speculative_tokens=1 + seed % 4,
                )  # fmt: skip

            for first in range(0, scaled(800, at_least=40), 20):
                for answer in await asyncio.gather(*(one(first + i) for i in range(20))):
                    uniforms.add(answer.token_ids, SamplingParams(acceptance=AcceptanceRule[rule.upper()]))
                    num_accepted += answer.speculation.num_accepted_draft_tokens
                    num_resumes += answer.num_resumes
    assert num_accepted > 0, "INCONCLUSIVE"
    assert num_resumes > 40, "INCONCLUSIVE"
    assert min(uniforms.p_values()) > 1e-6 / 4


@pytest.mark.parametrize("way", [*TOLD, *BARE, CUT])
async def test_without_resuming_no_break_looks_like_an_end(way: str) -> None:
    async with in_process_stack() as stack, breaking(stack.address, 9, (3,), (way,)) as (address, _):
        async with outrider.Client(address, resume=None) as client:
            events: list[results.Event] = []
            with pytest.raises(OutriderError) as failure:
                async for event in client.generate(PROMPT, temperature=0.0, max_tokens=20):
                    events.append(event)
            assert len(events) == 3
            assert failure.value.status in ("UNAVAILABLE", "ABORTED", "INTERNAL")
            with pytest.raises(OutriderError):
                await client.complete(PROMPT, temperature=0.0, max_tokens=20)


async def test_a_text_that_never_gets_on_is_given_up_with_what_was_lost_last() -> None:
    bounded = dataclasses.replace(QUICK, max_losses=3)
    async with in_process_stack() as stack, breaking(stack.address, 9, (1,), ("lost",)) as (address, broken):
        async with outrider.Client(address, resume=bounded) as client:
            with pytest.raises(Unavailable, match="worker gone") as failure:
                await client.complete(PROMPT, max_tokens=20)
            assert failure.value.reason == "WORKER_LOST"
            assert len(broken.requests) == 4


async def test_one_that_nobody_has_begun_with_is_told_at_once() -> None:
    async with in_process_stack() as stack, breaking(stack.address, 9, (0,), ("lost",)) as (address, broken):
        async with outrider.Client(address, resume=QUICK) as client:
            with pytest.raises(Unavailable, match="worker gone"):
                await client.complete(PROMPT, max_tokens=5)
            assert len(broken.requests) == 1


@pytest.mark.parametrize("way", ["draining", "reset"])
async def test_one_that_nobody_has_begun_with_waits_for_a_coordinator_that_comes_back(way: str) -> None:
    async with in_process_stack() as stack, breaking(stack.address, 9, (0,), (way,)) as (address, broken):
        async with outrider.Client(address, resume=QUICK) as client:
            await client.server_info()  # the address is no mistake
            task = asyncio.create_task(client.complete(PROMPT, temperature=0.0, max_tokens=5))
            async with asyncio.timeout(60):
                while len(broken.requests) < 20:
                    await asyncio.sleep(0.001)
            broken.lengths = (1000,)
            answer = await task
            assert (len(answer.token_ids), answer.num_resumes) == (5, 0)


async def test_the_deadline_holds_over_all_tries() -> None:
    slow = outrider.Resume(max_losses=10**9, min_wait_s=0.05, max_wait_s=0.1)
    async with in_process_stack() as stack, breaking(stack.address, 9, (1,), ("lost",)) as (address, broken):
        async with outrider.Client(address, resume=slow, timeout_s=1.0) as client:
            with pytest.raises(DeadlineExceeded, match=r"timeout_s is 1\)?.*"):
                await client.complete(PROMPT, max_tokens=20)
            assert len(broken.requests) > 1


async def test_what_every_coordinator_would_say_is_not_asked_again() -> None:
    async with in_process_stack("toy:vocab=16,seed=1,nan_after=8") as stack:
        async with breaking(stack.address, 9, (1000,)) as (address, broken):
            async with outrider.Client(address, resume=QUICK) as client:
                with pytest.raises(InvalidArgument):
                    await client.complete(PROMPT, temperature=-1.0)
                with pytest.raises(Internal):
                    await client.complete(PROMPT, temperature=0.0, max_tokens=50)
                assert len(broken.requests) == 2


async def test_leaving_the_loop_ends_a_request_whose_choices_go_on_apart() -> None:
    async with in_process_stack("toy:vocab=16,seed=1,pass_ms=5", None) as stack:
        async with breaking(stack.address, 9, (6, 1000, 1000, 1000)) as (address, broken):
            async with outrider.Client(address, resume=QUICK) as client, outrider.Client(stack.address) as plain:
                stream = client.generate(PROMPT, n=3, max_tokens=3000, temperature=1.0)
                while len(broken.requests) < 4:
                    await anext(stream)
                await stream.aclose()
                async with asyncio.timeout(20):
                    while (await plain.server_info()).num_requests_running:
                        await asyncio.sleep(0.01)
