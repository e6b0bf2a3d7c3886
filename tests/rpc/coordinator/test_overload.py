"""More than the services can take, for real: who is let in, who is refused and what is told, and clients that do not
read. Conditions are waited for, never times."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
from conftest import scaled
from stack import in_process_stack, start
from waiting import until

import outrider
import outrider.client
from coordinator import server as coordinator_server
from coordinator.admission import Ticket
from coordinator.outbox import Outbox
from coordinator.peer import Peer
from coordinator.stream import Stream
from outrider.errors import Aborted, InvalidArgument, ResourceExhausted
from outrider.lm.toy import ToyModel, parse_toy
from outrider.results import Chunk, Started
from outrider.settings import CoordinatorSettings

TOY = "toy:vocab=16,seed=1"
TENANT = "x-outrider-tenant"
PROMPT = [1, 2, 3]
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Of a connection: what a client does not read stays with the server."""


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.client, "CLIENT_OPTIONS", (*outrider.client.CLIENT_OPTIONS, *SMALL_WINDOW))


def greedy(prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    model, ids = ToyModel(parse_toy(TOY)), list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model.logits_for(ids).argmax()))
    return tuple(ids[len(prompt) :])


async def running(client: outrider.Client) -> tuple[int, int]:
    info = await client.server_info()
    return info.num_requests_running, info.num_requests_waiting


async def paused(client: outrider.Client) -> int:
    return (await client.server_info()).num_requests_paused


async def target_capacity(client: outrider.Client) -> Any:
    return next(w.capacity for w in (await client.server_info()).workers if w.role == "target")


@asynccontextmanager
async def unread(client: outrider.Client, **options: Any) -> AsyncIterator[Any]:
    """A stream whose first event was read, and no more: what it says is so long that the transport cannot hold it."""
    asked = client.generate(PROMPT, temperature=0, logprobs=True, top_logprobs=16, **options)
    async with aclosing(asked) as events:
        assert isinstance(await anext(events), Started)
        yield events


async def test_ten_times_as_many_as_fit_are_let_in_or_refused_and_all_texts_are_exact() -> None:
    num_clients, per_client = 40, scaled(20, at_least=2)
    async with (
        in_process_stack(
            f"{TOY},pass_ms=1", coordinator={"max_running_requests": 2, "max_waiting_requests": 2}
        ) as stack,
        outrider.Client(stack.address) as client,
    ):
        refused: list[ResourceExhausted] = []

        async def one(index: int) -> None:
            for number in range(per_client):
                prompt = [index % 16, number % 16, 5]
                while True:
                    try:
                        answer = await client.complete(prompt, temperature=0, max_tokens=12)
                        break
                    except ResourceExhausted as error:
                        refused.append(error)
                        await asyncio.sleep(min(0.2, error.retry_delay_s or 0))
                assert answer.token_ids == greedy(prompt, 12)

        await asyncio.gather(*map(one, range(num_clients)))
        assert len(refused) > num_clients
        assert {error.reason for error in refused} == {"QUEUE_FULL"}
        assert all(error.retry_delay_s for error in refused)
        await until(lambda: _is(running(client), (0, 0)))
        await until(_nothing_held)


async def test_a_stream_takes_little_memory() -> None:
    """Of Python's objects, all three services' and the client's together: streams that pause, their outboxes full of
    logprobs."""
    num_streams, settings = scaled(200, at_least=60), {"emit_buffer_chunks": 8}
    async with (
        in_process_stack(TOY, coordinator=settings) as stack,
        outrider.Client(stack.address) as client,
        AsyncExitStack() as streams,
    ):
        await streams.enter_async_context(unread(client, max_tokens=1000))
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(num_streams):
                await streams.enter_async_context(unread(client, max_tokens=1000))
            await until(lambda: _is(paused(client), num_streams + 1))
            gc.collect()
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_bytes / num_streams < 200_000


async def test_one_request_of_a_tenant_does_not_wait_for_a_hundred_of_another() -> None:
    settings = {"max_running_requests": 1, "max_waiting_requests": 100}
    async with in_process_stack(TOY, coordinator=settings) as stack:
        clients = [outrider.Client(stack.address, metadata={TENANT: name}, resume=None) for name in ("many", "one")]
        many, one = clients
        ended: list[str] = []

        async def ask(client: outrider.Client, name: str, max_tokens: int) -> None:
            await client.complete(PROMPT, temperature=0, max_tokens=max_tokens)
            ended.append(name)

        async with unread(many, max_tokens=3000) as first:
            hundred = [asyncio.create_task(ask(many, "many", 8)) for _ in range(100)]
            await until(lambda: _is(running(many), (1, 100)))
            # the queue is full of them, and still it is taken in: the last of them makes room
            lonely = asyncio.create_task(ask(one, "one", 8))
            await asyncio.wait(hundred, return_when=asyncio.FIRST_COMPLETED)
            displaced = [task for task in hundred if task.done()]
            with pytest.raises(ResourceExhausted):
                displaced[0].result()
            async for _ in first:
                pass
            await lonely
        assert ended.index("one") <= 1
        for task in hundred:
            task.cancel()
        await asyncio.gather(*hundred, return_exceptions=True)
        await until(lambda: _is(running(one), (0, 0)))
        for client in clients:
            await client.close()


async def test_who_cannot_begin_before_its_deadline_is_refused_when_it_comes() -> None:
    settings = {"max_running_requests": 1, "max_waiting_requests": 100}
    async with (
        in_process_stack(f"{TOY},pass_ms=200", coordinator=settings) as stack,
        outrider.Client(stack.address) as client,
    ):
        # of two passes at least: whoever has ninety before it waits for half a minute
        await client.complete(PROMPT, temperature=0, max_tokens=2, num_speculative_tokens=0)
        asked = [asyncio.create_task(client.complete(PROMPT, temperature=0, max_tokens=3000)) for _ in range(90)]
        await until(lambda: _is(running(client), (1, 89)))
        with pytest.raises(ResourceExhausted, match="would wait") as refused:
            await client.complete(PROMPT, temperature=0, max_tokens=16, timeout_s=20)
        assert refused.value.reason == "DEADLINE_TOO_SHORT"
        assert refused.value.retry_delay_s
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: _is(running(client), (0, 0)))
        answer = await client.complete(PROMPT, temperature=0, max_tokens=2, timeout_s=60)
        assert answer.token_ids == greedy(PROMPT, 2)


async def test_requests_wait_for_a_targets_blocks_in_the_coordinator_not_on_the_target() -> None:
    """Five blocks of 16 take two streams of 3 + 24 tokens at once."""
    most = [0, 0]
    async with (
        in_process_stack(f"{TOY},blocks=5,pass_ms=1", target_worker={"cache_overcommit": 1.0}) as stack,
        outrider.Client(stack.address) as client,
    ):
        asked = [asyncio.create_task(client.complete(PROMPT, temperature=0, max_tokens=24)) for _ in range(12)]
        while not all(task.done() for task in asked):
            info, capacity = await client.server_info(), await target_capacity(client)
            assert capacity.num_waiting == 0
            most = [max(most[0], info.num_requests_running), max(most[1], info.num_requests_waiting)]
        assert {task.result().token_ids for task in asked} == {greedy(PROMPT, 24)}
        assert capacity.max_promised_blocks == 5
    assert most[0] == 2
    assert most[1] > 0


async def test_two_coordinators_fill_one_target_and_all_is_served() -> None:
    worker = {"cache_overcommit": 1.0, "max_batch_tokens": 4}
    async with in_process_stack(f"{TOY},blocks=8,pass_ms=1", target_worker=worker) as stack:
        settings = CoordinatorSettings(
            port=0, log_level="warning", drain_grace_s=2.0, target_workers=(stack.target[0].address,)
        )
        other = await start(coordinator_server.serve, settings)
        try:
            async with outrider.Client(stack.address) as one, outrider.Client(other.address) as two:
                asked = (c.complete(PROMPT, temperature=0, max_tokens=24) for c in (one, two) for _ in range(10))
                assert {a.token_ids for a in await asyncio.gather(*asked)} == {greedy(PROMPT, 24)}
        finally:
            await other.close()


async def test_a_slow_client_pauses_its_own_stream_whose_cache_others_may_have() -> None:
    """Its rounds stop; its session ends with its lease, and begins anew from the log when the client reads on."""
    settings = {"max_running_requests": 2, "emit_buffer_chunks": 2}
    async with (
        in_process_stack(TOY, coordinator=settings, worker={"session_idle_lease_s": 2.5}) as stack,
        outrider.Client(stack.address) as slow,
        outrider.Client(stack.address) as quick,
    ):
        async with unread(slow, max_tokens=3000, request_id="slow") as events:
            # as of the coordinator's looks, one a second
            await until(lambda: _holds_cache(quick))
            await until(lambda: _is_free(quick))
            num_rounds = await _num_rounds(quick)
            answer = await quick.complete(PROMPT, temperature=0, max_tokens=50)
            assert answer.token_ids == greedy(PROMPT, 50), "others go on"
            assert await running(quick) == (1, 0), "it keeps its place"
            assert await _num_rounds(quick) == num_rounds, "paused"
            ids = [token_id async for event in events if isinstance(event, Chunk) for token_id in event.token_ids]
        assert tuple(ids) == greedy(PROMPT, 3000)
        assert 0 < num_rounds < await _num_rounds(quick)


async def test_a_client_that_does_not_read_at_all_loses_its_place_and_can_resume() -> None:
    settings = {"max_running_requests": 1, "emit_buffer_chunks": 2, "max_client_pause_s": 0.3}
    async with (
        in_process_stack(TOY, coordinator=settings) as stack,
        outrider.Client(stack.address, resume=None) as stalled,
        outrider.Client(stack.address) as other,
    ):
        ids: list[int] = []
        async with unread(stalled, max_tokens=3000) as events:
            answer = await other.complete(PROMPT, temperature=0, max_tokens=20)
            assert answer.token_ids == greedy(PROMPT, 20), "its place is free before it has read anything"
            with pytest.raises(Aborted, match="has read nothing for") as ended:
                async for event in events:
                    ids += event.token_ids if isinstance(event, Chunk) else ()
        assert ended.value.reason == "CLIENT_STALLED"
        assert 0 < len(ids) < 3000
        asked = stalled.generate(PROMPT, temperature=0, max_tokens=3000, resume_token_ids=ids)
        ids += [token_id async for event in asked if isinstance(event, Chunk) for token_id in event.token_ids]
        assert tuple(ids) == greedy(PROMPT, 3000)


async def test_a_complete_text_holds_no_place_while_its_client_reads() -> None:
    settings = {"max_running_requests": 1, "emit_buffer_chunks": 4096}
    async with (
        in_process_stack(TOY, coordinator=settings) as stack,
        outrider.Client(stack.address) as slow,
        outrider.Client(stack.address) as other,
    ):
        async with unread(slow, max_tokens=3000) as events:
            assert (await other.complete(PROMPT, temperature=0, max_tokens=20)).token_ids == greedy(PROMPT, 20)
            ids = [token_id async for event in events if isinstance(event, Chunk) for token_id in event.token_ids]
        assert tuple(ids) == greedy(PROMPT, 3000)
        await until(lambda: _is(running(other), (0, 0)))


async def test_more_calls_than_may_be_at_once_are_not_even_read() -> None:
    async with in_process_stack(TOY, coordinator={"max_concurrent_calls": 2, "emit_buffer_chunks": 2}) as stack:
        clients = [outrider.Client(stack.address, resume=None) for _ in range(3)]
        async with unread(clients[0], max_tokens=3000), unread(clients[1], max_tokens=3000):
            with pytest.raises(ResourceExhausted):
                await clients[2].complete(PROMPT, max_tokens=2)
        await until(lambda: _answers(clients[2]))
        for client in clients:
            await client.close()


async def _answers(client: outrider.Client) -> bool:
    try:
        return bool(await client.complete(PROMPT, max_tokens=2))
    except ResourceExhausted:
        return False


async def _nothing_held() -> bool:
    """No state of any request is left in this process, which is all of the services."""
    gc.collect()
    return not any(isinstance(found, Ticket | Outbox | Stream | Peer) for found in gc.get_objects())


async def _is(told: Any, wanted: Any) -> bool:
    return await told == wanted


async def _holds_cache(client: outrider.Client) -> bool:
    return (await target_capacity(client)).num_promised_blocks > 0


async def _is_free(client: outrider.Client) -> bool:
    """Whether no stream holds any of the target's cache, though one runs."""
    capacity = await target_capacity(client)
    return (await running(client))[0] == 1 and capacity.num_sessions == 0 and not capacity.num_promised_blocks


async def _num_rounds(client: outrider.Client) -> int:
    (stream,) = await client.trace("slow")
    return len(stream.steps) + stream.num_left_out


async def test_a_request_that_is_refused_leaves_what_is_kept_of_others_alone() -> None:
    """One of the same name among them: it would be the whole trace of the one that ran."""
    async with in_process_stack(TOY, None, coordinator={"max_running_requests": 1}) as stack:
        async with outrider.Client(stack.address) as client:
            await client.complete(PROMPT, max_tokens=8, request_id="one")
            (trace,) = await client.trace("one")
            with pytest.raises(InvalidArgument, match=r"output\.n is 2"):
                async for _ in client.generate(PROMPT, max_tokens=8, request_id="one", n=2):
                    pass
            assert await client.trace("one") == (trace,)
