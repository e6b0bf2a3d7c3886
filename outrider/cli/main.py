"""The `outrider` command. Each subcommand has its own file, and only the file that is asked for is loaded: a service
needs no client, and no client the rest. torch is loaded only by those that run a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

import typer

from outrider.cli.flags import PlainHelp
from outrider.serving import huge_pages

FILES = {
    "up": "up",
    "coordinator": "services",
    "draft-worker": "services",
    "target-worker": "services",
    "gateway": "services",
    "ray": "ray_fleet",
    "generate": "generate",
    "chat": "chat",
    "models": "models",
    "top": "top",
    "trace": "trace",
    "token": "tokens",
    "draft-vocab": "draft_vocab",
    "distill": "distill",
    "doctor": "doctor",
    "verify": "verify",
    "audit": "audit",
    "bench": "bench",
    "plan": "plan",
    "demo": "demo",
}
"""By subcommand, in the order of `--help`, the file that adds it."""


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("outrider"))
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def application(commands: Iterable[str] = FILES) -> typer.Typer:
    """With these subcommands, and others that share a file with them."""
    app = typer.Typer(
        help="Lossless speculative decoding as a service.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for file in dict.fromkeys(FILES[command] for command in commands):
        importlib.import_module(f"outrider.cli.{file}").register(app)
    _make_plain(app)
    return app


def _make_plain(app: typer.Typer) -> None:
    """The help of every command, of those below it too."""
    for command in app.registered_commands:
        command.cls = PlainHelp
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _make_plain(group.typer_instance)


def main() -> None:
    """Entry point of the console script."""
    asked = [word for word in sys.argv[1:2] if word in FILES]
    if asked in (["draft-worker"], ["target-worker"]):
        huge_pages.start_over_asking()
    application(asked or FILES)()
