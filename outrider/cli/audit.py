"""`outrider audit`: a recorded stream decided once more, with the target's weights and nothing else of the service.

Needs a record: of a coordinator that keeps some (`record_streams`), or a file (`outrider generate --record FILE`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider.audit.findings import Verdict
from outrider.audit.frame import text_ids
from outrider.audit.record import StreamRecord
from outrider.cli.connect import connect
from outrider.cli.console import EXIT_FAILURE, EXIT_INCONCLUSIVE, err, out, print_json, progress, reporting_errors
from outrider.cli.flags import CALLS_RULE, refuse_unknown_variables
from outrider.cli.options import DEFAULT_ADDRESS, Address, Json
from outrider.cli.request_ids import by_id, refuse_paths
from outrider.errors import InvalidArgument, NotFound, Unavailable
from outrider.sampling.params import Finish
from outrider.serving.records import read_records, write_records
from outrider.settings import TargetWorkerSettings

if TYPE_CHECKING:
    from outrider.audit.certificate import Certificate

MAX_SHOWN = 5
"""Breaches of a stream."""
_COLOURS = {Verdict.AUDITED: "green", Verdict.BREACH: "red", Verdict.INCONCLUSIVE: "yellow"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("audit", epilog=CALLS_RULE, rich_help_panel="Prove and measure")(_command)


def _command(
    request: Annotated[str, typer.Argument(help="Id of a recorded request, or a file that holds its record.")],
    model: Annotated[
        str, typer.Option(help="The target: bundle, hub id, folder, GGUF file or toy. Absent: as the record names it.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Number type of its weights, as served.")] = "auto",
    numerics: Annotated[str, typer.Option(help="fast, or exact where the workers serve so.")] = "fast",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    independent: Annotated[
        bool, typer.Option("--independent", help="Run transformers' own module on the CPU: slow, none of our passes.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="How far logits may be off. Absent: by the number type.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the record into this file too.", show_default=False)] = None,
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Decide a recorded stream again, coin by coin, and certify that each token is what rule, seed and target decide.

    Exit code 0: AUDITED, 1: BREACH, 3: INCONCLUSIVE (nothing was drafted, or the record is incomplete), 4: no record
    could be had or decided again (nobody answers, unknown id, another model), 2: usage. With several streams the worst
    one counts. --json prints one line for each stream.
    """
    with reporting_errors(is_finding=True):
        refuse_unknown_variables()
        records = _records(request, address)
        if save is not None:
            write_records(save, records)
            err.print(f"recorded in {save}", markup=False)
        names = {record.model for record in records}
        if len(names) > 1:
            raise InvalidArgument(f"{request}: its records are of several models", field="request")
        settings = TargetWorkerSettings(
            model=model or names.pop(), dtype=dtype, numerics=numerics, device=device,  # type: ignore[arg-type]
        )  # fmt: skip
        certificates = _certified(records, settings, tolerance, independent=independent)
        for certificate in certificates:
            if as_json:
                print_json(certificate.as_json())
            else:
                show(certificate)
        raise SystemExit(exit_code([certificate.verdict for certificate in certificates]))


def exit_code(verdicts: list[Verdict]) -> int:
    """Of the worst."""
    if Verdict.BREACH in verdicts:
        return EXIT_FAILURE
    return EXIT_INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else 0


def _records(request: str, address: str) -> tuple[StreamRecord, ...]:
    if Path(request).is_file():
        return read_records(Path(request))
    refuse_paths(request)
    try:
        return asyncio.run(_fetched(request, address))
    except (NotFound, Unavailable) as error:
        error.message += f"; nor is there a file {request}"
        raise


async def _fetched(request_id: str, address: str) -> tuple[StreamRecord, ...]:
    async with connect(address) as client:
        return await by_id(client.records, request_id)


def _certified(
    records: tuple[StreamRecord, ...], settings: TargetWorkerSettings, tolerance: float | None, *, independent: bool
) -> list[Certificate]:
    from outrider.audit.certificate import certify
    from outrider.audit.target import load_target

    max_tokens = max(len(text_ids(record)) for record in records)
    with progress(f"auditing with {settings.model}") as report:
        target = load_target(settings, max_tokens, independent=independent, on_progress=report)
        certificates = []
        for number, record in enumerate(records):
            report("deciding every token again", number / len(records))
            certificates.append(certify(record, target, tolerance))
        return certificates


def show(certificate: Certificate) -> None:
    """For people."""
    found = certificate.findings
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    resumed = f", after {found.num_resumed} resumed ones, which are taken as given" if found.num_resumed else ""
    rows = {
        "request": f"{certificate.request_id}, choice {certificate.index}",
        "model": f"{certificate.model}, fingerprint {certificate.model_fingerprint}",
        "rule": f"{certificate.rule}, seed {certificate.seed}, choice {certificate.choice}, temperature "
        f"{certificate.temperature:g}",
        "ends": _end_of(certificate),
        "decided again": f"{found.num_tokens} tokens{resumed}: {found.num_comparisons} comparisons, {found.num_draws} "
        "drafts drawn again from their q",
        "drafts": f"{found.num_accepted} of {found.num_drafted} accepted",
        "near-ties": f"{found.num_close} tokens, if logits may be off by {certificate.tolerance:g}; "
        f"{found.num_flipped} of them decided the other way",
        "served by": "; ".join(certificate.served_numerics) or "not told",
        "audited by": certificate.audited_numerics,
        "prompt sha256": certificate.prompt_sha256,
        "text sha256": certificate.text_sha256,
        "record sha256": certificate.record_sha256,
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    out.print(table)
    for breach in found.breaches[:MAX_SHOWN]:
        should = "" if breach.expected is None else f", should be {breach.expected}"
        is_token = "" if breach.token_id is None else f" is {breach.token_id}{should}"
        by = f" (by {breach.by:.6g} more than the tolerance allows)" if breach.by else ""
        out.print(f"  token {breach.index}{is_token}: {breach.what}{by}", markup=False)
    if len(found.breaches) > MAX_SHOWN:
        out.print(f"  and {len(found.breaches) - MAX_SHOWN} more", markup=False)
    for reason in found.reasons:
        out.print(f"  {reason}", markup=False)
    out.print(f"[bold {_COLOURS[certificate.verdict]}]{certificate.verdict}[/]  {_in_words(certificate)}")


def _end_of(certificate: Certificate) -> str:
    asked = certificate.stop_strings
    strings = "which stop strings were asked for is not told"
    if asked is not None:
        strings = f"stop strings asked for: {list(asked)}"
    if certificate.matched_stop_string:
        return f"by {certificate.matched_stop_string!r}; {strings}"
    how = f"by {certificate.finish}" if certificate.finish != str(Finish.NONE) else "not yet, or given up"
    return f"{how}; {strings}" if asked else how


def _in_words(certificate: Certificate) -> str:
    found = certificate.findings
    match certificate.verdict:
        case Verdict.AUDITED:
            return f"{found.num_tokens} tokens, {found.num_close} of them within the tolerance of a tie"
        case Verdict.BREACH:
            return f"at token {min(breach.index for breach in found.breaches)}"
    return "no breach was found, and too little could be looked at"
