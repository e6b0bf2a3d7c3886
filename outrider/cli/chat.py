"""`outrider chat`: a conversation in the terminal, each token in the colour of its origin. Ctrl-C ends only the answer;
Ctrl-D or /exit ends the chat."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from outrider.cli.chat_session import Messages, Session
from outrider.cli.connect import connect
from outrider.cli.console import describe_failure, err, out, print_error, reporting_errors
from outrider.cli.flags import CALLS_RULE, own_parameters, refuse_unknown_variables, with_parameters
from outrider.cli.options import DEFAULT_ADDRESS, Address, given_options, request_parameters
from outrider.cli.palette import Colour, choose_colour, legend, system_of
from outrider.client import Client
from outrider.errors import OutriderError

HELP_TEXT = (
    "/reset forgets the conversation, /seed N fixes the noise, /gamma N the drafts a round, /plain switches drafting "
    "off or on and compares, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    parameters = [*own_parameters(_command), *request_parameters()]
    help_text = "Talk with the model of a running coordinator. Ctrl-C stops only the answer."
    app.command("chat", help=help_text, epilog=CALLS_RULE, rich_help_panel="Use")(with_parameters(_command, parameters))


def _command(
    *,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer how it was speculated.")] = False,
    colour: Colour = True,
    **given: Any,
) -> None:
    with reporting_errors(), asyncio.Runner() as runner:
        refuse_unknown_variables()
        choose_colour(colour)
        options = given_options(given)
        client = runner.run(_connect(address))
        opening: Messages = [{"role": "system", "content": system}] if system else []
        session = Session(client, options, opening, stats=stats)
        err.print(HELP_TEXT, style="dim")
        if system_of(out) is not None:
            err.print(legend())
        try:
            while (line := _read_line()) is not None:
                if not _follow(runner, session, line.strip()):
                    return
        finally:
            runner.run(client.close())


def _follow(runner: asyncio.Runner, session: Session, line: str) -> bool:
    """Does what a line asks for; False: the chat is over."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    match word:
        case "/exit" | "/quit":
            return False
        case "/reset" | "/clear":
            session.reset()
        case "/seed":
            _run(runner, session.seed(rest))
        case "/gamma":
            _run(runner, session.gamma(rest))
        case "/plain":
            _run(runner, session.switch())
        case _ if word.startswith("/"):
            err.print(f"{word} is no command and was not sent; {HELP_TEXT}", style="dim", markup=False)
        case _ if line:
            _run(runner, session.say(line))
    return True


def _run(runner: asyncio.Runner, task: Coroutine[Any, Any, str | None]) -> None:
    """Says what comes of it. A failure ends the turn, not the chat."""
    try:
        told = runner.run(task)
    except KeyboardInterrupt:
        out.print("\n[dim](stopped)[/]")
    except OutriderError as error:
        err.print()
        print_error(describe_failure(error)[0])
    else:
        if told:
            err.print(told, style="dim", markup=False)


async def _connect(address: str) -> Client:
    client = connect(address)
    await client.server_info()
    return client


def _read_line() -> str | None:
    if sys.stdin.isatty():
        err.print("[bold cyan]you>[/] ", end="")
    try:
        return sys.stdin.readline() or None
    except KeyboardInterrupt:
        return None
