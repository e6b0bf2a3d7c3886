"""`outrider distill`: makes a draft of a target; the same command goes on where a killed one stopped."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from outrider.cli.console import out, print_json, print_table, progress, reporting_errors
from outrider.cli.flags import (
    VARIABLES_RULE,
    own_parameters,
    read_settings,
    settings_parameters,
    with_parameters,
)
from outrider.cli.options import Json
from outrider.settings import DistillSettings


def register(app: typer.Typer) -> None:
    """Adds the command."""
    add = app.command(
        "distill",
        help="Make a draft of a target: generate text, train on it, measure, and write a checkpoint. "
        "The same command goes on where a killed one stopped.",
        epilog=VARIABLES_RULE,
        rich_help_panel="Use",
    )
    add(with_parameters(_run, [*settings_parameters(DistillSettings), *own_parameters(_run)]))


def _run(*, as_json: Json = False, **given: Any) -> None:
    with reporting_errors(DistillSettings):
        settings = read_settings(DistillSettings, given)
        from outrider.distill.pipeline import distill

        with progress(f"distilling {settings.model}") as report_progress:
            report = distill(settings, report_progress)
        if as_json:
            print_json(report)
        else:
            _show(report)


def _show(report: dict[str, Any]) -> None:
    data, training, vocabulary = report["data"], report["training"], report["vocabulary"]
    out.print(
        f"{report['draft']}: a draft of {report['target']}, kind {report['kind']}, "
        f"{report['num_parameters'] / 1e6:.2f} M parameters",
        markup=False,
    )
    out.print(
        f"{data['generated_tokens']} tokens generated in {data['seconds']:.0f} s; {training['step']} steps over "
        f"{training['num_tokens']} tokens in {training['seconds']:.0f} s"
    )
    print_table(_acceptance_table(report))
    print_table(_coverage_table(vocabulary))
    if any(pair["trained"]["by_kind"] for by in report["acceptance"].values() for pair in by.values()):
        print_table(_kinds_table(report))


def _acceptance_table(report: dict[str, Any]) -> Table:
    """By held-out set, at temperatures 0 and 1, before and after."""
    table = Table("held out", "T", "draft", "stands, by place in the chain", "tokens a pass with 1, 2, ... guesses")
    for name, by in report["acceptance"].items():
        for key, pair in by.items():
            for draft in ("start", "trained"):
                values = pair[draft]
                places = " ".join(f"{p:.3f}" for p in values["positions"])
                lengths = " ".join(f"{length:.2f}" for length in values["mean_lengths"])
                table.add_row(name, key.removeprefix("t"), draft, places, lengths)
    return table


def _coverage_table(vocabulary: dict[str, Any]) -> Table:
    table = Table("held out", "T", f"tokens within the {vocabulary['size']} ids", "target's mass on them")
    for name, by in vocabulary["coverage"].items():
        for key, values in by.items():
            table.add_row(name, key.removeprefix("t"), f"{values['tokens']:.1%}", f"{values['mass']:.1%}")
    return table


def _kinds_table(report: dict[str, Any]) -> Table:
    kinds = sorted(
        {k for by in report["acceptance"].values() for pair in by.values() for k in pair["trained"]["by_kind"]}
    )
    table = Table("held out: tokens a pass with 3 guesses", "T", *kinds)
    for name, by in report["acceptance"].items():
        for key, pair in by.items():
            own = pair["trained"]["by_kind"]
            table.add_row(name, key.removeprefix("t"), *(f"{own[k][2]:.2f}" if k in own else "" for k in kinds))
    return table
