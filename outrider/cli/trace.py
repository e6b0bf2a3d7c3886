"""`outrider trace`: the rounds of a request along the clock, in the terminal and as a drawing.

The coordinator keeps the rounds of the last requests (`trace_steps`), so that an operator can look at one that went
wrong after it did: nobody has to have asked for it before. Counts and times are kept, never text.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.connect import connect
from outrider.cli.console import err, out, print_json, print_table, reporting_errors, require_writable
from outrider.cli.flags import CALLS_RULE, own_parameters, refuse_unknown_variables, with_parameters
from outrider.cli.options import DEFAULT_ADDRESS, Address, Json, given_options, request_parameters
from outrider.cli.request_ids import by_id, refuse_paths
from outrider.cli.timeline import COLOURS, segments, totals
from outrider.cli.timeline_svg import draw
from outrider.client import GenerateOptions
from outrider.errors import InvalidArgument
from outrider.results import Step, StreamTrace

MIN_BAR, MAX_BAR, OTHER_COLUMNS = 12, 48, 62
"""Characters: of a bar, and of what stands beside it."""
MAX_ROWS = 60
COLUMNS = """γ: drafts that the target checked; 0/4: none, where 4 were wanted (too late, or lost; `why` tells).

accepted: a mark for each draft: ● taken, ○ not, ◐ not either, though the target gave it more than half a chance.

price: tokens that each ms of drafting had to earn for the chain to go on, and each row of the target's pass; -: none.

why: the reason of γ, as docs/tuning.md lists them, and what became of a branch drafted ahead."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    parameters = [*own_parameters(_command), *request_parameters()]
    help_text = f"Show where a request's time went, round by round: draft, network, queue, verify.\n\n{COLUMNS}"
    app.command("trace", help=help_text, epilog=CALLS_RULE, rich_help_panel="Use")(
        with_parameters(_command, parameters)
    )


def _command(
    *,
    request: Annotated[str, typer.Argument(help="Id of a request that has ended or runs; see `--prompt`.")] = "",
    prompt: Annotated[
        str, typer.Option("--prompt", help="Run this prompt now, and trace it.", show_default=False)
    ] = "",
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw it into this file as well.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"Every round; otherwise the first {MAX_ROWS}.")] = False,
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
    **given: Any,
) -> None:
    with reporting_errors():
        refuse_unknown_variables()
        options = given_options(given)
        if bool(request) == bool(prompt):
            raise InvalidArgument("give the id of a request, or --prompt with a text to run", field="request")
        if request and options:
            raise InvalidArgument(
                f"{', '.join(options)}: options of a request go with --prompt; {request} has run", field="request"
            )
        if request:
            refuse_paths(request)
        if svg is not None:
            require_writable(svg, "svg")
        traces = asyncio.run(_traces(address, request, prompt, options))
        if svg is not None:
            svg.write_text(draw(traces), encoding="utf-8")
            err.print(f"drawn into {svg}", markup=False)
        if as_json:
            print_json([dataclasses.asdict(trace) for trace in traces])
            return
        for trace in traces:
            show(trace, None if every else MAX_ROWS)


async def _traces(address: str, request: str, prompt: str, options: GenerateOptions) -> tuple[StreamTrace, ...]:
    async with connect(address) as client:
        if request:
            return await by_id(client.trace, request)
        options["report_steps"] = True
        answer = await client.complete(prompt, **options)
        return (StreamTrace(0, tuple(chunk.step for chunk in answer.chunks if chunk.step is not None)),)


def show(trace: StreamTrace, max_rows: int | None) -> None:
    """In the terminal: a row a round, drawn to the scale of the longest of those shown."""
    steps = trace.steps[:max_rows]
    if not steps:
        out.print("no rounds were kept of it")
        return
    longest_ms = max(step.round_ms for step in steps)
    width = max(MIN_BAR, min(MAX_BAR, out.width - OTHER_COLUMNS))
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", min_width=width, no_wrap=True)
    for name in ("took", "γ"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("accepted", "drafter", "price", "why"):
        table.add_column(name, overflow="fold")
    for step in steps:
        table.add_row(
            f"{step.start_ms:.0f}", bar(step, longest_ms, width), f"{step.round_ms:.1f}", _gamma(step),
            _accepted(step), step.drafter or "-", _price(step), _why(step),
        )  # fmt: skip
    print_table(table)
    num_hidden = len(trace.steps) - len(steps) + trace.num_left_out
    if num_hidden:
        out.print(f"[dim]and {num_hidden} rounds more: --all, --json or --svg; {trace.num_left_out} were not kept[/]")
    out.print(legend(trace.steps))


def bar(step: Step, longest_ms: float, width: int) -> Text:
    """The round's segments side by side."""
    text, drawn, passed = Text(), 0, 0.0
    for kind, ms in segments(step):
        passed += ms
        end = round(width * passed / max(longest_ms, 1e-9))
        text.append("█" * (end - drawn), style=COLOURS[kind])
        drawn = max(drawn, end)
    return text


def legend(steps: tuple[Step, ...]) -> Text:
    """Colours, and each kind's share of the whole."""
    times = totals(steps)
    whole = max(sum(times.values()), 1e-9)
    text = Text()
    for kind, ms in times.items():
        text.append("█ ", style=COLOURS[kind])
        text.append(f"{kind} {ms:.0f} ms ({ms / whole:.0%})   ")
    num_tokens = sum(step.num_tokens for step in steps)
    text.append(f"{num_tokens} tokens in {whole:.0f} ms, {1000 * num_tokens / whole:.1f} tokens/s")
    return text


def _gamma(step: Step) -> str:
    wanted, checked = step.num_draft_tokens_wanted, step.num_draft_tokens
    return str(checked) if wanted == checked else f"{checked}/{wanted}"


def _accepted(step: Step) -> str:
    """A mark for each draft: taken, or not, lighter where the target had found it likely."""
    taken = "●" * step.num_accepted_draft_tokens
    rest = step.soft_acceptances[step.num_accepted_draft_tokens :]
    return taken + "".join("◐" if chance > 127 else "○" for chance in rest)


def _why(step: Step) -> str:
    return step.reason + (f", branch {step.ahead}" if step.ahead else "")


def _price(step: Step) -> str:
    """What a ms of drafting had to earn, in tokens, and a row of the pass."""
    return f"{step.price_tokens_per_ms:.3f} + {step.row_price_tokens:.3f}" if step.price_tokens_per_ms else "-"
