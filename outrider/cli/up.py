"""`outrider up`: the three services on this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import inspect
import signal
from typing import Annotated, Any

import typer

from outrider.cli.bundles import prepare
from outrider.cli.console import err, out, reporting_errors
from outrider.cli.flags import parameter, read_settings, refuse_unknown_variables, with_parameters
from outrider.cli.options import Draft, Target, no_draft
from outrider.cli.stack import DEFAULT_MODEL, Stack, local_stack
from outrider.errors import Unavailable
from outrider.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings

_COORDINATOR_FLAGS = ("port", "num_speculative_tokens", "max_speculative_tokens", "acceptance", "default_max_tokens")
_WORKER_FLAGS = ("dtype", "device", "num_threads", "kv_cache_bytes", "max_context_length", "revision")
_SHARED_FLAGS = ("host", "log_level")
_WORKER_OF_PORT = {"target_port": "target_worker", "draft_port": "draft_worker"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    port_help = "Port of the {} worker; 0 picks a free one."
    parameters = [
        inspect.Parameter("target", keyword_only, default=DEFAULT_MODEL, annotation=Target),
        inspect.Parameter("draft", keyword_only, default=DEFAULT_MODEL, annotation=Draft),
        *(parameter(name, CoordinatorSettings.model_fields[name]) for name in (*_SHARED_FLAGS, *_COORDINATOR_FLAGS)),
        *(parameter(name, TargetWorkerSettings.model_fields[name]) for name in _WORKER_FLAGS),
        parameter("drafters", DraftWorkerSettings.model_fields["drafters"]),
        *(_port(name, port_help.format(name.removesuffix("_port"))) for name in _WORKER_OF_PORT),
    ]
    help_text = "Start coordinator, draft worker and target worker on this machine."
    app.command("up", help=help_text, rich_help_panel="Services")(with_parameters(_command, parameters))


def _port(name: str, text: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), min=0, max=65535, help=text)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Annotated[int, option])


def _command(*, target: str, draft: str, **given: Any) -> None:
    with reporting_errors():
        refuse_unknown_variables()
        asyncio.run(_up(target, no_draft(draft), given))


def stack_settings(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of `local_stack` from flags; what no flag gives comes from the environment and the defaults.

    Checked here, so that a bad value is a usage error and not the death of a child.
    """

    def pick(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: given[name] for name in names if given.get(name) is not None}

    ports = {worker: {"port": given.get(name, 0)} for name, worker in _WORKER_OF_PORT.items()}
    settings = {
        "shared": {"host": CoordinatorSettings(**pick(("host",))).host, **pick(_SHARED_FLAGS)},
        "coordinator": {"port": CoordinatorSettings(**pick(("port",))).port, **pick(_COORDINATOR_FLAGS)},
        "target_worker": ports["target_worker"] | pick(_WORKER_FLAGS),
        "draft_worker": ports["draft_worker"] | pick((*_WORKER_FLAGS, "drafters")),
    }
    read_settings(CoordinatorSettings, settings["shared"] | settings["coordinator"])
    read_settings(TargetWorkerSettings, settings["shared"] | settings["target_worker"])
    read_settings(DraftWorkerSettings, settings["shared"] | settings["draft_worker"])
    return settings


async def _up(target: str, draft: str | None, given: dict[str, Any]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    settings = stack_settings(given)
    serving = asyncio.create_task(_serve_until(stop, target, draft, settings))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        err.print("[dim]stopping...[/]")
        serving.cancel()  # also while it still starts; the stack's own exit ends the processes
    try:
        await serving
    except asyncio.CancelledError:
        err.print("[dim]all services stopped[/]")
    finally:
        stopped.cancel()


async def _serve_until(stop: asyncio.Event, target: str, draft: str | None, settings: dict[str, Any]) -> None:
    await asyncio.to_thread(prepare, target, draft)
    err.print("[dim]starting target worker, draft worker and coordinator...[/]")
    async with local_stack(target, draft, **settings, on_line=_print_line, stop_grace_s=35.0) as stack:
        _announce(stack, target, draft)
        dead = await stack.first_exit()
        if not stop.is_set():
            raise Unavailable(f"{await dead.death()}\nThe others were stopped too.")


def _print_line(role: str, line: str) -> None:
    err.print(f"[dim]{role:>13} |[/] ", end="")
    err.print(line, markup=False)


def _announce(stack: Stack, target: str, draft: str | None) -> None:
    out.print(f"[bold green]outrider is up[/] on [bold]{stack.address}[/]  (target {target}, draft {draft or 'none'})")
    for role, child in stack.processes.items():
        out.print(f"  {role:>13}  {child.address}  pid {child.pid}")
    out.print(
        f"""
Call it:
  outrider generate --address {stack.address} --chat "Write a haiku about rivers."
  outrider chat     --address {stack.address}
  grpcurl -plaintext -d '{{"text": "Once upon a time"}}' {stack.address} outrider.v1.GenerationService/Generate
  python: async with outrider.Client("{stack.address}") as client: ...

Ctrl-C stops all of it.""",
        markup=False,
    )
