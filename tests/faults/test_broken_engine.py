"""Target workers that live on and compute no more: their streams go elsewhere, and nobody comes to them.

Passes fail or hang because the test makes them; everything else is real.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from stack import Server, start
from waiting import until

import coordinator.server as coordinator_server
import outrider.lm.engine_health as engine_health
import target_worker.server as target_server
from outrider import Chunk, Client
from outrider.errors import Internal
from outrider.lm.loading import load_model
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

TARGET = "toy:vocab=24,seed=5,pass_ms=2"
DEADLY = 17
LENGTH = 60
Fail = Callable[[Any], None]


class Break:
    """What the passes of a worker do from now on."""

    def __init__(self, model: Any) -> None:
        self.fail: Fail = lambda batch: None
        self.num_passes = 0
        forward = model.forward

        def breaking(batch: Any) -> Any:
            self.num_passes += 1
            self.fail(batch)
            return forward(batch)

        model.forward = breaking


@asynccontextmanager
async def targets(number: int) -> AsyncIterator[tuple[Client, dict[str, Break]]]:
    async with AsyncExitStack() as cleanup:
        breaks: dict[str, Break] = {}
        for _ in range(number):
            worker = TargetWorkerSettings(model=TARGET, log_level="error", drain_delay_s=0.0, drain_grace_s=0.0, port=0)
            loaded = load_model(worker)
            broken = Break(loaded.model)
            server: Server = await start(target_server.serve, worker, loaded=loaded)
            cleanup.push_async_callback(server.close)
            breaks[server.address] = broken
        settings = CoordinatorSettings(
            port=0, log_level="error", drain_delay_s=0.0, target_workers=tuple(breaks), target_wait_s=60.0
        )
        server = await start(coordinator_server.serve, settings)
        cleanup.push_async_callback(server.close)
        yield await cleanup.enter_async_context(Client(server.address, resume=None)), breaks


def options(number: int) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "max_tokens": LENGTH,
        "num_speculative_tokens": number % 3,
        "logit_bias": {DEADLY: -100},
    }


async def undisturbed(client: Client) -> list[tuple[int, ...]]:
    return [(await client.complete([i, i + 1], **options(i))).token_ids for i in range(6)]


async def with_streams_under_way(client: Client, then: Callable[[], None]) -> list[tuple[int, ...]]:
    """Texts of six streams; `then` is called once each has begun."""
    begun = asyncio.Barrier(7)

    async def one(number: int) -> tuple[int, ...]:
        ids: list[int] = []
        async for event in client.generate([number, number + 1], **options(number)):
            if isinstance(event, Chunk):
                if not ids:
                    await begun.wait()
                ids += event.token_ids
        return tuple(ids)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await begun.wait()
    then()
    async with asyncio.timeout(60):
        return await asyncio.gather(*tasks)


def no_card(batch: Any) -> None:
    raise RuntimeError("the card has lost its context")


async def test_streams_of_a_worker_whose_passes_fail_go_on_elsewhere_and_no_other_comes() -> None:
    async with targets(2) as (client, breaks):
        whole = await undisturbed(client)
        broken = next(iter(breaks.values()))
        assert await with_streams_under_way(client, lambda: setattr(broken, "fail", no_card)) == whole

        async def is_known() -> bool:
            assert await undisturbed(client) == whole, "nobody is hurt until it is known"
            return sum(w.healthy for w in (await client.server_info()).workers) == 1

        await until(is_known)
        before = broken.num_passes
        assert await undisturbed(client) == whole
        assert broken.num_passes == before


async def test_streams_of_a_worker_whose_pass_hangs_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "MAX_PASS_S", 1.0)
    async with targets(2) as (client, breaks):
        whole = await undisturbed(client)
        ends, broken = threading.Event(), next(iter(breaks.values()))
        try:
            hang = lambda batch: ends.wait(100) and None  # noqa: E731
            assert await with_streams_under_way(client, lambda: setattr(broken, "fail", hang)) == whole
        finally:
            ends.set()


async def test_a_request_that_every_pass_fails_of_fails_alone() -> None:
    def poisoned(batch: Any) -> None:
        if any(DEADLY in segment.token_ids for segment in batch.segments):
            raise RuntimeError("no such shape")

    async with targets(3) as (client, breaks):
        whole = await undisturbed(client)
        for broken in breaks.values():
            broken.fail = poisoned
        failed: list[asyncio.Task[Any]] = []

        def poison() -> None:
            failed.append(asyncio.create_task(client.complete([3, DEADLY, 4], max_tokens=5, temperature=0)))

        assert await with_streams_under_way(client, poison) == whole
        with pytest.raises(Internal) as failure:
            await failed[0]
        assert failure.value.reason == "POISONED_REQUEST"
        assert await undisturbed(client) == whole
