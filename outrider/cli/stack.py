"""Coordinator, draft worker and target worker as three real processes on this machine.

    async with local_stack(target="toy:vocab=64", draft="toy:vocab=64,agreement=0.8") as stack:
        async with Client(stack.address) as client: ...

Draft and target work in turns, so each may use all cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from outrider.cli.flags import to_flags
from outrider.cli.process import Child, OnLine
from outrider.client import Client
from outrider.errors import OutriderError, Unavailable
from outrider.settings import WorkerSettings

DEFAULT_MODEL = "smollm2-135m"
SMALL_CACHE_BYTES = 512 << 20
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stack:
    """Running services. `processes` maps a role (`coordinator`, `draft-worker`, `target-worker`) to its process."""

    address: str
    processes: Mapping[str, Child]

    async def first_exit(self) -> Child:
        """Whichever process ends first."""
        waits = {asyncio.create_task(child.wait()): child for child in self.processes.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    def resident_bytes(self) -> dict[str, int]:
        """Memory that each process holds now."""
        return {role: psutil.Process(child.pid).memory_info().rss for role, child in self.processes.items()}


@asynccontextmanager
async def local_stack(
    target: str = DEFAULT_MODEL,
    draft: str | None = DEFAULT_MODEL,
    *,
    shared: Values | None = None,
    coordinator: Values | None = None,
    target_worker: Values | None = None,
    draft_worker: Values | None = None,
    on_line: OnLine | None = None,
    ready_timeout_s: float = 900.0,
    stop_grace_s: float = 10.0,
) -> AsyncIterator[Stack]:
    """Starts the services, waits until the coordinator sees its workers healthy, and ends all of them afterwards.

    draft: None for no draft worker. shared: settings of all three; the others of one. Ports are free ones unless given.
    on_line(role, line) gets what the processes print. Raises Unavailable with a process's last words when it dies.
    """
    common = {"host": "127.0.0.1", "port": 0, "drain_grace_s": 2.0, **(shared or {})}
    processes: dict[str, Child] = {}

    async def start(role: str, values: Values) -> str:
        processes[role] = child = await Child.start(role, to_flags({**common, **values}), on_line)
        return await child.wait_ready(ready_timeout_s)

    try:
        starting = [start("target-worker", {"model": target, **(target_worker or {})})]
        if draft:
            starting.append(start("draft-worker", {"model": draft, **(draft_worker or {})}))
        targets, *drafts = await _gather(starting)
        workers = {"target_workers": targets, "draft_workers": ",".join(drafts)}
        address = await start("coordinator", {**workers, **(coordinator or {})})
        stack = Stack(address, processes)
        await _wait_healthy(stack, num_workers=1 + len(drafts), timeout_s=ready_timeout_s)
        try:
            yield stack
        except OutriderError as error:
            for child in processes.values():
                if child.exit_code is not None:
                    raise Unavailable(await child.death()) from error
            raise
    finally:
        # The coordinator first: it ends its sessions in peace while the workers still answer.
        if "coordinator" in processes:
            await processes["coordinator"].stop(stop_grace_s)
        await asyncio.gather(*(child.stop(stop_grace_s) for child in processes.values()))


def small_worker(model: str | None, /, **values: Any) -> dict[str, Any]:
    """Settings of a worker that serves a few streams beside others on this machine: a small cache unless one is set."""
    if model and not model.startswith("toy:") and not WorkerSettings().kv_cache_bytes:
        values.setdefault("kv_cache_bytes", SMALL_CACHE_BYTES)
    return values


async def _gather(starting: list[Any]) -> list[str]:
    """Like asyncio.gather, but the first failure cancels the rest."""
    tasks = [asyncio.create_task(coroutine) for coroutine in starting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_healthy(stack: Stack, *, num_workers: int, timeout_s: float) -> None:
    died = asyncio.create_task(stack.first_exit())
    try:
        async with Client(stack.address, timeout_s=5.0) as client, asyncio.timeout(timeout_s):
            while True:
                if died.done():
                    raise Unavailable(await died.result().death())
                workers = (await client.server_info()).workers
                if sum(worker.healthy for worker in workers) >= num_workers:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        details = "; ".join(f"{w.role} worker {w.address}: {w.detail or 'not healthy'}" for w in workers) or "no worker"
        raise Unavailable(f"the coordinator cannot use its workers: {details}") from None
    finally:
        died.cancel()
