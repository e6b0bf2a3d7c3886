"""The actors of a fleet: placed, asked, drained, ended. Ray is never on the path of a token."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray.actors import WorkerActor, WorkerStatus
from deploy.ray.config import Fleet, Pool
from deploy.ray.placement import demands, explain
from deploy.ray.reconcile import Phase

POLL_S = 0.2
FREE_PORTS = (20_000, 32_768)
GONE_TIMEOUT_S = 30.0


class PlacementError(Exception):
    """An actor fits nowhere. The message names the actor and the label or resource that lacks."""


class WorkerFailed(Exception):
    """A worker has a place but does not serve."""


class Stopped(Exception):
    """The driver was told to stop meanwhile."""


@dataclass
class Placed:
    """A worker's actor. `status` is the last answer that came, `answers` whether the last question had one in time."""

    name: str
    pool: Pool
    index: int
    actor: Any
    group: PlacementGroup | None = None
    port: int = 0
    """Where it was told to listen; 0: an earlier driver told it."""
    adopted: bool = False
    """An earlier driver had started it."""
    status: WorkerStatus | None = None
    answers: bool = False
    ending: bool = False
    question: Any = None
    """The status call that has not come back."""
    fault: str = ""
    """Ray's words, when the last question failed."""

    @property
    def phase(self) -> Phase:
        """One that is slow to answer is what it was; one whose process is gone is not."""
        if self.ending:
            return Phase.ENDING
        return Phase.PENDING if self.status is None or self.fault else self.status.phase


class RayFleet:
    """The actors of one fleet file. Needs a connected Ray.

    Actors end with the driver unless `detached`; those stay until `find(...).stop()`.
    """

    def __init__(self, fleet: Fleet, *, detached: bool = False) -> None:
        self._fleet = fleet
        self._detached = detached
        self._workers: dict[str, Placed] = {}

    @classmethod
    def place(cls, fleet: Fleet, *, detached: bool = False) -> Self:
        """Asks for `replicas` workers of each pool; an actor that is there already, by its name, is kept as it is."""
        placed = cls(fleet, detached=detached)
        placed._adopt()
        for pool in fleet.pools:
            there = {worker.index for worker in placed.workers(pool)}
            for index in [i for i in range(pool.max_replicas) if i not in there][: pool.replicas - len(there)]:
                placed.start(pool, index)
        return placed

    @classmethod
    def find(cls, fleet: Fleet) -> Self:
        """The actors of the fleet that exist now."""
        placed = cls(fleet, detached=True)
        placed._adopt()
        return placed

    def workers(self, pool: Pool | None = None) -> list[Placed]:
        """Of one pool, or all."""
        return [worker for worker in self._workers.values() if pool in (None, worker.pool)]

    def start(self, pool: Pool, index: int) -> None:
        """Asks for a place for one more worker; until it has one, it is demand that an autoscaler sees."""
        name = f"{pool.name}-{index}"
        taken = {worker.port for worker in self.workers()}
        port = pool.first_port + index if pool.first_port else free_port(taken)
        lifetime = {"lifetime": "detached"} if self._detached else {}
        group = _own_group(pool, name, **lifetime) if pool.num_ranks > 1 else None
        options = _actor_options(pool, group) | lifetime
        remote = ray.remote(WorkerActor).options(name=name, namespace=self._fleet.namespace, **options)
        actor = remote.remote(name, pool, port, self._fleet.coordinators)
        self._workers[name] = Placed(name, pool, index, actor, group, port)

    def drain(self, worker: Placed) -> None:
        """Asks for it; returns at once."""
        worker.actor.drain.remote()

    def end(self, worker: Placed) -> None:
        """Its process, at once and for good; what it has reserved is free once it is gone."""
        ray.kill(worker.actor, no_restart=True)
        _free(worker.group)
        worker.ending = True

    def look(self, timeout_s: float = 1.0) -> list[Placed]:
        """Brings `status` and `answers` of all workers up to date, as far as they answer in time, and forgets those
        that are gone. Returns those of them that nobody here has ended."""
        for worker in self.workers():
            if worker.question is None and not worker.ending:
                worker.question = worker.actor.status.remote()
        open_questions = [worker.question for worker in self.workers() if worker.question is not None]
        if open_questions:
            ray.wait(open_questions, num_returns=len(open_questions), timeout=timeout_s)
        lost = []
        for worker in self.workers():
            worker.answers = _take_answer(worker)
            if not worker.answers and (worker.ending or worker.question is None) and not self._exists(worker):
                del self._workers[worker.name]
                if not worker.ending:
                    lost.append(worker)
                    _free(worker.group)
        return lost

    def statuses(self, timeout_s: float = 5.0) -> dict[str, WorkerStatus | None]:
        """By name; None for a worker that does not answer now: without a place, or between death and restart."""
        self.look(timeout_s)
        return {worker.name: worker.status if worker.answers else None for worker in self.workers()}

    def wait_serving(
        self, *, placement_timeout_s: float, ready_timeout_s: float, stopping: threading.Event | None = None
    ) -> dict[str, WorkerStatus]:
        """Returns when all serve that do not drain. Raises PlacementError when one gets no place, WorkerFailed when one
        cannot serve, Stopped when `stopping` was set."""
        stopping = stopping or threading.Event()
        started = time.monotonic()
        while not stopping.is_set():
            for worker in (*self.look(POLL_S), *self.workers()):
                if worker.name not in self._workers or worker.phase is Phase.FAILED:
                    raise WorkerFailed(why_failed(worker))
            serving = {w.name: w.status for w in self.workers() if w.phase is Phase.SERVING and w.status is not None}
            if len(serving) == len([w for w in self.workers() if w.phase not in (Phase.DRAINING, Phase.DRAINED)]):
                return serving
            waited_s = time.monotonic() - started
            homeless = [worker for worker in self.workers() if worker.phase is Phase.PENDING]
            if homeless and waited_s > placement_timeout_s:
                raise PlacementError(f"no place after {placement_timeout_s:g} s for " + "; ".join(self.lacks(homeless)))
            if waited_s > placement_timeout_s + ready_timeout_s:
                late = ", ".join(worker.name for worker in self.workers() if worker.name not in serving)
                raise WorkerFailed(f"not serving after {waited_s:.0f} s: {late}; their logs are in Ray's session")
            stopping.wait(POLL_S)
        raise Stopped

    def wait_restarted(self, killed: WorkerStatus, *, timeout_s: float) -> WorkerStatus:
        """The successor of a worker whose process ended, once it serves. Raises WorkerFailed after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.statuses().get(killed.name)
            if status and status.serving and status.pid != killed.pid:
                return status
            time.sleep(POLL_S)
        raise WorkerFailed(f"{killed.name} does not serve again after {timeout_s:g} s")

    def lacks(self, workers: Iterable[Placed]) -> list[str]:
        """Of workers without a place: name, and the label or resource that lacks."""
        nodes, available = ray.nodes(), ray.available_resources()
        return [f"{worker.name}: {explain(worker.pool, nodes, available)}" for worker in workers]

    def stop(self, *, adopted: bool = True) -> None:
        """Drains every worker, each for as long as its own settings allow, ends its process, and waits until it is
        gone. adopted: those that an earlier driver has started, too."""
        leaving = [worker for worker in self.workers() if adopted or not worker.adopted]
        grace_s = max((grace_s_of(worker.pool) for worker in leaving), default=0.0)
        for worker in leaving:
            if not worker.ending:
                self.drain(worker)
        self._wait_while(leaving, lambda worker: worker.phase in (Phase.SERVING, Phase.DRAINING), grace_s)
        self._kill(leaving)

    def kill(self) -> None:
        """Ends every process at once, running sessions with it, and waits until all are gone."""
        self._kill(self.workers())

    def _kill(self, workers: Sequence[Placed]) -> None:
        for worker in workers:
            if not worker.ending:
                self.end(worker)
        self._wait_while(workers, lambda worker: worker.name in self._workers, GONE_TIMEOUT_S)

    def _wait_while(self, workers: Sequence[Placed], holds: Callable[[Placed], bool], timeout_s: float) -> None:
        """Until it holds of none of them."""
        deadline = time.monotonic() + timeout_s
        self.look()
        while any(map(holds, workers)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.look()

    def _adopt(self) -> None:
        """By name: also those that a file which has changed since wants no more."""
        there = ray.util.list_named_actors(all_namespaces=True)
        for name in sorted(actor["name"] for actor in there if actor["namespace"] == self._fleet.namespace):
            pool_name, _, index = name.rpartition("-")
            pool = next((pool for pool in self._fleet.pools if pool.name == pool_name), None)
            if pool is None or not index.isdecimal():
                continue
            with suppress(ValueError):
                actor = ray.get_actor(name, namespace=self._fleet.namespace)
                group = get_placement_group(name) if pool.num_ranks > 1 else None
                self._workers[name] = Placed(name, pool, int(index), actor, group, adopted=True)

    def _exists(self, worker: Placed) -> bool:
        """A name is free once its actor is dead for good; until then it may be started again."""
        try:
            ray.get_actor(worker.name, namespace=self._fleet.namespace)
        except ValueError:
            return False
        return True


def free_port(taken: Collection[int] = ()) -> int:
    """A port that is free on this machine now, below those that outgoing connections and Ray's workers use."""
    while True:
        port = random.randrange(*FREE_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in taken:
                return port


def grace_s_of(pool: Pool) -> float:
    """Longest drain of a worker of the pool."""
    settings = pool.worker_settings()
    return settings.drain_delay_s + settings.drain_grace_s + 5.0


def _take_answer(worker: Placed) -> bool:
    if worker.question is None:
        return False
    try:
        worker.status = ray.get(worker.question, timeout=0)
    except GetTimeoutError:
        return False
    except RayError as error:
        worker.question, worker.fault = None, str(error)
        return False
    worker.question, worker.fault = None, ""
    return True


def _own_group(pool: Pool, name: str, **lifetime: str) -> PlacementGroup:
    """One bundle: ranks are children of the actor's process, and see the cards that Ray gave to it."""
    selector = {"bundle_label_selector": [pool.label_selector]} if pool.label_selector else {}
    return placement_group([demands(pool)], strategy="STRICT_PACK", name=name, **lifetime, **selector)


def _free(group: PlacementGroup | None) -> None:
    if group is not None:
        remove_placement_group(group)


def _actor_options(pool: Pool, group: PlacementGroup | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": pool.num_cpus,
        "num_gpus": pool.num_gpus,
        "resources": pool.resources,
        "max_restarts": -1,
        "max_task_retries": 0,
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    else:
        options["label_selector"] = pool.label_selector
    if pool.accelerator_type:
        options["accelerator_type"] = pool.accelerator_type
    return options | ({"memory": pool.memory_bytes} if pool.memory_bytes else {})


def why_failed(worker: Placed) -> str:
    """Of one that has ended by itself, or does not come up."""
    if worker.status is None or not worker.status.failure:
        return f"{worker.name} ended: {worker.fault or 'Ray does not say why'}"
    return f"{worker.name} on {worker.status.address} cannot serve:\n{worker.status.failure}"
