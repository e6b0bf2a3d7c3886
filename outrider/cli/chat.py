"""`outrider chat`: a conversation in the terminal. Ctrl-C ends only the answer; Ctrl-D or /exit ends the chat."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Annotated, Any

import typer

from outrider.cli.console import describe_failure, err, out, reporting_errors
from outrider.cli.flags import refuse_unknown_variables, with_parameters
from outrider.cli.generate import describe
from outrider.cli.options import DEFAULT_ADDRESS, Address, given_options, request_parameters
from outrider.client import Client, GenerateOptions
from outrider.errors import OutriderError
from outrider.results import Chunk, Complete

HELP_TEXT = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
Messages = list[dict[str, str]]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    system = Annotated[str, typer.Option("--system", help="System message.")]
    stats = Annotated[bool, typer.Option("--stats", help="Say after each answer how it was speculated.")]
    parameters = [
        inspect.Parameter("address", keyword_only, default=DEFAULT_ADDRESS, annotation=Address),
        inspect.Parameter("system", keyword_only, default="", annotation=system),
        inspect.Parameter("stats", keyword_only, default=False, annotation=stats),
        *request_parameters(),
    ]
    help_text = "Talk with the model of a running coordinator. Ctrl-C stops only the answer."
    app.command("chat", help=help_text, rich_help_panel="Use")(with_parameters(_command, parameters))


def _command(*, address: str, system: str, stats: bool, **given: Any) -> None:
    with reporting_errors(), asyncio.Runner() as runner:
        refuse_unknown_variables()
        options = given_options(given)
        client = runner.run(_connect(address))
        opening: Messages = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        err.print(HELP_TEXT, style="dim")
        try:
            while (line := _read_line()) is not None:
                match line.strip():
                    case "/exit" | "/quit":
                        return
                    case "/clear":
                        messages = list(opening)
                    case "":
                        continue
                    case text if text.startswith("/"):
                        word = text.split()[0]
                        err.print(f"{word} is no command and was not sent; {HELP_TEXT}", style="dim", markup=False)
                    case text:
                        _take_turn(runner, client, messages, text, options, stats)
        finally:
            runner.run(client.close())


async def _connect(address: str) -> Client:
    client = Client(address)
    await client.server_info()
    return client


def _read_line() -> str | None:
    if sys.stdin.isatty():
        err.print("[bold cyan]you>[/] ", end="")
    try:
        return sys.stdin.readline() or None
    except KeyboardInterrupt:
        return None


def _take_turn(
    runner: asyncio.Runner, client: Client, messages: Messages, text: str, options: GenerateOptions, stats: bool
) -> None:
    """Appends the turn to `messages`, as far as it was spoken; a failed one is taken back."""
    messages.append({"role": "user", "content": text})
    spoken: list[str] = []
    try:
        runner.run(_answer(client, messages, options, spoken, stats))
    except KeyboardInterrupt:
        out.print("\n[dim](stopped)[/]")
    except OutriderError as error:
        err.print(f"\n[bold red]error:[/] {describe_failure(error)[0]}")
    if spoken:
        messages.append({"role": "assistant", "content": "".join(spoken)})
    else:
        messages.pop()


async def _answer(client: Client, messages: Messages, options: GenerateOptions, spoken: list[str], stats: bool) -> None:
    reasons: set[str] = set()
    if stats:
        options = {**options, "report_steps": True}
    async for event in client.chat(messages, **options):
        if isinstance(event, Chunk):
            reasons |= {event.step.reason} if event.step else set()
            spoken.append(event.text)
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif isinstance(event, Complete):
            out.print()
            if stats:
                err.print(f"[dim]{describe(event, reasons)}[/]")
