"""`outrider models`: what can be served (bundles, cached models), what is served, and how to get one."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli import bundles
from outrider.cli.connect import connect
from outrider.cli.console import describe_failure, err, out, print_json, print_table, progress, reporting_errors
from outrider.cli.flags import CALLS_RULE, refuse_unknown_variables
from outrider.cli.options import DEFAULT_ADDRESS, Address, Json
from outrider.errors import NotFound, OutriderError, Unavailable
from outrider.settings import WorkerSettings

_app = typer.Typer(help="Models that can be served and that are served.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(_app, name="models", rich_help_panel="Use")


@_app.command("list", epilog=CALLS_RULE)
def list_models(ctx: typer.Context, address: Address = DEFAULT_ADDRESS, as_json: Json = False) -> None:
    """Bundles, models in the hub's cache, and models that a coordinator serves.

    Where none answers, or it refuses, stderr tells so; that is an error where its address was given.
    """
    with reporting_errors():
        refuse_unknown_variables()
        rows, fault = list(bundles.known_models()), None
        try:
            rows += asyncio.run(_served(address))
        except OutriderError as error:
            fault = error
        if as_json:
            print_json(rows)
        else:
            _print_table(rows)
        if fault is not None:
            source = ctx.get_parameter_source("address")
            if source is None or source.name != "DEFAULT":
                raise fault
            err.print(f"of this machine alone: {describe_failure(fault)[0]}", style="dim", markup=False)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "source", "state", "size")
    for row in rows:
        size = f"{row['bytes'] / 2**20:.0f} MiB" if row["bytes"] else ""
        table.add_row(row["model"], row["source"], row["state"], size)
    print_table(table)


async def _served(address: str) -> list[dict[str, Any]]:
    """Raises OutriderError where no coordinator answers, or it refuses."""
    async with connect(address, timeout_s=2.0) as client:
        server = await client.server_info()
    return [{"model": name, "source": address, "state": "served", "bytes": 0} for name in server.models]


@_app.command("get")
def get_model(
    model: Annotated[str, typer.Argument(help="Bundle name or hub id.")],
    revision: Annotated[str, typer.Option(help="Hub revision; absent: the default one.")] = "",
    as_json: Json = False,
) -> None:
    """Download a model, or convert a bundle, so that servers start at once."""
    with reporting_errors():
        refuse_unknown_variables()
        path = bundles.prepare(model, revision=revision)
        if as_json:
            print_json({"model": model, "path": path})
        else:
            out.print(f"{model} is ready: {path}", markup=False)


@_app.command("info", epilog=CALLS_RULE)
def show_model(
    model: Annotated[str, typer.Argument(help="Served name, or a bundle, hub id, folder, GGUF file or toy.")] = "",
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Describe a served model (of the coordinator at --address), or one that this machine can load."""
    with reporting_errors():
        refuse_unknown_variables()
        values = asyncio.run(_served_info(model, address))
        if values is None:
            if not model:
                raise Unavailable(f"no coordinator answers at {address}: name a model, or start one with `outrider up`")
            values = _describe(model, address)
        if as_json:
            print_json(values)
            return
        for name, value in values.items():
            out.print(f"{name.replace('_', ' '):24} {_shown(value)}", markup=False)


async def _served_info(model: str, address: str) -> dict[str, Any] | None:
    async with connect(address, timeout_s=2.0) as client:
        try:
            info = dataclasses.asdict(await client.model_info(model))
        except NotFound:
            return None
        except Unavailable as error:
            if error.reason == "NO_TARGET_WORKER" and not model:
                raise  # one answers, and says what it lacks
            return None
    return {**info, "acceptance_rules": [rule.name.lower() for rule in info["acceptance_rules"]]}


def _describe(model: str, address: str) -> dict[str, Any]:
    from outrider.lm.loading import load_model

    try:
        with progress(f"loading {model}") as report:
            description = load_model(WorkerSettings(model=model), on_progress=report).description
    except OutriderError as error:
        served = []
        with suppress(OutriderError):  # there is more to say about this one only where somebody answers
            served = [row["model"] for row in asyncio.run(_served(address))]
        if served:
            error.message += f"; the coordinator at {address} serves {', '.join(served)}"
        raise
    values = dataclasses.asdict(description)
    values["has_chat_template"] = bool(values.pop("chat_template"))
    values.pop("tokenizer_json")
    return values


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None) or "none"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)
