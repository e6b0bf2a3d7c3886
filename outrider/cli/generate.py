"""`outrider generate`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.connect import connect
from outrider.cli.console import err, out, print_json, reporting_errors
from outrider.cli.flags import CALLS_RULE, own_parameters, refuse_unknown_variables, with_parameters
from outrider.cli.options import DEFAULT_ADDRESS, Address, Json, given_options, request_parameters
from outrider.client import Client, GenerateOptions, Prompt
from outrider.errors import InvalidArgument, OutriderError
from outrider.results import Chunk, Complete, Started
from outrider.serving.records import write_records

NO_DRAFT_WORKER = "no-draft-worker"
"""The reason of a round that is plain because no draft worker can be asked."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    parameters = [*own_parameters(_command), *request_parameters()]
    help_text = "Stream the answer to one prompt from a running coordinator."
    app.command("generate", help=help_text, epilog=CALLS_RULE, rich_help_panel="Use")(
        with_parameters(_command, parameters)
    )


def _command(
    *,
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from stdin.")],
    address: Address = DEFAULT_ADDRESS,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Use the model's chat template, or the bare text.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards how it was speculated.")] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write a record of it into this file, for `outrider audit`.", show_default=False),
    ] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    with reporting_errors():
        refuse_unknown_variables()
        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise InvalidArgument("the prompt is empty: give a text", field="prompt")
        messages: Prompt = [{"role": "user", "content": text}] if chat else text
        options = given_options(given)
        if record is not None:
            options["record"] = True
        asyncio.run(_generate(address, messages, options, stats=stats, record=record, as_json=as_json))


async def _generate(
    address: str, prompt: Prompt, options: GenerateOptions, *, stats: bool, record: Path | None, as_json: bool
) -> None:
    async with connect(address) as client:
        request_id = ""
        if as_json:
            answer = await client.complete(prompt, **options)
            await _save(client, answer.started.request_id, record)
            print_json(dataclasses.asdict(answer))
            return
        if stats:
            options["report_steps"] = True
        reasons: set[str] = set()
        written = ""
        try:
            async for event in client.generate(prompt, **options):
                if isinstance(event, Started):
                    request_id = event.request_id
                elif isinstance(event, Chunk):
                    written += event.text
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    reasons |= {event.step.reason} if event.step else set()
                elif isinstance(event, Complete):
                    out.print()
                    if stats:
                        why = await why_nobody_drafts(client) if NO_DRAFT_WORKER in reasons else ""
                        err.print(describe(event, why), style="dim", markup=False)
        except OutriderError:
            if written and not written.endswith("\n"):
                out.print()  # or the error would stand in the text's last line
            raise
        await _save(client, request_id, record)


async def _save(client: Client, request_id: str, path: Path | None) -> None:
    if path is not None:
        write_records(path, await client.records(request_id))
        err.print(f"recorded in {path}", markup=False)


async def why_nobody_drafts(client: Client) -> str:
    """Where a round found no draft worker that it could ask: what its coordinator says of those that it has, now."""
    try:
        workers = [worker for worker in (await client.server_info()).workers if worker.role == "draft"]
    except OutriderError:
        return "no draft worker could be asked"
    if not workers:
        return "no draft worker is connected"
    faults = "; ".join(f"{worker.address}: {worker.detail}" for worker in workers if worker.detail)
    if any(worker.healthy for worker in workers):
        return f"a draft worker is connected, but could not be asked ({faults or 'it can be now'})"
    return f"no draft worker is connected ({faults})"


def describe(complete: Complete, why_no_drafts: str = "") -> str:
    """One line about how an answer came to be. why_no_drafts: of rounds without any, see `why_nobody_drafts`."""
    spec, timings, tokens = complete.speculation, complete.timings, complete.usage.completion_tokens
    rate = tokens / timings.total_ms * 1000 if timings.total_ms else 0.0
    drafts = "nothing was drafted"
    if spec.num_draft_tokens:
        drafters = ", ".join(spec.drafters)
        drafts = f"{spec.num_accepted_draft_tokens} of {spec.num_draft_tokens} drafts accepted ({drafters})"
    if why_no_drafts:
        drafts += f"; {why_no_drafts}"
    return (
        f"{tokens} tokens ({complete.finish_reason}), {rate:.1f} tokens/s, first after "
        f"{timings.time_to_first_token_ms:.0f} ms; {drafts}, {spec.tokens_per_step:.2f} tokens a step"
    )
