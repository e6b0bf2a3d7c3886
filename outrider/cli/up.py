"""`outrider up`: the three services on this machine, with a gateway if asked for, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import inspect
import signal
from typing import Any

import typer

from outrider.cli.bundles import prepare
from outrider.cli.connect import token_of
from outrider.cli.console import err, out, reporting_errors
from outrider.cli.flags import (
    VARIABLES_RULE,
    PlainHelp,
    flag_of,
    keyword,
    own_parameters,
    parameter,
    read_settings,
    refuse_unknown_variables,
    refuse_variables,
    with_parameters,
)
from outrider.cli.options import AUTO_DRAFT, AUTO_HEADS, Draft, Heads, Target, choose_draft, choose_heads
from outrider.cli.ports import require_free
from outrider.cli.process import Died
from outrider.cli.stack import (
    COORDINATOR,
    DEFAULT_MODEL,
    DRAFT_WORKER,
    GATEWAY,
    NOT_HONOURED,
    TARGET_WORKER,
    ServicesStopped,
    Stack,
    local_stack,
)
from outrider.cli.up_calls import SOME_TOKEN, calls
from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.metrics import metrics_host
from outrider.settings import (
    ClientSettings,
    CoordinatorSettings,
    DraftWorkerSettings,
    GatewaySettings,
    TargetWorkerSettings,
)

_COORDINATOR_FLAGS = (
    "port", "num_speculative_tokens", "max_speculative_tokens", "acceptance", "default_max_tokens", "model_aliases",
    "record_streams", "tokens_file", "metrics_host",
)  # fmt: skip
_WORKER_FLAGS = (
    "dtype", "device", "num_threads", "kv_cache_bytes", "memory_fraction", "kv_cache_dtype", "max_context_length",
    "trust_remote_code",
)  # fmt: skip
_SHARED_FLAGS = ("host", "insecure", "log_level", "log_format")
_WORKER_OF_PORT = {"target_port": "target_worker", "draft_port": "draft_worker"}
_REVISION_OF = {"target_worker": "revision", "draft_worker": "draft_revision"}
_OWN_FLAGS = (
    "--target, --draft, --revision, --draft-revision, --target-port, --draft-port, --gateway-port, --metrics-port and "
    "--metrics-host"
)
_INSTEAD = {
    "revision": "give --revision and --draft-revision",
    "metrics_port": "give --metrics-port, the coordinator's",
    "metrics_host": "give --metrics-host, the coordinator's",
}
"""Of variables that would be those of several services, what to give."""
_VARIABLES = f"{VARIABLES_RULE} Not for {_OWN_FLAGS}."
LOOPBACK = "127.0.0.1"
RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0
"""A draft worker that ended is started again after the first, each time in twice that; after a long life from anew."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    port_help = "Port of the {} worker; 0 picks a free one."
    parameters = [
        *own_parameters(_command),
        *(parameter(name, CoordinatorSettings.model_fields[name]) for name in (*_SHARED_FLAGS, *_COORDINATOR_FLAGS)),
        *(parameter(name, TargetWorkerSettings.model_fields[name]) for name in _WORKER_FLAGS),
        *(_revision(name, worker) for worker, name in _REVISION_OF.items()),
        parameter("drafters", DraftWorkerSettings.model_fields["drafters"]),
        *(_port(name, port_help.format(name.removesuffix("_port"))) for name in _WORKER_OF_PORT),
        _port("gateway_port", "Port of a gateway that speaks OpenAI's API; 0 picks a free one; unset: none.", None),
        _port("metrics_port", "Port of the coordinator's /metrics for Prometheus; 0: a free one; unset: none.", None),
    ]
    help_text = "Start coordinator, draft worker and target worker on this machine."
    add = app.command("up", cls=PlainHelp, help=help_text, epilog=_VARIABLES, rich_help_panel="Services")
    add(with_parameters(_command, parameters))


def _revision(name: str, worker: str) -> inspect.Parameter:
    model = f"--{worker.removesuffix('_worker')}"
    text = f"Branch, tag or commit of {model}, a hub id; empty: its default one."
    return keyword(name, str, typer.Option(flag_of(name), help=text, show_default=False), "")


def _port(name: str, text: str, default: int | None = 0) -> inspect.Parameter:
    return keyword(name, int, typer.Option(flag_of(name), min=0, max=65535, help=text), default)


def _command(
    *, target: Target = DEFAULT_MODEL, draft: Draft = AUTO_DRAFT, heads: Heads = AUTO_HEADS, **given: Any
) -> None:
    with reporting_errors():
        refuse_unknown_variables()
        refuse_variables({**NOT_HONOURED, **_INSTEAD}, "up")
        chosen = choose_heads(target, heads)
        asyncio.run(_up(target, choose_draft(target, draft, chosen), {**given, "heads": chosen}))


def stack_settings(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of `local_stack` from flags; what no flag gives comes from the environment and the defaults.

    Checked here, so that a bad value is a usage error and not the death of a child.
    """

    def pick(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: given[name] for name in names if given.get(name) is not None}

    # only the coordinator calls them, from this machine
    ports = {worker: {"host": LOOPBACK, "port": given.get(name, 0)} for name, worker in _WORKER_OF_PORT.items()}
    revisions = {worker: {"revision": given.get(name) or ""} for worker, name in _REVISION_OF.items()}
    own = CoordinatorSettings(**pick(("host",)))
    shared = {"host": own.host} | (
        {"drain_grace_s": own.drain_grace_s} if "drain_grace_s" in own.model_fields_set else {}
    )
    settings = {
        "shared": shared | pick(_SHARED_FLAGS),
        "coordinator": {"port": CoordinatorSettings(**pick(("port",))).port}
        | pick((*_COORDINATOR_FLAGS, "metrics_port")),
        "target_worker": ports["target_worker"] | revisions["target_worker"] | pick((*_WORKER_FLAGS, "heads")),
        "draft_worker": ports["draft_worker"] | revisions["draft_worker"] | pick((*_WORKER_FLAGS, "drafters")),
    }
    if given.get("gateway_port") is not None:
        settings["gateway"] = {"port": given["gateway_port"]}
        read_settings(GatewaySettings, settings["shared"] | settings["gateway"])
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
    except Died as death:
        raise ServicesStopped(f"{death.what}{death.where_it_says_why}") from None
    finally:
        stopped.cancel()


async def _serve_until(stop: asyncio.Event, target: str, draft: str | None, settings: dict[str, Any]) -> None:
    host = settings["shared"]["host"]
    flags = {"coordinator": "--port", "target_worker": "--target-port", "draft_worker": "--draft-port"}
    for name, flag in (flags | {"gateway": "--gateway-port"}).items():
        own = settings.get(name, {})
        require_free(own.get("host", host), own.get("port", 0), flag)
    coordinator = read_settings(CoordinatorSettings, settings["shared"] | settings["coordinator"])
    require_free(metrics_host(coordinator), coordinator.metrics_port or 0, "--metrics-port")
    if coordinator.tokens_file and token_of(ClientSettings()) is None:
        raise InvalidArgument(
            "--tokens-file lets in those alone who show a token, and `outrider up` has to ask whether all is well: set "
            "OUTRIDER_TOKEN_FILE to a file of one of its tokens, or OUTRIDER_TOKEN",
            field="tokens_file",
        )
    await asyncio.to_thread(_prepare, {"target_worker": target, "draft_worker": draft}, settings)
    err.print(f"[dim]starting target worker, {'draft worker and ' if draft else ''}coordinator...[/]")
    stop_grace_s = settings["shared"].get("drain_grace_s", 30.0) + 5.0
    async with local_stack(target, draft, **settings, on_line=_print_line, stop_grace_s=stop_grace_s) as stack:
        _announce(stack, target, draft, settings)
        ended = asyncio.create_task(stack.first_exit((TARGET_WORKER, COORDINATOR, GATEWAY)))
        tasks = {ended, asyncio.create_task(_keep_draft_worker(stack))} if draft else {ended}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                for task in tasks - {ended}:
                    if task.done():
                        task.result()
                death = await ended.result().death()
                raise ServicesStopped(f"{death.what}{death.where_it_says_why}.\nThe other services were stopped too.")
        finally:
            for task in tasks:
                task.cancel()


def _prepare(models: dict[str, str | None], settings: dict[str, dict[str, Any]]) -> None:
    for worker, model in models.items():
        prepare(model, revision=settings[worker]["revision"])


async def _keep_draft_worker(stack: Stack) -> None:
    """Starts the draft worker again whenever it ends: without it streams go on, plain. Never returns."""
    clock, delay_s = asyncio.get_running_loop().time, RESTART_DELAY_S
    while True:
        since = clock()
        child = stack.processes[DRAFT_WORKER]
        await child.wait()
        if clock() - since > MAX_RESTART_DELAY_S:
            delay_s = RESTART_DELAY_S
        err.print(
            f"[bold yellow]warning:[/] {DRAFT_WORKER} {child.how_it_ended()}: streams go on without its drafts; "
            f"starting it again in {delay_s:g} s"
        )
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)
        try:
            await stack.restart(DRAFT_WORKER)
            err.print(f"[dim]{DRAFT_WORKER} serves again, pid {stack.processes[DRAFT_WORKER].pid}[/]")
        except OutriderError as error:
            err.print(f"[bold yellow]warning:[/] it did not start: {str(error).splitlines()[0]}")


def _print_line(role: str, line: str) -> None:
    err.print(f"[dim]{role:>13} |[/] ", end="")
    err.print(line, markup=False)


def _announce(stack: Stack, target: str, draft: str | None, settings: dict[str, dict[str, Any]]) -> None:
    heads = settings["target_worker"].get("heads", ())
    drafts = ", ".join(filter(None, (draft, *(f"head {name}" for name in heads)))) or "none"
    out.print(f"[bold green]outrider is up[/] on [bold]{stack.address}[/]  (target {target}, draft {drafts})")
    for role, child in stack.processes.items():
        out.print(f"  {role:>13}  {child.address}  pid {child.pid}")
    gateway = stack.processes.get(GATEWAY)
    token = token_of(ClientSettings())
    given = (token() if callable(token) else token) or ""
    if not given and CoordinatorSettings(**settings["coordinator"]).tokens_file:
        given = SOME_TOKEN
    shown = calls(stack.address, gateway.address if gateway else None, given, is_toy=target.startswith("toy:"))
    out.print("\nCall it:\n" + "\n".join(f"  {call}" for call in shown), markup=False)
    out.print("\nCtrl-C stops all of it.")
