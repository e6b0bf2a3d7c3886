"""`outrider demo`: one chat completion through all three services, then what speculation did to it."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Annotated, Any

import typer

from outrider.cli.bundles import prepare
from outrider.cli.connect import connect
from outrider.cli.console import EXIT_FAILURE, err, out, reporting_errors
from outrider.cli.flags import refuse_unknown_variables, refuse_variables
from outrider.cli.generate import NO_DRAFT_WORKER, why_nobody_drafts
from outrider.cli.measure import Acceptance, describe_positions, steps_of
from outrider.cli.options import AUTO_DRAFT, AUTO_HEADS, Draft, Heads, Target, choose_draft, choose_heads
from outrider.cli.painter import Painter
from outrider.cli.palette import legend, system_of
from outrider.cli.prompts import for_model, read_prompts
from outrider.cli.stack import DEFAULT_MODEL, NOT_HONOURED, local_stack, small_worker
from outrider.client import Client, GenerateOptions, Prompt
from outrider.errors import OutriderError
from outrider.results import Chunk, Completion, Gathering
from outrider.server_info import TREE_SUFFIX, ModelInfo

_OTHER_DRAFTERS = {"model", "tree", "text", "lookup", "suffix"}
"""Of draft workers and of the coordinator."""
_HEAD_PAYS = " The head in the target worker costs little, and pays."
_QUESTION = "Explain in a few sentences why the sky is blue."


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("demo", rich_help_panel="Prove and measure")(_command)


def _command(
    target: Target = DEFAULT_MODEL,
    draft: Draft = AUTO_DRAFT,
    heads: Heads = AUTO_HEADS,
    max_tokens: Annotated[int, typer.Option(min=8, help="Length of each answer.")] = 64,
) -> None:
    """Stream one chat completion, then compare it with plain decoding.

    A part in which nothing was drafted says INCONCLUSIVE: it compared plain decoding with itself. Exit code 1: a text
    differs, 4: nothing could be compared (a service did not start or answer), 2: usage.
    """
    with reporting_errors(is_finding=True):
        refuse_unknown_variables()
        refuse_variables(NOT_HONOURED, "demo")
        same = asyncio.run(_demo(target, choose_draft(target, draft), choose_heads(target, heads), max_tokens))
        raise SystemExit(0 if same else EXIT_FAILURE)


async def _demo(target: str, draft: str | None, heads: tuple[str, ...], max_tokens: int) -> bool:
    await asyncio.to_thread(prepare, target, draft)
    err.print(f"[dim]starting target worker, {'draft worker and ' if draft else ''}coordinator...[/]")
    workers: dict[str, Any] = {"target_worker": small_worker(target, heads=heads), "draft_worker": small_worker(draft)}
    async with local_stack(target, draft, **workers) as stack, connect(stack.address) as client:
        info = await client.model_info()
        await client.complete(for_model([_QUESTION], info)[0], max_tokens=8)  # warm-up
        options: GenerateOptions = {"temperature": 0.0, "max_tokens": max_tokens, "report_steps": True}
        out.print(f"\n[bold]{_QUESTION}[/]\n" if not info.simulated else "\n[bold]A simulated toy model answers:[/]\n")
        (question,) = for_model([_QUESTION], info)
        streamed = await _stream(client, question, options)
        same = await _compare(client, question, streamed, options, "adaptive γ")
        half: GenerateOptions = {**options, "max_tokens": max_tokens // 2}
        for name in _own_drafters(info):
            by_head: GenerateOptions = {**half, "drafter": name, "num_speculative_tokens": 3}
            answer = await client.complete(question, **by_head)
            same &= await _compare(client, question, answer, half, f"drafts of the target's own head ({name}), γ = 3")
        if "model" in info.drafters:
            fixed: GenerateOptions = {**half, "drafter": "model", "num_speculative_tokens": 4}
            answer = await client.complete(question, **fixed)
            same &= await _compare(client, question, answer, half, "model drafts, γ = 4")
        if draft == target:
            out.print(
                "The draft worker holds the target's own model here: it costs as much as the target, so it cannot be\n"
                f"faster.{_HEAD_PAYS if heads else ''}\n"
                "Lookup drafts cost nothing, and pay where an answer copies from its prompt.\n"
            )
        if "lookup" in info.drafters:
            same &= await _copying(client, info, options)
        return same


def _own_drafters(info: ModelInfo) -> list[str]:
    """Their chains: with few drafts a tree is hardly another."""
    return [n for n in info.drafters if n not in _OTHER_DRAFTERS and not n.endswith(TREE_SUFFIX)]


async def _stream(client: Client, prompt: Prompt, options: GenerateOptions) -> Completion:
    """Writes the answer as it comes, coloured by the origin of its tokens on a terminal."""
    painter = Painter(client, system_of(out))
    answer = Gathering()
    async for event in client.generate(prompt, **options):
        answer.take(event)
        if isinstance(event, Chunk):
            await painter.show(event)
        if answer.completion is not None:
            out.print("\n")
            if system_of(out) is not None:
                out.print(legend())
            return answer.completion
    raise OutriderError("the stream ended without an answer")


async def _compare(
    client: Client, prompt: Prompt, speculative: Completion, options: GenerateOptions, what: str
) -> bool:
    """Prints the answer's figures beside those of plain decoding; whether the texts are equal."""
    without: GenerateOptions = {**options, "num_speculative_tokens": 0}
    plain = await client.complete(prompt, **without)
    stats = Acceptance.of([speculative])
    shares = describe_positions(stats.by_position) or "nothing was drafted"
    if stats.num_draft_tokens:
        shares += f" ({stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts)"
    rounds = ((gamma, count) for gamma, count in enumerate(stats.gamma_histogram) if count)
    gammas = ", ".join(f"{gamma} in {count} round{'s' if count > 1 else ''}" for gamma, count in rounds)
    reasons = {step.reason for step in steps_of([speculative]) if step.reason}
    same = plain.token_ids == speculative.token_ids and plain.text == speculative.text
    texts = "identical" if same else "DIFFERENT: this is a bug, `outrider verify` tells more"
    if same and not stats.num_draft_tokens:
        texts = f"identical, but INCONCLUSIVE: nothing was drafted, both are plain{await _why_not(client, reasons)}"
    rows = {
        "tokens/s": f"plain {_rate(plain):.1f}, speculative {_rate(speculative):.1f}",
        "acceptance by position": shares,
        "tokens a step": f"{stats.tokens_per_step:.2f}",
        "γ chosen": f"{gammas} ({', '.join(sorted(reasons))})",
        "greedy texts": texts,
    }
    out.print(f"[bold]{what}[/]")
    for name, value in rows.items():
        out.print(f"  {name:23} {value}", markup=False)
    out.print()
    return same


async def _why_not(client: Client, reasons: Set[str]) -> str:
    """Why nothing was drafted, by the reasons of the rounds."""
    why = await why_nobody_drafts(client) if NO_DRAFT_WORKER in reasons else ", ".join(sorted(reasons))
    return f" ({why})" if why else ""


async def _copying(client: Client, info: ModelInfo, options: GenerateOptions) -> bool:
    """An answer that repeats most of its prompt, drafted by lookup."""
    (prompt,) = for_model(read_prompts(kind="code-edit")[1:2], info)
    options = {**options, "max_tokens": 2 * options["max_tokens"]}
    by_lookup: GenerateOptions = {**options, "drafter": "lookup", "num_speculative_tokens": 6}
    answer = await client.complete(prompt, **by_lookup)
    return await _compare(client, prompt, answer, options, "lookup drafts, γ = 6, where the answer copies its prompt")


def _rate(answer: Completion) -> float:
    """Tokens per second after the first, so that the prompt's pass does not blur it."""
    spent_ms = answer.timings.total_ms - answer.timings.time_to_first_token_ms
    return (len(answer.token_ids) - 1) * 1000 / spent_ms if spent_ms > 0 else 0.0
