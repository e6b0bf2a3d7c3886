"""`outrider bench`: plain against speculative decoding through the real services, interleaved in one run."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from outrider.cli.bundles import prepare
from outrider.cli.console import err, out, print_json, progress, reporting_errors
from outrider.cli.flags import refuse_unknown_variables
from outrider.cli.measure import Acceptance, Pace, Timed, formula_speedup, median, percentile, steps_of
from outrider.cli.options import Draft, Json, Target, no_draft
from outrider.cli.prompts import for_model, read_prompts, spread
from outrider.cli.stack import DEFAULT_MODEL, Stack, local_stack, small_worker
from outrider.client import Client, GenerateOptions, Prompt
from outrider.errors import OutriderError
from outrider.results import Chunk, Complete, Completion, Started
from outrider.sampling.params import SamplingParams
from outrider.settings import TargetWorkerSettings

_NEUTRAL: GenerateOptions = {"ignore_eos": True, "report_steps": True, "seed": 1}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("bench", rich_help_panel="Prove and measure")(_command)


def _command(
    target: Target = DEFAULT_MODEL,
    draft: Draft = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": "..."} lines; absent: 24 of our own.')
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    num_speculative_tokens: Annotated[int | None, typer.Option(min=1, help="Drafts a round; absent: adaptive.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    acceptance: Annotated[Literal["token", "block", "coupled"], typer.Option(help="Acceptance rule.")] = "block",
    drafter: Annotated[str, typer.Option(help="auto, or one the draft worker offers.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Number type of both models.")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure plain against speculative decoding. The last line of stdout is JSON."""
    with reporting_errors():
        refuse_unknown_variables()
        settings = TargetWorkerSettings(**small_worker(target, model=target, dtype=dtype))
        texts = spread(read_prompts(prompts), num_prompts)
        speculation: GenerateOptions = {"drafter": drafter, "acceptance": acceptance}
        if num_speculative_tokens is not None:
            speculation["num_speculative_tokens"] = num_speculative_tokens
        common: GenerateOptions = {**_NEUTRAL, "max_tokens": max_tokens, "temperature": temperature}
        result = asyncio.run(_bench(settings, no_draft(draft), texts, common, speculation))
        if not as_json:
            _print_table(result)
        print_json(result)


async def _bench(
    settings: TargetWorkerSettings,
    draft: str | None,
    texts: list[str],
    common: GenerateOptions,
    speculation: GenerateOptions,
) -> dict[str, Any]:
    from outrider.cli.reference import PlainLoop, load_target

    async with AsyncExitStack() as cleanup:
        await asyncio.to_thread(prepare, settings.model, draft)
        loaded = await asyncio.to_thread(load_target, settings)
        err.print("[dim]starting the services...[/]")
        workers: dict[str, Any] = {
            "target_worker": small_worker(settings.model, dtype=settings.dtype),
            "draft_worker": small_worker(draft, dtype=settings.dtype),
        }
        stack = await cleanup.enter_async_context(local_stack(settings.model, draft, **workers))
        client = await cleanup.enter_async_context(Client(stack.address))
        info = await client.model_info()
        engine = await cleanup.enter_async_context(PlainLoop(loaded, settings))
        max_tokens = common["max_tokens"]
        plain: list[Timed] = []
        speculative: list[Timed] = []
        engine_s: list[float] = []
        greedy_plain_s: list[float] = []
        prompts = for_model(texts, info)
        report = cleanup.enter_context(progress("measuring"))
        for index, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it warms all three up
            report(f"prompt {index} of {len(prompts)}", index / (len(prompts) + 1))
            prompt_ids = prompt if info.simulated else await client.tokenize(prompt)  # type: ignore[arg-type]
            _, seconds = await engine.decode(prompt_ids, max_tokens, SamplingParams(temperature=0.0))  # type: ignore[arg-type]
            without = await _time(client, prompt, {**common, "num_speculative_tokens": 0})
            greedy = without
            if common["temperature"]:
                greedy = await _time(client, prompt, {**common, "temperature": 0.0, "num_speculative_tokens": 0})
            with_drafts = await _time(client, prompt, {**common, **speculation})
            if index:
                engine_s.append(seconds)
                greedy_plain_s.append(greedy.last_s)
                plain.append(without)
                speculative.append(with_drafts)
        result = _summary(plain, speculative)
        result["gamma0_ratio"] = median(a / b for a, b in zip(engine_s, greedy_plain_s, strict=True))
        result["engine_tokens_per_s"] = median(max_tokens / seconds for seconds in engine_s)
        result |= {"target": info.model, "draft": info.draft_model, "dtype": info.dtype, "simulated": info.simulated}
        result["memory"] = await _memory(stack, client)
        return result


async def _time(client: Client, prompt: Prompt, options: GenerateOptions) -> Timed:
    """The answer and when it came, as a caller sees it."""
    begin = time.perf_counter()
    arrivals: list[float] = []
    started: Started | None = None
    chunks: list[Chunk] = []
    async for event in client.generate(prompt, **options):
        match event:
            case Started():
                started = event
            case Chunk():
                arrivals.append(time.perf_counter() - begin)
                chunks.append(event)
            case Complete() if started is not None and chunks:
                return Timed(Completion.join(started, chunks, event), arrivals[0], arrivals[-1])
    raise OutriderError("the stream ended without an answer")


def _summary(plain: list[Timed], speculative: list[Timed]) -> dict[str, Any]:
    without, with_drafts = Pace.of(plain), Pace.of(speculative)
    acceptance = Acceptance.of(run.completion for run in speculative)
    rounds = [step for step in steps_of(run.completion for run in speculative) if step.num_draft_tokens]
    plain_rounds = [step for step in steps_of(run.completion for run in plain) if step.verify_ms]
    verify_ms = median(step.verify_ms for step in plain_rounds)
    draft_ms = median(step.draft_ms / step.num_draft_tokens for step in rounds)
    c = draft_ms / verify_ms if verify_ms else 0.0
    alpha = acceptance.alpha((step.num_draft_tokens, step.num_accepted_draft_tokens) for step in rounds)
    overheads = [step.overhead_ms for step in rounds]
    return {
        "plain_tokens_per_s": without.tokens_per_s,
        "speculative_tokens_per_s": with_drafts.tokens_per_s,
        "speedup": median(b.tokens_per_s / a.tokens_per_s for a, b in zip(plain, speculative, strict=True)),
        "formula_speedup": formula_speedup(alpha, acceptance.mean_gamma, c),
        "plain_ttft_ms": without.ttft_ms,
        "speculative_ttft_ms": with_drafts.ttft_ms,
        "plain_tpot_ms": without.tpot_ms,
        "speculative_tpot_ms": with_drafts.tpot_ms,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
        "acceptance_by_position": [round(share, 4) for share in acceptance.by_position],
        "alpha": alpha,
        "mean_gamma": acceptance.mean_gamma,
        "gamma_histogram": list(acceptance.gamma_histogram),
        "draft_cost_ratio": c,
        "draft_ms_per_token": draft_ms,
        "plain_verify_ms": verify_ms,
        "overhead_ms_p50": median(overheads),
        "overhead_ms_p90": percentile(overheads, 0.9),
        "bytes_per_draft_token": acceptance.bytes_per_draft_token,
        "num_draft_tokens": acceptance.num_draft_tokens,
        "num_rounds": acceptance.num_rounds,
        "num_prompts": len(plain),
    }


async def _memory(stack: Stack, client: Client) -> dict[str, dict[str, int]]:
    """Per role: resident bytes of the process, and bytes of weights."""
    weights = {f"{worker.role}-worker": worker.weight_bytes for worker in (await client.server_info()).workers}
    resident = stack.resident_bytes()
    return {role: {"resident_bytes": size, "weight_bytes": weights.get(role, 0)} for role, size in resident.items()}


def _print_table(result: dict[str, Any]) -> None:
    what = f"{result['target']} with {result['draft'] or 'no draft'}, {result['dtype']}"
    if result["simulated"]:
        what += ": SIMULATED costs"
    table = Table("", "plain", "speculative", title=f"outrider bench: {what}", title_justify="left")
    names = {"tokens_per_s": "tokens/s", "ttft_ms": "time to first token, ms", "tpot_ms": "time per token, ms"}
    for key, name in names.items():
        table.add_row(name, f"{result['plain_' + key]:.1f}", f"{result['speculative_' + key]:.1f}")
    out.print(table)
    shares = ", ".join(f"{share:.2f}" for share in result["acceptance_by_position"]) or "none"
    memory = ", ".join(
        f"{role} {sizes['resident_bytes'] / 2**20:.0f} MiB ({sizes['weight_bytes'] / 2**20:.0f} of weights)"
        for role, sizes in result["memory"].items()
    )
    rows = {
        "speedup measured / by formula": f"{result['speedup']:.2f} / {result['formula_speedup']:.2f}",
        "acceptance by position": shares,
        "mean acceptance length": f"{result['mean_acceptance_length']:.2f} at γ {result['mean_gamma']:.2f} in the mean",
        "γ histogram": " ".join(f"{gamma}:{count}" for gamma, count in enumerate(result["gamma_histogram"]) if count),
        "draft cost ratio c": f"{result['draft_cost_ratio']:.3f} ({result['draft_ms_per_token']:.2f} ms a draft token)",
        "overhead per round": f"{result['overhead_ms_p50']:.2f} ms (p90 {result['overhead_ms_p90']:.2f})",
        "bytes per drafted token": f"{result['bytes_per_draft_token']:.1f}",
        "γ = 0 against the engine alone": f"{result['gamma0_ratio']:.3f}",
        "memory": memory,
    }
    for name, value in rows.items():
        out.print(f"  {name:31} {value}", markup=False)
