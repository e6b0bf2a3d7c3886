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
_Out = Annotated[
    Path | None,
    typer.Option("--out", help="New file for the secret alone, which only its owner may read; absent: it is printed."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(_app, name="token", rich_help_panel="Operate")


@_app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Whose requests those are that show it.")],
    until: Annotated[str, typer.Option(help="Time after which it is refused, such as 2030-12-31; absent: never.")] = "",
    file: Annotated[Path | None, typer.Option(help="Tokens file to add its line to; absent: it is printed.")] = None,
    out_file: _Out = None,
    as_json: Json = False,
) -> None:
    """Print a new token, and its line for the file that the coordinators' --tokens-file names.

    The line holds a hash: the token itself is shown now, or is in --out, and never again. One tenant may have several.
    """
    with reporting_errors():
        token = new_token()
        line = line_for(token, tenant, _time(until))
        lines = b"" if file is None else _with_line(file, line)
        if out_file is not None:
            _create(out_file, f"{token}\n".encode(), f"--out {out_file}")
        if file is not None:
            try:
                _replace(file, lines)
            except BaseException:
                if out_file is not None:
                    out_file.unlink()  # a token that nobody knows
                raise
        if as_json:
            print_json({"token": token, "line": line} if out_file is None else {"out": str(out_file), "line": line})
            return
        out.print(f"token  {token}" if out_file is None else f"token in {out_file}", markup=False)
        out.print(f"added to {file}" if file is not None else f"line   {line}", markup=False)


@_app.command("secret")
def secret(out_file: _Out = None) -> None:
    """Print a line for the file that --fleet-token-file of coordinators and workers names, or write that file."""
    with reporting_errors():
        if out_file is None:
            out.print(new_token(), markup=False)
            return
        _create(out_file, f"{new_token()}\n".encode(), f"--out {out_file}")
        out.print(f"secret in {out_file}", markup=False)


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            "--until must be a time such as 2030-12-31 or 2030-12-31T12:00:00Z", field="until"
        ) from None
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    if time <= datetime.now(UTC):
        raise InvalidArgument(
            f"--until {text} is past ({time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}): give a time to come, or leave it out",
            field="until",
        )
    return time


def _with_line(file: Path, line: str) -> bytes:
    """The tokens file with a line more. Raises InvalidArgument naming the file where it is no good."""
    named = f"--file {file}"
    try:
        before = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise _unusable(named, error) from None
    try:
        parse_tokens(before)
    except InvalidArgument as error:
        raise InvalidArgument(f"{named}: {error.message}", field="file") from None
    return before + (b"" if before.endswith(b"\n") or not before else b"\n") + f"{line}\n".encode()


def _replace(file: Path, contents: bytes) -> None:
    """From one moment to the next: whoever reads it again sees the old file or the new one."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    _create(fresh, contents, f"--file {file}")
    fresh.rename(file)


def _create(file: Path, contents: bytes, named: str) -> None:
    """Never over another file: the secret in it may be in use. Raises InvalidArgument; `named`: how it was given."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidArgument(
            f"{named} is there already, and what it holds may be in use: name another file, or remove it first"
        ) from None
    except OSError as error:
        raise _unusable(named, error) from None
    with os.fdopen(descriptor, "wb") as written:
        written.write(contents)


def _unusable(named: str, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{named} cannot be used: {error.strerror}", reason="UNREADABLE_FILE")
