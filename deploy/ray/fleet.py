"""Places a fleet's actors, waits for them and ends them. Ray is never on the path of a token."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from deploy.ray.actors import WorkerActor, WorkerStatus
from deploy.ray.config import Fleet, Pool
from deploy.ray.placement import explain

POLL_S = 0.2
FREE_PORTS = (20_000, 32_768)


class PlacementError(Exception):
    """An actor fits nowhere. The message names the actor and the label or resource that lacks."""


class WorkerFailed(Exception):
    """A worker has a place but does not serve."""


class RayFleet:
    """The actors of one fleet file. Needs a connected Ray.

    Actors end with the driver unless `detached`; those stay until `find(...).stop()`.
    """

    def __init__(self, actors: dict[str, tuple[Pool, Any]]) -> None:
        self._actors = actors

    @classmethod
    def place(cls, fleet: Fleet, *, detached: bool = False) -> Self:
        """Asks for all actors; an actor that is there already, by its name, is kept as it is."""
        actors, ports = {}, set[int]()
        for pool in fleet.pools:
            for index in range(pool.replicas):
                name = f"{pool.name}-{index}"
                port = pool.first_port + index if pool.first_port else free_port(ports)
                ports.add(port)
                options = _actor_options(pool) | ({"lifetime": "detached"} if detached else {})
                actor = ray.remote(WorkerActor).options(
                    name=name, namespace=fleet.namespace, get_if_exists=True, **options
                )
                actors[name] = (pool, actor.remote(name, pool, port, fleet.coordinators))
        return cls(actors)

    @classmethod
    def find(cls, fleet: Fleet) -> Self:
        """The actors of the fleet that exist now."""
        actors = {}
        for pool in fleet.pools:
            for index in range(pool.replicas):
                name = f"{pool.name}-{index}"
                try:
                    actors[name] = (pool, ray.get_actor(name, namespace=fleet.namespace))
                except ValueError:
                    continue
        return cls(actors)

    def statuses(self, timeout_s: float = 5.0) -> dict[str, WorkerStatus | None]:
        """By name; None for a worker that does not answer now: without a place, or between death and restart."""
        calls = {name: actor.status.remote() for name, (_, actor) in self._actors.items()}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
        return {name: _result(call) if call in answered else None for name, call in calls.items()}

    def wait_serving(self, *, placement_timeout_s: float, ready_timeout_s: float) -> dict[str, WorkerStatus]:
        """Returns when all serve. Raises PlacementError when one gets no place, WorkerFailed when one cannot serve."""
        self._wait_placed(placement_timeout_s)
        deadline = time.monotonic() + ready_timeout_s
        while True:
            statuses = self.statuses()
            for name, status in statuses.items():
                if status and status.failure:
                    raise WorkerFailed(f"{name} on {status.address} cannot serve:\n{status.failure}")
            serving = {name: status for name, status in statuses.items() if status and status.serving}
            if len(serving) == len(statuses):
                return serving
            if time.monotonic() > deadline:
                late = ", ".join(name for name in statuses if name not in serving)
                raise WorkerFailed(f"not serving after {ready_timeout_s:g} s: {late}; their logs are in Ray's session")
            time.sleep(POLL_S)

    def wait_restarted(self, killed: WorkerStatus, *, timeout_s: float) -> WorkerStatus:
        """The successor of a worker whose process ended, once it serves. Raises WorkerFailed after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.statuses()[killed.name]
            if status and status.serving and status.pid != killed.pid:
                return status
            time.sleep(POLL_S)
        raise WorkerFailed(f"{killed.name} does not serve again after {timeout_s:g} s")

    def stop(self) -> None:
        """Drains every worker, each for as long as its own settings allow, then ends its process."""
        drains = [actor.drain.remote() for _, actor in self._actors.values()]
        if drains:
            grace_s = max(_grace_s(pool) for pool, _ in self._actors.values())
            ray.wait(drains, num_returns=len(drains), timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """Ends every process at once; running sessions are lost."""
        for _, actor in self._actors.values():
            ray.kill(actor, no_restart=True)

    def _wait_placed(self, timeout_s: float) -> None:
        calls = {actor.status.remote(): (name, pool) for name, (pool, actor) in self._actors.items()}
        answered, pending = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        for call in answered:
            try:
                ray.get(call)
            except RayError as error:
                raise WorkerFailed(f"{calls[call][0]} cannot start: {error}") from error
        if pending:
            nodes, available = ray.nodes(), ray.available_resources()
            reasons = [f"{name}: {explain(pool, nodes, available)}" for name, pool in (calls[c] for c in pending)]
            raise PlacementError(f"no place after {timeout_s:g} s for " + "; ".join(reasons))


def free_port(taken: Collection[int] = ()) -> int:
    """A port that is free on this machine now, below those that outgoing connections and Ray's workers use."""
    while True:
        port = random.randrange(*FREE_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in taken:
                return port


def _actor_options(pool: Pool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": pool.num_cpus,
        "num_gpus": pool.num_gpus,
        "resources": pool.resources,
        "label_selector": pool.label_selector,
        "max_restarts": -1,
        "max_task_retries": 0,
    }
    return options | ({"memory": pool.memory_bytes} if pool.memory_bytes else {})


def _grace_s(pool: Pool) -> float:
    settings = pool.worker_settings()
    return settings.drain_delay_s + settings.drain_grace_s + 5.0


def _result(call: Any) -> WorkerStatus | None:
    try:
        return ray.get(call, timeout=0)
    except (RayActorError, GetTimeoutError):
        return None
