"""`outrider ray up` and `down`: a fleet of workers on a Ray cluster. Ray is loaded when one of them runs, not before.

What they do is in `deploy/ray`, which the image for Ray nodes and a checkout of the repository have.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.console import reporting_errors
from outrider.cli.flags import refuse_unknown_variables
from outrider.errors import FailedPrecondition

app = typer.Typer(help="Workers as actors of a Ray cluster.", no_args_is_help=True, add_completion=False)

FleetFile = Annotated[Path, typer.Argument(help="Fleet file, such as deploy/ray/fleet.toml.", show_default=False)]
Cluster = Annotated[
    str, typer.Option("--address", help="Ray cluster; auto: the one of this node; local: one on this machine.")
]


def register(root: typer.Typer) -> None:
    """Adds the commands."""
    root.add_typer(app, name="ray", rich_help_panel="Services")


@app.command()
def up(
    file: FleetFile,
    address: Cluster = "auto",
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the workers running when this ends; nobody scales them then.")
    ] = False,
    placement_timeout_s: Annotated[
        float, typer.Option(min=0, help="Longest wait for places; nodes that an autoscaler adds take minutes.")
    ] = 600.0,
    ready_timeout_s: Annotated[float, typer.Option(min=0, help="Longest load of a model after that.")] = 1800.0,
) -> None:
    """Place a fleet's workers and keep their number as the load wants it; Ctrl-C or SIGTERM drains them."""
    with reporting_errors():
        _driver().up(
            file,
            address,
            detach=detach,
            placement_timeout_s=placement_timeout_s,
            ready_timeout_s=ready_timeout_s,
        )


@app.command()
def down(file: FleetFile, address: Cluster = "auto") -> None:
    """Drain and end the workers that `up --detach` left running."""
    with reporting_errors():
        _driver().down(file, address)


def _driver() -> Any:
    refuse_unknown_variables()
    for module, fix in (
        ("ray", "pip install 'outrider[ray]'"),
        ("deploy.ray", "run it from a checkout of the repository, or in the image for Ray nodes"),
    ):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise FailedPrecondition(f"{module} is not installed here: {fix}") from None
    return importlib.import_module("deploy.ray.driver")
