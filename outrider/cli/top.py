"""`outrider top`: a coordinator's streams and workers as they are now, looked at again and again. Texts are not shown:
they are not asked for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from outrider.cli.connect import connect
from outrider.cli.console import describe_failure, out, print_json, reporting_errors
from outrider.cli.flags import CALLS_RULE, refuse_unknown_variables
from outrider.cli.options import DEFAULT_ADDRESS, Address, Json
from outrider.cli.palette import Colour, choose_colour
from outrider.cli.top_view import Look, render, summarise
from outrider.client import Client
from outrider.errors import OutriderError, Unimplemented

LOOK_TIMEOUT_S = 5.0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("top", epilog=CALLS_RULE, rich_help_panel="Use")(_command)


def _command(
    address: Address = DEFAULT_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    max_streams: Annotated[int, typer.Option(min=1, help="Streams shown at most, those that began first.")] = 40,
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, show it, and end.")] = False,
    colour: Colour = True,
    as_json: Json = False,
) -> None:
    """Watch streams, workers, γ, acceptance and where rounds spend their time; q quits. With --json a line a look."""
    with reporting_errors():
        refuse_unknown_variables()
        choose_colour(colour)
        addresses = [one.strip() for one in address.split(",") if one.strip()]
        asyncio.run(_Top(addresses, interval_s, max_streams, once=once, as_json=as_json).run())


class _Top:
    def __init__(self, addresses: list[str], interval_s: float, max_streams: int, *, once: bool, as_json: bool) -> None:
        self._addresses = addresses
        self._interval_s = interval_s
        self._max_streams = max_streams
        self._once = once
        self._as_json = as_json
        self._last: dict[str, Look] = {}
        self._quit = asyncio.Event()

    async def run(self) -> None:
        """Until q, or once. Raises OutriderError where no coordinator answers at first."""
        async with AsyncExitStack() as cleanup:
            clients = {
                one: await cleanup.enter_async_context(connect(one, timeout_s=LOOK_TIMEOUT_S))
                for one in self._addresses
            }
            looks = [await self._look(address, client) for address, client in clients.items()]
            if failures := [look for look in looks if isinstance(look, OutriderError)]:
                raise failures[0]
            is_live = out.is_terminal and not self._once and not self._as_json
            show = cleanup.enter_context(_live(self._quit)) if is_live else None
            while not self._quit.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._quit.wait(), self._interval_s)
                if not self._quit.is_set():
                    await self._show(clients, show)
                if self._once:
                    return

    async def _show(self, clients: dict[str, Client], live: Live | None) -> None:
        parts: list[Any] = []
        for address, client in clients.items():
            before = self._last.get(address)
            look = await self._look(address, client)
            if isinstance(look, OutriderError):
                if self._once:
                    raise look
                told: dict[str, Any] = {"address": address, "error": describe_failure(look)[0]}
                parts.append(Text(f"{address}: {told['error']}", style="red"))
            else:
                told = summarise(address, before, look)
                parts.append(render(told, look, out.width))
            if self._as_json:
                print_json(told)
        if self._as_json:
            return
        if live is None:
            out.print(Group(*parts))
        else:
            live.update(Group(*parts, Text("q quits", style="dim")), refresh=True)

    async def _look(self, address: str, client: Client) -> Look | OutriderError:
        try:
            info = await client.server_info()
            try:
                activity = await client.activity(max_streams=self._max_streams)
            except Unimplemented:
                activity = None
        except OutriderError as error:
            return error
        self._last[address] = look = Look(time.monotonic(), info, activity)
        return look


@contextmanager
def _live(quit_: asyncio.Event) -> Iterator[Live]:
    """The whole screen, and q."""
    with _keys(quit_), Live(console=out, screen=True, auto_refresh=False) as live:
        yield live


@contextmanager
def _keys(quit_: asyncio.Event) -> Iterator[None]:
    """Sets `quit_` when q is typed, without a return."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def typed() -> None:
        if b"q" in os.read(descriptor, 64).lower():
            quit_.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, typed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
