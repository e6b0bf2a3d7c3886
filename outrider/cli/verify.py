"""`outrider verify`: tests on the user's own pair, through the real services, whether speculation loses anything."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from outrider.cli import proof
from outrider.cli.bundles import prepare
from outrider.cli.connect import connect
from outrider.cli.console import (
    EXIT_FAILURE,
    EXIT_INCONCLUSIVE,
    err,
    out,
    print_json,
    print_table,
    progress,
    reporting_errors,
)
from outrider.cli.flags import CALLS_RULE, refuse_unknown_variables, refuse_variables
from outrider.cli.law import POWER
from outrider.cli.options import AUTO_DRAFT, AUTO_HEADS, Draft, Heads, Json, Target, choose_draft, choose_heads
from outrider.cli.prompts import for_model, read_prompts, spread
from outrider.cli.reference import Reference, load_target
from outrider.cli.stack import DEFAULT_MODEL, NOT_HONOURED, local_stack, small_worker
from outrider.client import Client
from outrider.errors import FailedPrecondition
from outrider.sampling.params import SamplingParams
from outrider.server_info import ModelInfo
from outrider.settings import TargetWorkerSettings

_EXIT_CODES = {"LOSSLESS": 0, "BROKEN": EXIT_FAILURE, "INCONCLUSIVE": EXIT_INCONCLUSIVE}
# Sampled tokens are checked after short openings: what counts is their number, and the reference's pass is the cost.
_OPENINGS = (
    "The train was late again, and",
    "def area(radius):",
    "Dear neighbours,",
    "In the year 1850 the town",
    "My favourite vegetable is",
    "import json\n",
    "The recipe needs",
    "She opened the letter and",
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("verify", epilog=CALLS_RULE, rich_help_panel="Prove and measure")(_command)


def _command(
    target: Target = DEFAULT_MODEL,
    draft: Draft = AUTO_DRAFT,
    heads: Heads = AUTO_HEADS,
    address: Annotated[
        str, typer.Option(help="Check the services that run there, whose target is --target, instead of own ones.")
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Texts compared token by token, per γ.")] = 6,
    prompts_file: Annotated[Path | None, typer.Option(help='JSONL with {"prompt": "..."} lines.')] = None,
    samples: Annotated[int, typer.Option(min=20, help="Sampled texts per acceptance rule.")] = 150,
    max_tokens: Annotated[int, typer.Option(min=4, help="Length of the compared texts.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.01, max=100.0, help="Of the sampled texts.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Number type of both models.")] = "auto",
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 8,
    seed: Annotated[int | None, typer.Option(help="Key of the run; absent: random, and told.")] = None,
    as_json: Json = False,
) -> None:
    """Test losslessness on your own pair: equal greedy texts, and sampled tokens that follow the target's own
    distribution.

    Exit code 0: LOSSLESS, 1: BROKEN, 3: INCONCLUSIVE (too little was drafted to tell), 4: nothing could be compared (a
    service did not start or answer, the models do not match), 2: usage. The last line of stdout is JSON.
    """
    with reporting_errors(is_finding=True):
        refuse_unknown_variables()
        refuse_variables(NOT_HONOURED, "verify")
        plan = proof.Plan(
            max_tokens=max_tokens,
            num_samples=samples,
            temperature=temperature,
            concurrency=concurrency,
            seed=secrets.randbits(48) if seed is None else seed,
        )
        texts = spread(read_prompts(prompts_file), prompts)
        settings = TargetWorkerSettings(model=target, dtype=dtype, heads=choose_heads(target, heads))  # type: ignore[arg-type]
        report = asyncio.run(_verify(settings, choose_draft(target, draft, settings.heads), address, texts, plan))
        if not as_json:
            _print_tables(report)
        print_json(report.as_json())
        raise SystemExit(_EXIT_CODES[report.verdict])


async def _verify(
    settings: TargetWorkerSettings, draft: str | None, address: str, texts: list[str], plan: proof.Plan
) -> proof.Report:
    async with AsyncExitStack() as cleanup:
        await asyncio.to_thread(prepare, settings.model, None if address else draft)
        loaded = await asyncio.to_thread(load_target, settings)
        if not address:
            err.print("[dim]starting the services...[/]")
            workers: dict[str, Any] = {
                "target_worker": small_worker(settings.model, dtype=settings.dtype, heads=settings.heads),
                "draft_worker": small_worker(draft, dtype=settings.dtype),
            }
            stack = local_stack(settings.model, draft, **workers)
            address = (await cleanup.enter_async_context(stack)).address
        client = await cleanup.enter_async_context(connect(address))
        info = await client.model_info()
        if info.model_fingerprint != loaded.description.model_fingerprint:
            raise FailedPrecondition(
                f"{address} serves another target than {settings.model!r}: give --target and --dtype as there"
            )
        reference = Reference(loaded, SamplingParams(temperature=plan.temperature))
        bar = cleanup.enter_context(progress("verifying"))
        return await proof.prove(
            client,
            info,
            reference.distributions,
            greedy_prompts=for_model(texts, info),
            sampling_prompts=await _token_ids(client, info, plan.seed),
            plan=plan,
            on_progress=bar,
        )


async def _token_ids(client: Client, info: ModelInfo, seed: int) -> list[list[int]]:
    if info.simulated:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, info.vocab_size, 6).tolist() for _ in _OPENINGS]
    return [await client.tokenize(opening) for opening in _OPENINGS]


def _print_tables(report: proof.Report) -> None:
    texts = Table(
        "texts compared", "texts", "drafted", "accepted", "different", title="Equal texts", title_justify="left"
    )
    for row in report.equalities:
        different = f"[bold red]{len(row.differences)}[/]" if row.differences else "0"
        texts.add_row(row.name, str(row.num_texts), str(row.num_drafted), str(row.num_accepted), different)
    law = Table(
        "rule", "tokens", "drafted", "accepted", "p (uniform)", "p (rank)", "impossible", "shift found",
        title="Sampled tokens 2 to 4 against the target's own distribution", title_justify="left",
    )  # fmt: skip
    for rule in report.laws:
        numbers = (rule.num_tokens, rule.num_drafted, rule.num_accepted)
        values = [
            f"{rule.p_uniform:.3g}",
            f"{rule.p_rank:.3g}",
            str(rule.num_impossible),
            f"{rule.detectable_shift:.3f}",
        ]
        law.add_row(rule.name, *map(str, numbers), *values)
    print_table(texts)
    print_table(law)
    largest = max((rule.detectable_shift for rule in report.laws), default=1.0)
    out.print(
        f"  These tokens show a shift of {largest:.1%} of the probability (total variation) with power {POWER:g};"
        "\n  smaller ones may pass unseen: four times the --samples find one half as large.",
        markup=False,
    )
    for row in report.equalities:
        for difference in row.differences[:3]:
            out.print(f"  {row.name}: {difference}", markup=False)
    for rule in report.laws:
        if any(reason.startswith(rule.name) for reason in report.reasons):
            ranks = ", ".join(f"{name}: {observed:.0f}/{expected:.1f}" for name, observed, expected in rule.ranks)
            out.print(f"  {rule.name} by rank, observed/expected: {ranks}", markup=False)
    for reason in report.reasons:
        out.print(f"  {reason}", markup=False)
    colour = {"LOSSLESS": "green", "BROKEN": "red", "INCONCLUSIVE": "yellow"}[report.verdict]
    out.print(
        f"[bold {colour}]{report.verdict}[/]  ({report.model}{', a SIMULATED model' if report.simulated else ''}; "
        f"chance of a false alarm <= {report.false_alarm_rate:g}; seed {report.seed}; {report.seconds:.0f} s)"
    )
