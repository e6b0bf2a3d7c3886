"""A worker's own word about its health counts at once. Probes are so far apart here that they tell nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from stack import Server, start

import coordinator.server
import target_worker.server
from outrider import Client
from outrider.errors import Unavailable
from outrider.server_info import Worker
from outrider.settings import CoordinatorSettings, TargetWorkerSettings


@pytest.fixture(autouse=True)
def no_probes_while_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.fleet.worker.PROBE_INTERVAL_S", 3600.0)


async def target(port: int = 0, drain_delay_s: float = 0.0) -> Server:
    settings = TargetWorkerSettings(
        port=port, model="toy:vocab=16", drain_delay_s=drain_delay_s, drain_grace_s=0, log_level="warning"
    )
    return await start(target_worker.server.serve, settings)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Client]:
    settings = CoordinatorSettings(port=0, target_workers=(address,), drain_grace_s=0, log_level="error")
    server = await start(coordinator.server.serve, settings)
    async with Client(server.address, timeout_s=60) as client:
        yield client
    await server.close()


async def until(client: Client, condition: Callable[[Worker], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition((await client.server_info()).workers[0]):
            await asyncio.sleep(0.01)


async def test_a_draining_worker_gets_no_more_streams() -> None:
    worker = await target(drain_delay_s=3600.0)
    async with client_of(worker.address) as client:
        await client.complete([1, 2, 3], max_tokens=4)
        worker.stop.set()
        await until(client, lambda told: not told.healthy)
        assert not worker.task.done(), "it drains still: nobody has seen it gone"
        assert "NOT_SERVING" in (await client.server_info()).workers[0].detail
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            await client.complete([1, 2, 3], max_tokens=4)
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)


async def test_a_worker_that_is_gone_is_known_and_known_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And told, by a warning."""
    worker = await target()
    async with client_of(worker.address) as client:
        caplog.set_level("WARNING", "coordinator")
        await client.complete([1, 2, 3], max_tokens=4)
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
        await until(client, lambda told: not told.healthy)
        again = await target(worker.port)
        await until(client, lambda told: told.healthy)
        await client.complete([1, 2, 3], max_tokens=4)
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert any(worker.address in text for level, text in told if level == "WARNING")
        await again.close()
