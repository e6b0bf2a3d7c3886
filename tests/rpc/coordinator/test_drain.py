"""Services that drain under load: streams end or go on elsewhere, with a reason, and no token is lost or told twice."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from stack import Server, in_process_stack, start

import coordinator.server
import draft_worker.server
from coordinator.draining import HandedOver
from coordinator.journal import Journal
from coordinator.metrics import CoordinatorMetrics
from outrider import results
from outrider.client import Client
from outrider.errors import OutriderError, Unavailable
from outrider.settings import CoordinatorSettings, DraftWorkerSettings

TARGET = "toy:vocab=48,seed=5,blocks=4000"
DRAFT = "toy:vocab=48,seed=5,agreement=0.9,blocks=4000"
GRACE = {"drain_grace_s": 0.5}
LONG = 2000
"""Tokens of a text that no grace of these tests is long enough for."""
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"},
    {"temperature": 1.0, "seed": 9},
    {"temperature": 1.0, "acceptance": "block", "num_speculative_tokens": 2, "drafter": "model"},
    {"temperature": 0.0, "num_speculative_tokens": 0},
]


@asynccontextmanager
async def coordinators(count: int = 2, **settings: Any) -> AsyncIterator[tuple[list[Server], Any]]:
    """So many over the same two targets and draft workers, and the stack of these."""
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(
            in_process_stack(
                TARGET + ",pass_ms=5", DRAFT, num_targets=2, coordinator={**GRACE, **settings}, worker=GRACE
            )
        )
        servers = [stack.coordinator]
        workers = {
            "target_workers": tuple(server.address for server in stack.target),
            "draft_workers": tuple(server.address for server in stack.draft),
        }
        for _ in range(count - 1):
            own = CoordinatorSettings(**{"port": 0, "log_level": "warning", **GRACE, **workers, **settings})
            server = await start(coordinator.server.serve, own)
            cleanup.push_async_callback(server.close)
            servers.append(server)
        yield servers, stack


async def until_begun(client: Client, prompt: list[int], options: dict[str, Any], num_tokens: int = 10) -> Any:
    """A stream, and its events up to so many tokens."""
    stream = client.generate(prompt, **options)
    events: list[results.Event] = []
    while sum(len(event.token_ids) for event in events if isinstance(event, results.Chunk)) < num_tokens:
        events.append(await anext(stream))
    return stream, events


async def rest_of(stream: Any, events: list[results.Event]) -> OutriderError | None:
    """Reads it to its end; the error, if it has one."""
    try:
        async for event in stream:
            events.append(event)
    except OutriderError as error:
        return error
    return None


def ids_of(events: list[results.Event]) -> tuple[int, ...]:
    return tuple(i for event in events if isinstance(event, results.Chunk) for i in event.token_ids)


async def no_sessions(client: Client) -> None:
    async with asyncio.timeout(20):
        while any(
            w.num_sessions or (w.healthy and w.capacity.num_sessions) for w in (await client.server_info()).workers
        ):
            await asyncio.sleep(0.05)


async def test_a_coordinator_that_drains_hands_its_streams_to_another() -> None:
    async with coordinators() as (servers, _):
        async with Client([server.address for server in servers]) as client:
            whole = [await client.complete([1, n], max_tokens=400, **o) for n, o in enumerate(REQUESTS)]
            assert sum(answer.speculation.num_draft_tokens for answer in whole) > 0, "INCONCLUSIVE"
            begun = [await until_begun(client, [1, n % 4], {"max_tokens": 400, **REQUESTS[n % 4]}) for n in range(6)]
            loads = [await number_running(server) for server in servers]
            assert min(loads) > 0, "INCONCLUSIVE: one client's streams are spread over all coordinators"
            servers[0].stop.set()
            failures = await asyncio.gather(*(rest_of(*one) for one in begun))
            assert failures == [None] * 6
            await servers[0].task
            for number, (_, events) in enumerate(begun):
                ids, end = ids_of(events), events[-1]
                assert isinstance(end, results.Complete)
                assert end.usage.completion_tokens == len(ids) == 400
                if number % 4 != 2:
                    assert ids == whole[number % 4].token_ids, number
            resumes = [events[-1].num_resumes for _, events in begun]
            assert sorted(set(resumes)) == [0, 1], "those of the other one are not disturbed"
            later = await client.complete([1, 2], temperature=0.0, max_tokens=20)
            assert len(later.token_ids) == 20


async def number_running(server: Server) -> int:
    async with Client(server.address) as client:
        return (await client.server_info()).num_requests_running


async def test_who_is_handed_over_is_told_why_behind_a_whole_round() -> None:
    """What any client reads: all chunks, then UNAVAILABLE with its reason; by hand, the text goes on elsewhere."""
    async with coordinators() as (servers, _):
        async with (
            Client(servers[0].address, resume=None) as client,
            Client(servers[1].address, resume=None) as other,
        ):
            options = {**REQUESTS[0], "max_tokens": LONG}
            stream, events = await until_begun(client, [1, 2], options)
            servers[0].stop.set()
            error = await rest_of(stream, events)
            assert isinstance(error, Unavailable)
            assert (error.reason, error.retry_delay_s) == ("DRAINING", 0.0)
            assert "resume_token_ids" in error.message
            started, ids = events[0], ids_of(events)
            assert isinstance(started, results.Started)
            options["max_tokens"] = len(ids) + 50
            rest = await other.complete(
                [1, 2], resume_token_ids=ids, prompt_hash=started.prompt_hash,
                model_fingerprint=started.model_fingerprint, **options,
            )  # fmt: skip
            whole = await other.complete([1, 2], **options)
            assert (*ids, *rest.token_ids) == whole.token_ids
            assert rest.speculation.num_draft_tokens > 0, "INCONCLUSIVE"
            await no_sessions(other)


async def test_a_request_that_is_handed_over_is_counted_apart_from_failures() -> None:
    class Nobody:
        num_running = num_waiting = num_lingering = num_paused = 0

        def workers(self) -> tuple[Any, ...]:
            return ()

    registry = CollectorRegistry()
    journal = Journal(CoordinatorMetrics(registry, Nobody(), Nobody()).failed)  # type: ignore[arg-type]
    for error in (HandedOver(), Unavailable("gone")):
        with pytest.raises(Unavailable), journal.request("r", time.perf_counter()) as entry:
            entry.model = "m"
            raise error
    for status in ("HANDED_OVER", "UNAVAILABLE"):
        assert registry.get_sample_value("outrider_request_failure_total", {"model_name": "m", "status": status}) == 1


async def test_who_waits_for_a_place_and_who_comes_late_go_elsewhere_too() -> None:
    async with coordinators(max_running_requests=1) as (servers, _):
        async with Client(servers[0].address, resume=None) as client:
            stream, events = await until_begun(client, [1, 2], {**REQUESTS[0], "max_tokens": LONG})
            waiting = client.generate([1, 3], max_tokens=LONG, temperature=0.0)
            assert isinstance(await anext(waiting), results.Started)
            servers[0].stop.set()
            errors = [await rest_of(waiting, []), await rest_of(stream, events)]
            assert [error.reason for error in errors if error is not None] == ["DRAINING", "DRAINING"]


async def test_a_new_request_does_without_a_coordinator_that_drains() -> None:
    async with coordinators() as (servers, _):
        async with Client(servers[0].address, resume=None) as holder:
            stream, events = await until_begun(holder, [1, 2], {**REQUESTS[0], "max_tokens": LONG})
            servers[0].stop.set()
            async with Client([servers[0].address, servers[1].address]) as client:
                for _ in range(6):
                    assert len((await client.complete([1, 2], max_tokens=5)).token_ids) == 5
            await rest_of(stream, events)


async def test_all_choices_are_handed_over_each_behind_its_own_round() -> None:
    async with coordinators() as (servers, _):
        async with Client([server.address for server in servers]) as client:
            options = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 300}
            stream, events = await until_begun(client, [1, 2], options)
            for server in servers:
                if await number_running(server):
                    server.stop.set()
            assert await rest_of(stream, events) is None
            whole = [event async for event in client.generate([1, 2], **options)]
            for index in range(3):
                assert ids_of([e for e in events if getattr(e, "index", -1) == index]) == ids_of(
                    [e for e in whole if getattr(e, "index", -1) == index]
                )
            ends = [event for event in events if isinstance(event, results.Complete)]
            assert sorted((end.index, end.num_resumes) for end in ends) == [(0, 1), (1, 1), (2, 1)]


async def test_a_client_that_does_not_read_still_gets_all_that_was_made_for_it() -> None:
    async with coordinators(emit_buffer_chunks=4) as (servers, _):
        async with Client(servers[0].address, resume=None) as client, Client(servers[1].address) as other:
            options = {"temperature": 0.0, "num_speculative_tokens": 0}
            stream, events = await until_begun(client, [1, 2], {**options, "max_tokens": LONG})
            servers[0].stop.set()
            await asyncio.wait({servers[0].task}, timeout=0.5)  # it waits for room, not for a round
            error = await rest_of(stream, events)
            assert error is not None
            ids = ids_of(events)
            whole = await other.complete([1, 2], max_tokens=len(ids), **options)
            assert ids == whole.token_ids


async def test_a_draining_target_gives_its_streams_to_another_and_nobody_notices() -> None:
    async with coordinators(count=1) as (servers, stack), Client(servers[0].address, resume=None) as client:
        whole = [await client.complete([1, n], max_tokens=400, **o) for n, o in enumerate(REQUESTS)]
        begun = [await until_begun(client, [1, n % 4], {"max_tokens": 400, **REQUESTS[n % 4]}) for n in range(6)]
        busy = [w for w in (await client.server_info()).workers if w.role == "target" and w.num_sessions]
        assert len(busy) == 2, "INCONCLUSIVE"
        stack.target[0].stop.set()
        assert await asyncio.gather(*(rest_of(*one) for one in begun)) == [None] * 6
        await stack.target[0].task
        for number, (_, events) in enumerate(begun):
            if number % 4 != 2:
                assert ids_of(events) == whole[number % 4].token_ids, number
            assert len(ids_of(events)) == 400
        await no_sessions(client)


async def test_a_draining_draft_worker_is_no_failure_and_another_one_drafts() -> None:
    async with coordinators(count=1) as (servers, stack), Client(servers[0].address, resume=None) as client:
        options = {**REQUESTS[0], "max_tokens": 900, "report_steps": True}
        stream, events = await until_begun(client, [1, 2], options)
        settings = DraftWorkerSettings(
            model=DRAFT, port=0, log_level="warning", coordinators=(servers[0].address,), drain_grace_s=1.0
        )
        other = await start(draft_worker.server.serve, settings)
        async with asyncio.timeout(20):
            while sum(w.healthy for w in (await client.server_info()).workers if w.role == "draft") < 2:
                await asyncio.sleep(0.02)
        stack.draft[0].stop.set()
        await stack.draft[0].task
        num_before = len(events)
        assert await rest_of(stream, events) is None
        end = events[-1]
        assert isinstance(end, results.Complete)
        assert end.speculation.num_draft_failures == 0
        steps = [event.step for event in events[num_before:] if isinstance(event, results.Chunk)]
        assert any(step is not None and step.num_draft_tokens for step in steps), "another one drafts"
        whole = await client.complete([1, 2], **{**options, "num_speculative_tokens": 0})
        assert ids_of(events) == whole.token_ids
        await other.close()


async def test_a_model_of_other_weights_goes_on_with_no_text() -> None:
    async with in_process_stack(TARGET, None) as stack, Client(stack.address) as client:
        first = await client.complete([1, 2], temperature=0.0, max_tokens=10)
        assert first.started.model_fingerprint == (await client.model_info()).model_fingerprint
        assert first.started.max_tokens == 10
        with pytest.raises(OutriderError) as refused:
            await client.complete(
                [1, 2], max_tokens=10, resume_token_ids=first.token_ids[:3], model_fingerprint="other"
            )
        assert (refused.value.status, refused.value.reason) == ("FAILED_PRECONDITION", "MODEL_CHANGED")
        assert refused.value.field == "model_fingerprint"
