"""Places a fleet on a Ray cluster and stays as its keeper: `outrider ray up`, or the same as a job of the cluster."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError
from rich.console import Console

from deploy.ray.config import Fleet, load_fleet
from deploy.ray.controller import Controller
from deploy.ray.coordinators import Coordinators
from deploy.ray.fleet import PlacementError, RayFleet, Stopped, WorkerFailed
from outrider.errors import FailedPrecondition, ResourceExhausted, Unavailable

console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def up(file: Path, address: str, *, detach: bool, placement_timeout_s: float, ready_timeout_s: float) -> None:
    """Places all workers and waits until they serve; then, unless `detach`, keeps their number and says what changes
    until SIGINT or SIGTERM, and drains them.

    Raises ConfigError, Unavailable (no cluster), ResourceExhausted (a worker fits nowhere), FailedPrecondition (one
    cannot serve).
    """
    fleet = _connect(file, address)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    placed = RayFleet.place(fleet, detached=detach)
    try:
        serving = placed.wait_serving(
            placement_timeout_s=placement_timeout_s, ready_timeout_s=ready_timeout_s, stopping=stopping
        )
    except (PlacementError, WorkerFailed) as error:
        placed.stop(adopted=False)
        kind = ResourceExhausted if isinstance(error, PlacementError) else FailedPrecondition
        raise kind(str(error)) from error
    except Stopped:
        placed.stop()
        return
    if detach:
        for status in serving.values():
            console.print(f"{status.name} serves at {status.address} (pid {status.pid})")
        return
    try:
        asyncio.run(_keep(fleet, placed, stopping))
    finally:
        console.print("draining")
        placed.stop()


def down(file: Path, address: str) -> None:
    """Drains and ends detached workers. Raises ConfigError, Unavailable."""
    RayFleet.find(_connect(file, address)).stop()


async def _keep(fleet: Fleet, placed: RayFleet, stopping: threading.Event) -> None:
    coordinators = Coordinators(fleet.coordinators, fleet.client)
    stop = asyncio.Event()
    waiting = asyncio.create_task(asyncio.to_thread(stopping.wait))
    waiting.add_done_callback(lambda _: stop.set())
    try:
        await Controller(fleet, placed, coordinators.ask, console.print).run(stop)
    finally:
        stopping.set()
        await coordinators.close()


def _connect(file: Path, address: str) -> Fleet:
    fleet = load_fleet(file)
    try:
        ray.init(address=address, namespace=fleet.namespace)
    except (ConnectionError, AuthenticationError) as error:
        raise Unavailable(
            f"no Ray cluster at {address!r} that takes us: start one with `ray start --head`, or give its token, "
            f"in RAY_AUTH_TOKEN or ~/.ray/auth_token ({error})"
        ) from error
    return fleet


if __name__ == "__main__":
    from outrider.cli.ray_fleet import app

    app()
