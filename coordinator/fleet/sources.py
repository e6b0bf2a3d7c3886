"""Where workers come from: the settings' list, names to look up, leases that workers take. Each holds what it knows.

One worker may come from several sources; it is known until none of them holds it any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.worker import WorkerRecord
from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from outrider.serving.naming import Resolve, is_temporary, resolve

log = logging.getLogger(__name__)

Located = tuple[str, str]
"""HOST:PORT of a worker, or of a name that workers are behind, and their role."""


LEASE_EVENTS = ("taken", "renewed", "drained", "unknown")
"""unknown: a lease was named that had run out, had been replaced, or was never taken."""


class Source(Protocol):
    """Holds workers in a directory from `start` to `close`."""

    def start(self) -> None:
        """Called once, on the event loop."""

    async def close(self) -> None:
        """Holds nobody anew. Harmless when it was not started."""


class StaticSource:
    """What the settings list, for good. Raises InvalidArgument on an address of both roles."""

    HOLDER = "this coordinator's settings"

    def __init__(self, directory: WorkerDirectory, workers: Iterable[Located]) -> None:
        self._directory = directory
        self._roles: dict[str, str] = {}
        for address, role in workers:
            if self._roles.setdefault(address, role) != role:
                raise InvalidArgument(
                    f"{address} is listed as a draft worker and as a target worker", field="draft_workers"
                )

    def start(self) -> None:
        for address, role in self._roles.items():
            self._directory.hold(address, role, self.HOLDER)

    async def close(self) -> None:
        pass


class DnsSource:
    """Every address behind `names`, each resolved three times within a lease.

    A worker that leaves its name is forgotten when the lease ends, and its running streams end in peace; so are all of
    a name that does not exist any more. Where nobody can say, what was known stays known: workers tell for themselves
    whether they are there, and a name service that is down must not take the fleet with it.
    """

    def __init__(
        self,
        directory: WorkerDirectory,
        names: Iterable[Located],
        *,
        lease_ms: int,
        resolve: Resolve = resolve,
    ) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._lease_s = lease_ms / 1000
        self._resolve = resolve
        self._failing: set[str] = set()
        self._known: dict[str, Sequence[str]] = {}
        """By name, what it came to last."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(name, role)) for name, role in self._names]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: str, role: str) -> None:
        while True:
            await self._look_up(name, role)
            await asyncio.sleep(self._lease_s / 3)

    async def _look_up(self, name: str, role: str) -> None:
        looking = asyncio.ensure_future(self._resolve(name))
        try:
            while not (await asyncio.wait({looking}, timeout=self._lease_s / 3))[0]:
                self._hold(name, role)
            self._known[name] = looking.result()
            self._failing.discard(name)
        except OSError as error:
            self._warn_once(name, f"{name} does not resolve: {error}")
            if not is_temporary(error):
                return
        finally:
            looking.cancel()
        self._hold(name, role)

    def _hold(self, name: str, role: str) -> None:
        for address in self._known.get(name, ()):
            try:
                self._directory.hold(address, role, f"the name {name}", self._lease_s)
                self._failing.discard(address)
            except FailedPrecondition as error:
                self._warn_once(address, error.message)

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._failing:
            log.warning(message)
        self._failing.add(what)


class LeaseSource:
    """Workers that register themselves, at most `max_workers` of them."""

    HOLDER = "a lease of its own"

    def __init__(self, directory: WorkerDirectory, *, lease_ms: int, max_workers: int) -> None:
        self._directory = directory
        self._lease_s = lease_ms / 1000
        self._max_workers = max_workers
        self._lease_ids: dict[str, str] = {}
        """By address."""
        self._addresses: dict[str, str] = {}
        """By lease."""
        self.num_events = dict.fromkeys(LEASE_EVENTS, 0)

    @property
    def num_leases(self) -> int:
        """Those that have not run out."""
        return sum(self._directory.held(address, self.HOLDER) is not None for address in self._lease_ids)

    def start(self) -> None:
        pass

    async def close(self) -> None:
        self._lease_ids.clear()
        self._addresses.clear()

    def register(self, address: str, role: str) -> str:
        """Takes a lease, returns its id. A second one of the same address replaces the first.

        Raises FailedPrecondition where another source has the address as a worker of the other role; ResourceExhausted
        when there are `max_workers`.
        """
        if address not in self._lease_ids and len(self._lease_ids) >= self._max_workers:
            self._forget_ended()
            if len(self._lease_ids) >= self._max_workers:
                raise ResourceExhausted(
                    f"{self._max_workers} workers have leases, max_registered_workers allows no more",
                    reason="TOO_MANY_WORKERS",
                    retry_delay_s=self._lease_s,
                )
        worker = self._directory.hold(address, role, self.HOLDER, self._lease_s)
        worker.draining = False
        worker.probe_now()
        self._forget(address)
        lease_id = self._lease_ids[address] = secrets.token_hex(16)
        self._addresses[lease_id] = address
        self.num_events["taken"] += 1
        return lease_id

    def renew(self, lease_id: str) -> None:
        """Raises NotFound for a lease that ran out, was replaced or was never taken."""
        worker = self._leased(lease_id)
        self._directory.hold(worker.address, worker.role, self.HOLDER, self._lease_s)
        self.num_events["renewed"] += 1

    def drain(self, lease_id: str) -> None:
        """No new streams to this worker. Raises NotFound."""
        self._directory.drain(self._leased(lease_id))
        self.num_events["drained"] += 1

    def _leased(self, lease_id: str) -> WorkerRecord:
        worker = self._directory.held(self._addresses.get(lease_id, ""), self.HOLDER)
        if worker is None:
            self.num_events["unknown"] += 1
            raise NotFound("lease_id names no lease: register again", field="lease_id", reason="LEASE_UNKNOWN")
        return worker

    def _forget_ended(self) -> None:
        for address in [a for a in self._lease_ids if self._directory.held(a, self.HOLDER) is None]:
            self._forget(address)

    def _forget(self, address: str) -> None:
        self._addresses.pop(self._lease_ids.pop(address, ""), None)
