"""`Generate` end to end over three real services in this process, on toy models (simulated)."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from accounting import held, num_accounted
from conftest import scaled
from stack import Stack, in_process_stack
from waiting import until

from outrider import results, server_info
from outrider.client import Client
from outrider.errors import OutriderError
from outrider.sampling.params import AcceptanceRule, Origin
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

TARGET = "toy:vocab=48,seed=5"
DRAFT = "toy:vocab=48,seed=5,agreement=0.9"
GAMMAS = (0, 1, 2, 3, 5, 8, 16, None)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process_stack(TARGET, DRAFT) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.address) as connected:
        yield connected


async def no_sessions(client: Client) -> None:
    """Waits until no service holds a session, a cache block or a running request any more."""

    async def none() -> bool:
        info = await client.server_info()
        return not (held(info.workers) or info.num_requests_running or info.num_requests_waiting)

    await until(none)


async def test_text_is_the_same_for_any_number_of_drafts(client: Client) -> None:
    rng = random.Random(1)
    for case in range(scaled(20, at_least=3)):
        prompt = [rng.randrange(32) for _ in range(rng.randrange(1, 30))]
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": case}):
            texts, drafted = set(), 0
            for gamma in GAMMAS:
                answer = await client.complete(prompt, max_tokens=60, num_speculative_tokens=gamma, **options)
                texts.add(answer.token_ids)
                assert len(answer.token_ids) == 60
                if gamma == 0:
                    assert answer.speculation.num_draft_tokens == 0
                elif gamma is not None:
                    assert answer.speculation.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
                    assert answer.speculation.num_accepted_draft_tokens > 0
                    assert max(i for i, n in enumerate(answer.speculation.gamma_histogram) if n) <= gamma
                drafted += answer.speculation.num_draft_tokens
            assert len(texts) == 1, options
            assert drafted > 0


async def test_usage_tells_what_was_not_computed_again(client: Client) -> None:
    prompt = [i % 48 for i in range(100)]
    first = await client.complete(prompt, max_tokens=30, temperature=0.0)
    again = await client.complete(prompt, max_tokens=30, temperature=0.0)
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 96)
    assert first.token_ids == again.token_ids
    chat = await client.complete([*prompt, *first.token_ids, 1, 2], max_tokens=5, temperature=0.0)
    assert chat.usage.cached_tokens == 128
    async with asyncio.timeout(20):
        while (counters := (await client.server_info()).workers[0].cache_counters).num_cached_tokens < 96 + 128:
            await asyncio.sleep(0.05)
    assert counters == server_info.CacheCounters(num_cached_tokens=96 + 128)


@pytest.mark.parametrize("drafter", ["model", "lookup", "suffix", "auto"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
async def test_every_rule_and_drafter_accounts_for_every_token(client: Client, rule: str, drafter: str) -> None:
    prompt = np.random.default_rng(1).integers(48, size=1200).tolist()  # so long that most pairs of ids are in it
    answer = await client.complete(
        prompt,
        temperature=0.4,
        max_tokens=200,
        num_speculative_tokens=4,
        drafter=drafter,
        acceptance=rule,
        report_steps=True,
        logprobs=True,
        top_logprobs=3,
    )
    spec, usage = answer.speculation, answer.usage
    assert answer.started.acceptance is AcceptanceRule[rule.upper()]
    assert spec.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
    assert usage.completion_tokens == len(answer.token_ids) == len(answer.origins) == len(answer.text) == 200
    assert usage.prompt_tokens == answer.started.num_prompt_tokens == 1200
    assert num_accounted(spec) == 200
    assert (
        spec.num_accepted_draft_tokens == answer.origins.count(Origin.ACCEPTED) == sum(spec.num_accepted_tokens_per_pos)
    )
    assert spec.num_draft_tokens == sum(spec.num_draft_tokens_per_pos)
    assert spec.num_spec_steps == sum(spec.acceptance_histogram) == sum(spec.gamma_histogram[1:])
    assert spec.mean_acceptance_length == pytest.approx(1 + spec.num_accepted_draft_tokens / spec.num_spec_steps)
    assert spec.num_proposal_bytes > 0
    assert spec.drafters == (("model",) if drafter == "auto" else (drafter,))
    assert sum(use.num_draft_tokens for use in spec.drafter_uses) == spec.num_draft_tokens
    assert sum(use.num_accepted_draft_tokens for use in spec.drafter_uses) == spec.num_accepted_draft_tokens
    assert sum(use.num_rounds for use in spec.drafter_uses) == spec.num_steps
    assert {use.drafter for use in spec.drafter_uses if use.num_draft_tokens} == set(spec.drafters)
    assert {use.reason for use in spec.drafter_uses} <= {"prefill", "fixed", "no-match", "no-room", "draft-opening"}
    steps = [chunk.step for chunk in answer.chunks if chunk.step is not None]
    assert len(steps) == len(answer.chunks)
    # times of microseconds may round to nothing, those of all rounds together do not
    assert 0 < sum(step.sampling_ms for step in steps) < sum(step.verify_ms for step in steps)
    assert sum(step.emit_ms for step in steps) > 0
    assert sum(step.num_draft_tokens for step in steps) == spec.num_draft_tokens
    assert sum(step.num_accepted_draft_tokens for step in steps) == spec.num_accepted_draft_tokens
    assert answer.logprobs is not None
    assert len(answer.logprobs.token_logprobs) == len(answer.logprobs.top) == 200
    assert all(len(row) == 3 and row[0][1] >= row[1][1] >= row[2][1] for row in answer.logprobs.top)


async def test_logprobs_do_not_depend_on_speculation(client: Client) -> None:
    answers = [
        await client.complete(
            "ABC", temperature=0, max_tokens=40, num_speculative_tokens=g, logprobs=True, top_logprobs=2
        )
        for g in (0, 4)
    ]
    assert answers[1].speculation.num_accepted_draft_tokens > 0
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs is not None
    assert answers[0].logprobs == answers[1].logprobs


async def test_sixteen_streams_at_once_give_what_each_gives_alone(client: Client) -> None:
    def options(i: int) -> dict:
        sampled = {"temperature": 0.5 + i / 10, "seed": i, "top_k": i, "top_p": 1 - i / 40, "presence_penalty": i / 10}
        return {
            **({"temperature": 0.0} if i % 3 == 0 else sampled),
            "num_speculative_tokens": GAMMAS[i % len(GAMMAS)],
            "max_tokens": 30 + 3 * i,
            "repetition_penalty": 1 + i / 20,
        }

    alone = [await client.complete([i, 2 * i % 32, 7], **options(i)) for i in range(16)]
    together = await asyncio.gather(*(client.complete([i, 2 * i % 32, 7], **options(i)) for i in range(16)))
    assert sum(answer.speculation.num_draft_tokens for answer in together) > 0
    assert [a.token_ids for a in alone] == [t.token_ids for t in together]
    await no_sessions(client)


async def test_choices_of_one_request_compute_its_prompt_once(client: Client) -> None:
    prompt = [i % 48 for i in range(96)]
    cached = [
        event.usage.cached_tokens
        async for event in client.generate(prompt, n=4, seed=3, temperature=1, max_tokens=8)
        if isinstance(event, results.Complete)
    ]
    assert sorted(cached) == [0, 95, 95, 95]  # the last token is computed in a copy of the block that holds it


async def test_choices_are_independent_and_each_the_same_as_before(client: Client) -> None:
    async def choices() -> tuple[list[str], list[results.Complete]]:
        texts, completes = [""] * 4, []
        async for event in client.generate("ABC", n=4, seed=3, temperature=1, max_tokens=20, num_speculative_tokens=2):
            if isinstance(event, results.Chunk):
                texts[event.index] += event.text
            elif isinstance(event, results.Complete):
                completes.append(event)
        return texts, completes

    (texts, completes), (again, _) = await choices(), await choices()
    assert texts == again
    assert len(set(texts)) == 4
    assert sorted(complete.index for complete in completes) == [0, 1, 2, 3]
    single = await client.complete("ABC", seed=3, temperature=1, max_tokens=20)
    assert single.text == texts[0]


@pytest.mark.parametrize("gamma", [0, 4])
async def test_stop_strings_end_everything_at_one_token_wherever_rounds_fall(client: Client, gamma: int) -> None:
    whole = await client.complete("AB", temperature=0, max_tokens=80, num_speculative_tokens=gamma)
    for start in range(0, scaled(60, at_least=12), 5):
        stop = whole.text[start : start + 4]
        cut = whole.text.index(stop)
        for include in (False, True):
            answer = await client.complete(
                "AB",
                temperature=0,
                max_tokens=80,
                num_speculative_tokens=gamma,
                stop=[stop, "never there"],
                include_stop_str_in_output=include,
                logprobs=True,
            )
            assert answer.text == whole.text[: cut + (4 if include else 0)]
            assert answer.matched_stop == stop
            assert answer.finish_reason == "stop"
            assert answer.usage.completion_tokens == len(answer.token_ids) == cut + 4
            assert answer.logprobs is not None
            assert len(answer.logprobs.token_logprobs) == len(answer.origins) == cut + 4


@pytest.mark.parametrize("gamma", [0, 3])
async def test_stop_tokens_and_limits_end_at_their_token(client: Client, gamma: int) -> None:
    whole = await client.complete("AB", temperature=0, max_tokens=50, num_speculative_tokens=gamma)
    stop = whole.token_ids[20]
    first = whole.token_ids.index(stop)
    answer = await client.complete(
        "AB", temperature=0, max_tokens=50, num_speculative_tokens=gamma, stop_token_ids=[stop]
    )
    assert answer.token_ids == whole.token_ids[: first + 1]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    for max_tokens in (1, 2, 7):
        short = await client.complete("AB", temperature=0, max_tokens=max_tokens, num_speculative_tokens=gamma)
        assert short.token_ids == whole.token_ids[:max_tokens]
        assert (short.finish_reason, short.matched_stop) == ("length", None)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}])
async def test_a_stream_resumes_at_every_cut(client: Client, options: dict) -> None:
    request = {**options, "max_tokens": 24, "presence_penalty": 0.5, "num_speculative_tokens": 3}
    events = [event async for event in client.generate("ABC", **request)]
    started = events[0]
    assert isinstance(started, results.Started)
    whole = await client.complete("ABC", **request)
    for cut in range(0, 25, scaled(1) if scaled(10) >= 10 else 4):
        rest = await client.complete(
            "ABC",
            **{**request, "seed": started.seed, "acceptance": started.acceptance, "prompt_hash": started.prompt_hash},
            resume_token_ids=whole.token_ids[:cut],
        )
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.text == whole.text[cut:]
        assert rest.usage.completion_tokens == 24
        assert rest.finish_reason == "length"
    with pytest.raises(OutriderError) as changed:
        await client.complete("ABD", **request, prompt_hash=started.prompt_hash)
    assert changed.value.status == "FAILED_PRECONDITION"


async def test_sampled_streams_resume_with_the_same_law_and_no_repeated_text(client: Client) -> None:
    request = {"temperature": 1.0, "max_tokens": 30, "num_speculative_tokens": 3, "acceptance": "block"}
    first = await client.complete("ABC", **request)
    rest = await client.complete("ABC", **request, seed=first.started.seed, resume_token_ids=first.token_ids[:12])
    assert rest.started.acceptance is AcceptanceRule.BLOCK
    assert len(rest.token_ids) == len(rest.text) == 18


async def test_started_comes_first_and_names_the_request(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(request_id="my-id", text="ABC"))
        first = await call.read()
        assert first.started.request_id == "my-id"
        assert first.started.num_prompt_tokens == 3
        assert dict(await call.initial_metadata())["x-request-id"] == "my-id"
        call.cancel()


async def test_cancelled_streams_leave_nothing_behind(client: Client) -> None:
    rng = random.Random(2)

    async def cancelled(number: int) -> None:
        stream = client.generate(
            [number % 32, 3],
            temperature=1.0,
            max_tokens=400,
            num_speculative_tokens=GAMMAS[number % len(GAMMAS)],
            n=1 + number % 2,
        )
        num_events = rng.choice([0, 1, 2, 5, 20])
        task = asyncio.ensure_future(take(stream, num_events))
        await asyncio.wait({task}, timeout=rng.choice([0.001, 0.01, 0.05, 1.0]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def take(stream: AsyncIterator[results.Event], num_events: int) -> None:
        while num_events >= 0:
            await anext(stream)
            num_events -= 1

    num_streams = scaled(1000)
    for begin in range(0, num_streams, 25):
        await asyncio.gather(*(cancelled(i) for i in range(begin, min(begin + 25, num_streams))))
    await no_sessions(client)
    answer = await client.complete("AB", temperature=0, max_tokens=5)
    assert len(answer.token_ids) == 5


async def test_a_deadline_ends_the_stream_and_frees_both_sides() -> None:
    async with in_process_stack(TARGET + ",pass_ms=20", DRAFT) as stack, Client(stack.address) as client:
        with pytest.raises(OutriderError) as late:
            await client.complete("ABC", temperature=0, max_tokens=4000, timeout_s=0.4)
        assert late.value.status == "DEADLINE_EXCEEDED"
        await no_sessions(client)


async def test_a_slow_client_gets_every_token_and_stops_nobody(stack: Stack, client: Client) -> None:
    slow = client.generate("ABC", temperature=0, max_tokens=1500, num_speculative_tokens=0)
    ids: list[int] = []
    async for event in slow:
        if isinstance(event, results.Chunk):
            ids += event.token_ids
            if len(ids) in (1, 500):
                other = await client.complete("AB", temperature=0, max_tokens=20, num_speculative_tokens=2)
                assert len(other.token_ids) == 20
    assert len(ids) == 1500
    whole = await client.complete("ABC", temperature=0, max_tokens=1500, num_speculative_tokens=4)
    assert whole.token_ids == tuple(ids)


async def test_the_draft_models_shorter_context_ends_drafting_only() -> None:
    async with in_process_stack(TARGET, DRAFT + ",context=40") as stack, Client(stack.address) as client:
        plain = await client.complete("ABC", temperature=0, max_tokens=120, num_speculative_tokens=0)
        answer = await client.complete("ABC", temperature=0, max_tokens=120, num_speculative_tokens=3)
        assert answer.token_ids == plain.token_ids
        assert answer.speculation.num_draft_tokens > 0
        assert answer.speculation.num_draft_failures == 0
        beyond = await client.complete([1] * 60, temperature=0, max_tokens=20, num_speculative_tokens=3)
        assert len(beyond.token_ids) == 20
        assert beyond.speculation.num_draft_failures == 0
