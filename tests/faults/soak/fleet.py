"""Real services as processes, with a relay on every way between them, killed, frozen and started again at will."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import forked
import psutil
from faults.soak.oracle import draft_model, target_model
from faults.soak.plan import CLIENTS, COORDINATORS, DRAFTS, SERVICES, TARGETS
from faults.soak.readings import Reading, read_metrics
from faults.soak.relay import Relay
from ports import free_port

from outrider.cli.flags import to_flags
from outrider.cli.process import Child

COMMON = {"host": "127.0.0.1", "drain_grace_s": 5.0, "heartbeat_ms": 250, "log_level": "info", "reflection": False}
PINGS = {"ping_interval_ms": 1_000, "ping_timeout_ms": 2_000}
ELABORATE = {"warm_standby": True, "draft_ahead": "on"}
"""Of one coordinator: the other does as by default."""
HEAD = "head=toy:agreement=0.8"
"""Inside one target: streams that draft with it find it nowhere else."""
IDLE_LEASE_S = 5.0
PEER_TIMEOUT_S = 2.0
READY_S = 120.0
SIGNS_OF_A_FAULT = ("Traceback", "never retrieved", "was never awaited", " ERROR ", " CRITICAL ")
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")


@dataclass
class Service:
    """One process, or the one that follows it at the same address."""

    name: str
    port: int
    metrics_port: int
    child: Child | None = None
    is_frozen: bool = False
    is_meant_to_run: bool = False
    num_starts: int = 0

    @property
    def role(self) -> str:
        kind = self.name.partition("-")[0]
        return kind if kind == "coordinator" else f"{kind}-worker"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid


class Fleet:
    """Two coordinators over two targets and two draft workers. `close` ends them all."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.services = {name: Service(name, free_port(), free_port()) for name in SERVICES}
        self.relays: dict[tuple[str, str], Relay] = {}
        self.crashes: list[str] = []
        """Services that ended though nobody had ended them, and their last words."""
        self.complaints: list[str] = []
        """Lines of theirs that no fault from outside may cause."""
        self._watching: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for caller in COORDINATORS:
            for worker in (*TARGETS, *DRAFTS):
                await self._link(caller, worker)
        for coordinator in COORDINATORS:
            await self._link(CLIENTS, coordinator)
        await asyncio.gather(*(self.restart(name) for name in (*TARGETS, *DRAFTS)))
        await asyncio.gather(*(self.restart(name) for name in COORDINATORS))

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(self._end(service) for service in self.services.values()))
        await asyncio.gather(*(relay.close() for relay in self.relays.values()))

    @property
    def client_addresses(self) -> list[str]:
        """Of the coordinators, as clients see them."""
        return [self.relays[CLIENTS, name].address for name in COORDINATORS]

    def kill(self, name: str) -> None:
        """SIGKILL, frozen or not."""
        service = self.services[name]
        service.is_meant_to_run = service.is_frozen = False
        with suppress(ProcessLookupError):
            os.kill(service.pid, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self.services[name].is_frozen = True
        os.kill(self.services[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.services[name].is_frozen = False
        with suppress(ProcessLookupError):
            os.kill(self.services[name].pid, signal.SIGCONT)

    def drain(self, name: str) -> None:
        """SIGTERM: it ends or hands over its streams, and itself after that."""
        self.services[name].is_meant_to_run = False
        with suppress(ProcessLookupError):
            os.kill(self.services[name].pid, signal.SIGTERM)

    async def ended(self, name: str) -> None:
        """Until the process of a killed or drained service is gone."""
        child = self.services[name].child
        assert child is not None
        await child.wait()

    async def restart(self, name: str) -> None:
        """A new process at the old address, once it serves."""
        service = self.services[name]
        if service.child is not None:
            await service.child.stop(0.0)
        service.child = await forked.start(service.role, to_flags(self._flags(service)), self._on_line(service))
        service.is_meant_to_run = True
        service.num_starts += 1
        watching = asyncio.create_task(self._watch(service, service.child))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        await service.child.wait_ready(READY_S)

    async def reading(self, name: str) -> Reading | None:
        """What the service tells of itself; None while it does not answer."""
        service = self.services[name]
        if service.is_frozen or not service.is_meant_to_run:
            return None
        return await read_metrics(name, service.metrics_port)

    def connections(self, name: str) -> str:
        """Of a service's process, for people: how many there are on its own port, and to whom the others lead."""
        service = self.services[name]
        return self._counted(service.pid, {service.port: "to its port"})

    def own_connections(self) -> str:
        """Of this process, which has the clients and the relays, for people: to whom they lead."""
        relays = {int(relay.address.rpartition(":")[2]): "to a relay" for relay in self.relays.values()}
        return self._counted(os.getpid(), relays)

    def _counted(self, pid: int, listens: dict[int, str]) -> str:
        """Connections of a process, by their end here and by whom they lead to."""
        names = {f"127.0.0.1:{service.port}": name for name, service in self.services.items()}
        names |= {relay.address: " ".join(link) for link, relay in self.relays.items()}
        found = Counter(
            f"{connection.status} {listens.get(connection.laddr.port, 'from it')} "
            f"{names.get(f'{connection.raddr.ip}:{connection.raddr.port}', '')}"
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.raddr
        )
        return ", ".join(f"{number} {what}" for what, number in sorted(found.items()))

    def _flags(self, service: Service) -> dict[str, Any]:
        flags = {**COMMON, **PINGS, "port": service.port, "metrics_port": service.metrics_port}
        if service.role == "coordinator":
            reached = {worker: self.relays[service.name, worker].address for worker in (*TARGETS, *DRAFTS)}
            return flags | {
                "target_workers": ",".join(reached[worker] for worker in TARGETS),
                "draft_workers": ",".join(reached[worker] for worker in DRAFTS),
                "peer_timeout_s": PEER_TIMEOUT_S,
                "emit_buffer_chunks": 4,
                **(ELABORATE if service.name == COORDINATORS[-1] else {}),
            }
        model = target_model(self._seed) if service.name in TARGETS else draft_model(self._seed)
        heads = {"heads": HEAD} if service.name == TARGETS[-1] else {}
        return flags | {"model": model, "session_idle_lease_s": IDLE_LEASE_S, **heads}

    async def _link(self, caller: str, called: str) -> None:
        relay = self.relays[caller, called] = Relay(self.services[called].address)
        await relay.start()

    async def _watch(self, service: Service, child: Child) -> None:
        """A crash is told, and the service started again as its supervisor would."""
        await child.wait()
        if service.child is child and service.is_meant_to_run:
            service.is_meant_to_run = False
            self.crashes.append(f"{service.name}: {await child.death()}")
            await self.restart(service.name)

    async def _end(self, service: Service) -> None:
        if service.child is not None:
            service.is_meant_to_run = False
            service.child.kill()
            await service.child.wait()
            await service.child.stop(0.0)

    def _on_line(self, service: Service) -> Any:
        """Keeps what must not be logged whatever fails outside, with what follows up to the next line of the log."""
        is_complaining = False

        def take(role: str, line: str) -> None:
            nonlocal is_complaining
            is_new = _LOGGED.match(line) is not None
            if any(sign in line for sign in SIGNS_OF_A_FAULT) and (is_new or not is_complaining):
                is_complaining = True
                self.complaints.append(f"{service.name}: {line}")
            elif is_complaining and not is_new:
                self.complaints[-1] += f"\n    {line}"
            else:
                is_complaining = False

        return take
