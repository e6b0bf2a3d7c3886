"""All three services in this process, on loopback, with real gRPC between them: what the rpc tests talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from outrider.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings


@dataclass
class Server:
    """One running `serve` coroutine."""

    port: int
    stop: asyncio.Event
    task: asyncio.Task[Any]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def close(self) -> None:
        self.stop.set()
        await self.task


@dataclass
class Stack:
    """Addresses of the services; `draft` and `target` hold the workers in start order."""

    coordinator: Server
    draft: list[Server] = field(default_factory=list)
    target: list[Server] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.coordinator.address


async def start(serve: Any, settings: Any, **kwargs: Any) -> Server:
    """Runs `serve` as a task and waits until it serves."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, stop=stop, on_ready=ready.set_result, **kwargs))
    done, _ = await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
        raise RuntimeError("serve returned before it was ready")
    return Server(ready.result(), stop, task)


@asynccontextmanager
async def listening(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Address of a server of any other kind, while it serves."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def in_process_stack(
    target: str | Any = "toy:vocab=16,seed=1",
    draft: str | Any | None = "toy:vocab=16,seed=1,agreement=0.8",
    *,
    coordinator: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    draft_worker: dict[str, Any] | None = None,
    target_worker: dict[str, Any] | None = None,
    num_targets: int = 1,
) -> AsyncIterator[Stack]:
    """Models are names for settings, or `LoadedModel`s already in memory; `draft=None` starts no draft worker."""
    import coordinator.server as coordinator_server
    import draft_worker.server as draft_server
    import target_worker.server as target_server

    def model(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return ({"model": value}, {}) if isinstance(value, str) else ({"model": "given"}, {"loaded": value})

    common = {"port": 0, "drain_grace_s": 2.0, "log_level": "warning", **(worker or {})}
    async with AsyncExitStack() as cleanup:
        targets, drafts = [], []
        for _ in range(num_targets):
            named, given = model(target)
            server = await start(
                target_server.serve, TargetWorkerSettings(**{**common, **named, **(target_worker or {})}), **given
            )
            cleanup.push_async_callback(server.close)
            targets.append(server)
        if draft is not None:
            named, given = model(draft)
            server = await start(
                draft_server.serve, DraftWorkerSettings(**{**common, **named, **(draft_worker or {})}), **given
            )
            cleanup.push_async_callback(server.close)
            drafts.append(server)
        settings = CoordinatorSettings(
            **{
                "port": 0,
                "drain_grace_s": 2.0,
                "log_level": "warning",
                "target_workers": tuple(s.address for s in targets),
                "draft_workers": tuple(s.address for s in drafts),
                **(coordinator or {}),
            }
        )
        server = await start(coordinator_server.serve, settings)
        cleanup.push_async_callback(server.close)
        yield Stack(server, drafts, targets)
