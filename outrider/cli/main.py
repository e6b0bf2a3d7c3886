"""The `outrider` command. Each subcommand has its own file; torch is loaded only by those that run a model."""

from __future__ import annotations

import sys

import typer

from outrider.cli import (
    audit,
    bench,
    chat,
    demo,
    distill,
    doctor,
    draft_vocab,
    generate,
    models,
    plan,
    ray_fleet,
    services,
    tokens,
    top,
    trace,
    up,
    verify,
)
from outrider.serving import huge_pages

app = typer.Typer(
    help="Lossless speculative decoding as a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("outrider"))
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for command in (
    up,
    services,
    ray_fleet,
    generate,
    chat,
    models,
    top,
    trace,
    tokens,
    draft_vocab,
    distill,
    doctor,
    verify,
    audit,
    bench,
    plan,
    demo,
):
    command.register(app)


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] in (["draft-worker"], ["target-worker"]):
        huge_pages.start_over_asking()
    app()
