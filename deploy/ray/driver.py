"""`python -m deploy.ray.driver up FLEET.toml`: places the fleet on the Ray cluster and stays as its keeper."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import ray
import typer
from rich.console import Console

from deploy.ray.actors import WorkerStatus
from deploy.ray.config import ConfigError, Fleet, load_fleet
from deploy.ray.fleet import PlacementError, RayFleet, WorkerFailed

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(stderr=True)

FleetFile = Annotated[Path, typer.Argument(help="Fleet file, see deploy/ray/fleet.toml.")]
Address = Annotated[str, typer.Option(help="Ray cluster; 'local' starts one on this machine.")]


@app.command()
def up(
    file: FleetFile,
    address: Address = "auto",
    detach: Annotated[bool, typer.Option(help="Leave the workers running when this command ends.")] = False,
    placement_timeout_s: Annotated[float, typer.Option(help="Nodes that an autoscaler adds take minutes.")] = 600.0,
    ready_timeout_s: Annotated[float, typer.Option(help="Longest load of a model.")] = 1800.0,
) -> None:
    """Places all workers, waits until they serve, and restarts are then Ray's. Ctrl-C or SIGTERM drains them."""
    fleet = _connect(file, address)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    placed = RayFleet.place(fleet, detached=detach)
    try:
        serving = placed.wait_serving(placement_timeout_s=placement_timeout_s, ready_timeout_s=ready_timeout_s)
    except (PlacementError, WorkerFailed) as error:
        placed.kill()
        raise _failure(str(error)) from error
    for status in serving.values():
        console.print(f"{status.name} serves at {status.address} (pid {status.pid})")
    if not detach:
        _keep(placed, dict(serving), stopping)


@app.command()
def down(file: FleetFile, address: Address = "auto") -> None:
    """Drains and ends detached workers."""
    RayFleet.find(_connect(file, address)).stop()


def _keep(placed: RayFleet, last: dict[str, WorkerStatus], stopping: threading.Event) -> None:
    """Says what changes until told to stop, then drains."""
    while not stopping.wait(5.0):
        for name, status in placed.statuses().items():
            if status and status.serving and status != last[name]:
                console.print(f"{name} was restarted and serves at {status.address} (pid {status.pid})")
                last[name] = status
    console.print("draining")
    placed.stop()


def _connect(file: Path, address: str) -> Fleet:
    try:
        fleet = load_fleet(file)
    except ConfigError as error:
        raise _failure(str(error)) from error
    try:
        ray.init(address=address, namespace=fleet.namespace)
    except ConnectionError as error:
        raise _failure(f"no Ray cluster at {address!r}: start one with `ray start --head` ({error})") from error
    return fleet


def _failure(message: str) -> typer.Exit:
    console.print(message, style="red", markup=False, highlight=False)
    return typer.Exit(1)


if __name__ == "__main__":
    app()
