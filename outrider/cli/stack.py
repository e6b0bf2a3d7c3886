"""Coordinator, draft worker and target worker as three real processes on this machine.

    async with local_stack(target="toy:vocab=64", draft="toy:vocab=64,agreement=0.8") as stack:
        async with Client(stack.address) as client: ...

Draft and target work in turns, so each may use all cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from outrider.cli.connect import connect
from outrider.cli.console import err
from outrider.cli.flags import to_flags
from outrider.cli.process import Child, OnLine
from outrider.errors import FailedPrecondition, OutriderError, Unavailable
from outrider.server_info import Worker
from outrider.settings import WorkerSettings

DEFAULT_MODEL = "smollm2-135m"
SMALL_CACHE_BYTES = 512 << 20
Values = Mapping[str, Any]


TARGET_WORKER, DRAFT_WORKER, COORDINATOR, GATEWAY = "target-worker", "draft-worker", "coordinator", "gateway"
ROLES = (TARGET_WORKER, DRAFT_WORKER, COORDINATOR, GATEWAY)
NOT_HONOURED = {
    "model": "give --target and --draft",
    "target_workers": "let it start its own, or run `outrider coordinator`",
    "draft_workers": "let it start its own, or run `outrider coordinator`",
    "advertise_address": "run `outrider target-worker` and `outrider draft-worker` apart",
    "metrics_port": "run the services apart, each with a port of its own",
    "metrics_host": "run the services apart",
}
"""Settings that no command can honour which starts the services itself, and what to do instead."""
REPORT_INTERVAL_S = 10.0
"""How often a start that takes long says what it waits for."""


class ServicesStopped(Unavailable):
    """A service that the others cannot do without has ended."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Running services. `processes` maps a role (`coordinator`, `draft-worker`, `target-worker`, `gateway`) to its
    process."""

    address: str
    processes: Mapping[str, Child]
    _launcher: _Launcher = field(repr=False)

    async def first_exit(self, roles: Sequence[str] = ROLES) -> Child:
        """Whichever process of these roles ends first."""
        running = [child for role, child in self.processes.items() if role in roles]
        waits = {asyncio.create_task(child.wait()): child for child in running}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def restart(self, role: str) -> None:
        """Starts a process that ended, at its old address, and returns once it serves. Raises Unavailable."""
        port = int(self.processes[role].address.rpartition(":")[2])
        await self._launcher.start(role, {"port": port})

    def resident_bytes(self) -> dict[str, int]:
        """Memory that each process holds now."""
        return {role: psutil.Process(child.pid).memory_info().rss for role, child in self.processes.items()}


class _Launcher:
    """Starts processes, each with the settings of its role. `processes` holds the latest one of each."""

    def __init__(self, settings: Mapping[str, Values], on_line: OnLine | None, ready_timeout_s: float) -> None:
        self.processes: dict[str, Child] = {}
        self._settings = settings
        self._on_line = on_line
        self._ready_timeout_s = ready_timeout_s

    async def start(self, role: str, values: Values | None = None) -> str:
        """Its address, once it serves. `values` outweigh the settings of the role."""
        flags = to_flags({**self._settings[role], **(values or {})})
        self.processes[role] = child = await Child.start(role, flags, self._on_line)
        return await child.wait_ready(self._ready_timeout_s)


@asynccontextmanager
async def local_stack(
    target: str = DEFAULT_MODEL,
    draft: str | None = DEFAULT_MODEL,
    *,
    shared: Values | None = None,
    coordinator: Values | None = None,
    target_worker: Values | None = None,
    draft_worker: Values | None = None,
    gateway: Values | None = None,
    on_line: OnLine | None = None,
    ready_timeout_s: float = 900.0,
    stop_grace_s: float = 10.0,
) -> AsyncIterator[Stack]:
    """Starts the services, waits until the coordinator sees its workers healthy, and ends all of them afterwards.

    draft: None for no draft worker; gateway: None for none. shared: settings of all; the others of one. Ports are free
    ones unless given.
    on_line(role, line) gets what the processes print. Raises Unavailable with a process's last words when it dies, and
    FailedPrecondition when target and draft do not match.
    """
    common = {"host": "127.0.0.1", "port": 0, "drain_grace_s": 2.0, **(shared or {})}
    settings = {
        TARGET_WORKER: {**common, "model": target, **(target_worker or {})},
        DRAFT_WORKER: {**common, "model": draft, **(draft_worker or {})},
        COORDINATOR: {**common, **(coordinator or {})},
        GATEWAY: {**common, **(gateway or {})},
    }
    launcher = _Launcher(settings, on_line, ready_timeout_s)
    processes = launcher.processes
    try:
        roles = [TARGET_WORKER, DRAFT_WORKER] if draft else [TARGET_WORKER]
        targets, *drafts = await _gather([launcher.start(role) for role in roles])
        workers = {"target_workers": targets, "draft_workers": ",".join(drafts)}
        stack = Stack(await launcher.start(COORDINATOR, workers), processes, launcher)
        await _wait_healthy(stack, num_workers=len(roles), timeout_s=ready_timeout_s)
        if gateway is not None:
            await launcher.start(GATEWAY, {"coordinators": stack.address})
        try:
            yield stack
        except ServicesStopped:
            raise
        except OutriderError as error:
            for child in processes.values():
                if child.exit_code is not None:
                    raise await child.death() from error
            raise
    finally:
        # Who calls the others first: it ends what it does in peace while they still answer.
        for role in (GATEWAY, COORDINATOR):
            if role in processes:
                await processes[role].stop(stop_grace_s)
        await asyncio.gather(*(child.stop(stop_grace_s) for child in processes.values()))


def small_worker(model: str | None, /, **values: Any) -> dict[str, Any]:
    """Settings of a worker that serves a few streams beside others on this machine: a small cache unless one is set."""
    own = WorkerSettings()
    if model and not model.startswith("toy:") and not (own.kv_cache_bytes or own.memory_fraction):
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
    loop = asyncio.get_running_loop()
    next_report = loop.time() + REPORT_INTERVAL_S
    workers: tuple[Worker, ...] = ()
    try:
        async with connect(stack.address, timeout_s=5.0) as client, asyncio.timeout(timeout_s):
            while True:
                if died.done():
                    raise await died.result().death()
                workers = (await client.server_info()).workers
                if sum(worker.healthy for worker in workers) >= num_workers:
                    return
                _refuse_mismatch(workers)
                if loop.time() >= next_report:
                    next_report = loop.time() + REPORT_INTERVAL_S
                    err.print(f"still waiting: {_faults(workers)}", style="dim", markup=False)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Unavailable(f"the coordinator cannot use its workers: {_faults(workers)}") from None
    finally:
        died.cancel()


def _refuse_mismatch(workers: Sequence[Worker]) -> None:
    """What no waiting mends: the coordinator has both descriptions, and they do not go together."""
    for worker in workers:
        if "MISMATCH" in worker.detail:
            fix = "; or give --draft none" if worker.role == "draft" else ""
            raise FailedPrecondition(f"{worker.role} worker {worker.address}: {worker.detail}{fix}")


def _faults(workers: Sequence[Worker]) -> str:
    faults = (f"{w.role} worker {w.address}: {w.detail or 'not healthy'}" for w in workers if not w.healthy)
    return "; ".join(faults) or "the coordinator knows no worker"
