"""`outrider token`: secrets for callers and for the members of a fleet. Nothing is kept here, and nobody is asked."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import out, print_json, reporting_errors
from outrider.cli.options import Json
from outrider.errors import InvalidArgument
from outrider.serving.tokens import line_for, new_token, parse_tokens

_app = typer.Typer(help="Secrets for callers and fleets.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(_app, name="token", rich_help_panel="Operate")


@_app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Whose requests those are that show it.")],
    until: Annotated[str, typer.Option(help="Time after which it is refused, such as 2030-12-31; absent: never.")] = "",
    file: Annotated[Path | None, typer.Option(help="Tokens file to add its line to; absent: it is printed.")] = None,
    as_json: Json = False,
) -> None:
    """Print a new token, and its line for the file that the coordinators' --tokens-file names.

    The line holds a hash: the token itself is shown now and never again. Several lines may be one tenant's.
    """
    with reporting_errors():
        token = new_token()
        line = line_for(token, tenant, _time(until))
        if file is not None:
            _append(file, line)
        if as_json:
            print_json({"token": token, "line": line})
            return
        out.print(f"token  {token}", markup=False)
        out.print(f"added to {file}" if file is not None else f"line   {line}", markup=False)


@_app.command("secret")
def secret() -> None:
    """Print a line for the file that --fleet-token-file of coordinators and workers names."""
    out.print(new_token(), markup=False)


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            "--until must be a time such as 2030-12-31 or 2030-12-31T12:00:00Z", field="until"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _append(file: Path, line: str) -> None:
    """The file as it was and the line, from one moment to the next. Raises InvalidArgument for one that is no good."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    contents = f"{before}{'' if before.endswith(chr(10)) or not before else chr(10)}{line}\n"
    parse_tokens(contents.encode())
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
        written.write(contents)
    fresh.rename(file)
