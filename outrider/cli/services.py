"""`outrider coordinator`, `draft-worker`, `target-worker`, `gateway`: one server each, flags from its settings class.

When it serves, a server prints `outrider <role> ready on host:port` on stdout, and nothing else ever goes there.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

import typer

from outrider.cli.console import reporting_errors
from outrider.cli.flags import VARIABLES_RULE, keyword, read_settings, settings_parameters, with_parameters
from outrider.serving.server import run as run_server
from outrider.settings import (
    CoordinatorSettings,
    DraftWorkerSettings,
    GatewaySettings,
    ListenerSettings,
    TargetWorkerSettings,
)

READY = "outrider {role} ready on {address}"
SETTINGS: dict[str, type[ListenerSettings]] = {
    "coordinator": CoordinatorSettings,
    "draft-worker": DraftWorkerSettings,
    "target-worker": TargetWorkerSettings,
    "gateway": GatewaySettings,
}
_MODULES = {role: f"{role.replace('-', '_')}.server" for role in SETTINGS} | {"gateway": "coordinator.gateway.server"}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for role, cls in SETTINGS.items():
        add = app.command(role, help=f"Run {_article(cls)} alone.", epilog=VARIABLES_RULE, rich_help_panel="Services")
        add(_command(role, cls))


def _article(cls: type[ListenerSettings]) -> str:
    text = (cls.__doc__ or "").strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _command(role: str, cls: type[ListenerSettings]) -> Any:
    def run(*, exit_with_stdin: bool, **given: Any) -> None:
        with reporting_errors(cls):
            settings = read_settings(cls, given)
            run_server(_serve(role, settings, exit_with_stdin))

    lifeline = typer.Option("--exit-with-stdin", hidden=True, help="Stop when stdin closes: the parent is gone.")
    return with_parameters(run, [*settings_parameters(cls), keyword("exit_with_stdin", bool, lifeline, False)])


async def _serve(role: str, settings: ListenerSettings, exit_with_stdin: bool) -> None:
    serve = importlib.import_module(_MODULES[role]).serve
    stop = asyncio.Event()
    if exit_with_stdin:
        asyncio.get_running_loop().add_reader(0, _on_stdin, stop)

    def on_ready(port: int) -> None:
        print(READY.format(role=role, address=f"{settings.host}:{port}"), flush=True)

    await serve(settings, stop=stop, on_ready=on_ready)


def _on_stdin(stop: asyncio.Event) -> None:
    if not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        stop.set()
