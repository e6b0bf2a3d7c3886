"""The driver's loop: looks at workers and coordinators, and does what the plan says. It can stop at any moment: a look
later, or a new driver on detached workers, goes on from what is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from deploy.ray.config import Fleet, Pool
from deploy.ray.fleet import Placed, grace_s_of, why_failed
from deploy.ray.load import LoadWindow
from deploy.ray.reconcile import Action, Drain, End, Observed, Phase, Start, plan
from deploy.ray.scaling import PoolScaler
from outrider.server_info import ServerInfo

PATIENCE_S = 20.0
"""A worker without a place for this long is reported: Ray says nothing."""
RETRY_S = 10.0
MAX_RETRY_S = 300.0
"""Workers that fail to start are replaced after the first, each time in twice that."""

Ask = Callable[[], Awaitable[tuple[dict[str, ServerInfo], list[str]]]]


class Workers(Protocol):
    """`RayFleet`, as far as it is used here."""

    def look(self) -> list[Placed]: ...

    def workers(self, pool: Pool | None = None) -> list[Placed]: ...

    def lacks(self, workers: Iterable[Placed]) -> list[str]: ...

    def start(self, pool: Pool, index: int) -> None: ...

    def drain(self, worker: Placed) -> None: ...

    def end(self, worker: Placed) -> None: ...


class Controller:
    """Keeps each pool at the number of workers that its load wants."""

    def __init__(
        self,
        fleet: Fleet,
        workers: Workers,
        ask: Ask,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ask: `Coordinators.ask`. say: gets a line for whatever changes."""
        self._fleet = fleet
        self._workers = workers
        self._ask = ask
        self._say = say
        self._clock = clock
        self._window = LoadWindow(fleet.scaling.window_s)
        self._scales = any(pool.scales for pool in fleet.pools)
        self._scalers = {pool.name: PoolScaler(pool, fleet.scaling, len(workers.workers(pool))) for pool in fleet.pools}
        self._leaving: dict[str, float] = {}
        """When a worker was first asked to drain."""
        self._pids: dict[str, int] = {}
        """Of workers that were said to serve."""
        self._homeless: dict[str, float] = {}
        """Since when a worker has no place."""
        self._said: dict[str, str] = {}
        """What was said last, by what it is about."""
        self._failures: dict[str, tuple[int, float]] = {}
        """By pool: how many workers failed in a row, and when the next may start."""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            try:
                await self.step()
                self._said.pop("step", None)
            except Exception as error:  # whatever it is, workers that serve are not to be drained for it
                self._say_once("step", f"{type(error).__name__}: {error}; looking again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._fleet.scaling.interval_s):
                    await stop.wait()

    async def step(self) -> None:
        """Looks once, and acts."""
        lost = await asyncio.to_thread(self._workers.look)
        told, faults = await self._ask() if self._scales else ({}, [])
        now = self._clock()
        self._say_once("coordinators", f"no answer from {'; '.join(faults)}" if faults else "")
        if told:
            self._window.add(now, told)
        for worker in lost:
            self._pids.pop(worker.name, None)
            self._failed(worker, now)
        self._forget()
        await asyncio.to_thread(self._say_what_changed, now)
        for pool in self._fleet.pools:
            actions = self._plan(pool, now, heard=bool(told))
            await asyncio.to_thread(self._carry_out, pool, actions, now)

    def _plan(self, pool: Pool, now: float, *, heard: bool) -> list[Action]:
        workers = self._workers.workers(pool)
        for worker in workers:
            if worker.phase is Phase.FAILED:
                self._failed(worker, now)
        observed = [self._observed(worker, now) for worker in workers]
        own = [w for w, seen in zip(workers, observed, strict=True) if seen.phase is Phase.SERVING and not seen.leaves]
        addresses = {worker.status.address for worker in own if worker.status is not None}
        scaler = self._scalers[pool.name]
        before = scaler.wanted
        wanted = scaler.read(now, self._window.load(pool.role, addresses) if heard else None)
        if wanted != before:
            self._say(f"{pool.name}: {before} -> {wanted} workers: {scaler.reason}")
        if len(own) >= wanted:
            self._failures.pop(pool.name, None)
        _, retry_at = self._failures.get(pool.name, (0, now))
        return plan(
            wanted,
            observed,
            max_workers=pool.max_replicas,
            grace_s=grace_s_of(pool),
            may_start=now >= retry_at,
        )

    def _observed(self, worker: Placed, now: float) -> Observed:
        since = self._leaving.get(worker.name)
        num_sessions = self._window.num_sessions(worker.status.address) if worker.status is not None else 0
        return Observed(worker.index, worker.phase, num_sessions, None if since is None else now - since)

    def _carry_out(self, pool: Pool, actions: Sequence[Action], now: float) -> None:
        by_index = {worker.index: worker for worker in self._workers.workers(pool)}
        for action in actions:
            match action:
                case Start(index):
                    self._workers.start(pool, index)
                case Drain(index):
                    worker = by_index[index]
                    if worker.name not in self._leaving:
                        self._say(f"{worker.name} drains")
                    self._leaving.setdefault(worker.name, now)
                    self._workers.drain(worker)
                case End(index):
                    self._workers.end(by_index[index])

    def _failed(self, worker: Placed, now: float) -> None:
        number, _ = self._failures.get(worker.pool.name, (0, now))
        delay_s = min(RETRY_S * 2**number, MAX_RETRY_S)
        self._failures[worker.pool.name] = number + 1, now + delay_s
        self._say(f"{why_failed(worker)}\nAnother one in {delay_s:g} s.")

    def _say_what_changed(self, now: float) -> None:
        homeless = []
        for worker in self._workers.workers():
            if worker.phase is Phase.SERVING and worker.status is not None:
                if self._pids.get(worker.name) != worker.status.pid:
                    again = "serves again" if worker.name in self._pids else "serves"
                    self._say(f"{worker.name} {again} at {worker.status.address} (pid {worker.status.pid})")
                self._pids[worker.name] = worker.status.pid
            if worker.phase is Phase.PENDING:
                if now - self._homeless.setdefault(worker.name, now) >= PATIENCE_S:
                    homeless.append(worker)
            elif self._homeless.pop(worker.name, None) is not None:
                self._said.pop(worker.name, None)
        if homeless:
            for worker, why in zip(homeless, self._workers.lacks(homeless), strict=True):
                self._say_once(worker.name, f"no place yet for {why}")

    def _forget(self) -> None:
        names = {worker.name for worker in self._workers.workers()}
        for name in self._pids.keys() - names:
            self._say(f"{name} has ended")
        for known in (self._leaving, self._pids, self._homeless):
            for name in known.keys() - names:
                del known[name]

    def _say_once(self, about: str, text: str) -> None:
        if text and self._said.get(about) != text:
            self._say(text)
        self._said[about] = text
