"""`outrider bench`: plain against speculative decoding through the real services, interleaved in one run."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from outrider.cli.bench_numerics import EXACT, FAST, compare_numerics, print_numerics
from outrider.cli.bench_plot import check_plot, draw
from outrider.cli.bench_profile import describe_parts, mean_parts, profile
from outrider.cli.bench_runs import NEUTRAL, PLAIN, Bench, Cell, bench_services
from outrider.cli.bench_sweeps import (
    print_concurrency_sweep,
    print_gamma_sweep,
    sweep_concurrency,
    sweep_gamma,
)
from outrider.cli.bundles import prepare
from outrider.cli.console import (
    OnProgress,
    err,
    out,
    print_json,
    print_table,
    progress,
    reporting_errors,
    require_writable,
)
from outrider.cli.flags import refuse_unknown_variables, refuse_variables
from outrider.cli.measure import (
    Acceptance,
    Pace,
    Timed,
    describe_positions,
    draft_ms_per_token,
    formula_speedup,
    median,
    percentile,
    steps_of,
    why_inconclusive,
)
from outrider.cli.options import AUTO_DRAFT, AUTO_HEADS, Draft, Heads, Json, Target, choose_draft, choose_heads
from outrider.cli.prompts import WORKLOADS, read_prompts, spread
from outrider.cli.stack import DEFAULT_MODEL, NOT_HONOURED, small_worker
from outrider.client import GenerateOptions
from outrider.errors import InvalidArgument
from outrider.sampling.params import SamplingParams
from outrider.settings import TargetWorkerSettings

MIXED_WORKLOAD = "mixed"

_RATIOS = {"speedup measured / by formula", "draft cost ratio c", "γ = 0 against the engine alone"}
"""Of the table: what a run that is too short cannot tell."""
_PRINTERS = {"gamma": print_gamma_sweep, "concurrency": print_concurrency_sweep, "numerics": print_numerics}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("bench", rich_help_panel="Prove and measure")(_command)


def _command(
    target: Target = DEFAULT_MODEL,
    draft: Draft = AUTO_DRAFT,
    heads: Heads = AUTO_HEADS,
    prompts: Annotated[Path | None, typer.Option(help='JSONL with {"prompt": "..."} lines; absent: our own.')] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"Kind of prompts, several times for several: {', '.join(WORKLOADS)}, or all."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them, per workload.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    num_speculative_tokens: Annotated[int | None, typer.Option(min=1, help="Drafts a round; absent: adaptive.")] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=100.0, help="0, the default, is greedy; several times for several."),
    ] = None,
    acceptance: Annotated[Literal["token", "block", "coupled"], typer.Option(help="Acceptance rule.")] = "block",
    drafter: Annotated[str, typer.Option(help="auto, or one that is offered.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Number type of both models.")] = "auto",
    sweep: Annotated[
        Literal["gamma", "concurrency", "numerics"] | None,
        typer.Option(
            help="gamma: every fixed γ beside adaptive. concurrency: 1 to 32 streams, and where the gain ends. "
            "numerics: what exact costs beside fast; it loads both models twice."
        ),
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="Write where each round's time goes, and the workers' own timings, as JSON."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens/s of the sweep over gamma or concurrency into this .svg file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure plain against speculative decoding. The last line of stdout is JSON."""
    with reporting_errors():
        refuse_unknown_variables()
        refuse_variables(NOT_HONOURED, "bench")
        values = small_worker(target, model=target, dtype=dtype, heads=choose_heads(target, heads))
        settings = TargetWorkerSettings(**values)
        cells = _cells(prompts, workload or [], temperature or [0.0], num_prompts)
        if sweep and profile_file:
            raise InvalidArgument("--profile needs a run without --sweep", field="profile")
        if profile_file is not None:
            require_writable(profile_file, "profile")
        if plot is not None:
            check_plot(plot, sweep)
        chosen = choose_draft(target, draft, settings.heads)
        if chosen is None and not settings.heads:
            raise InvalidArgument(
                "--draft none leaves plain decoding to compare with itself: give a --draft or --heads", field="draft"
            )
        speculation: GenerateOptions = {"drafter": drafter, "acceptance": acceptance}
        if num_speculative_tokens is not None:
            speculation["num_speculative_tokens"] = num_speculative_tokens
        common: GenerateOptions = {**NEUTRAL, "max_tokens": max_tokens}
        run = _Run(settings, chosen, cells, sweep, quiet=as_json)
        result, profiles = asyncio.run(run.run(common, speculation))
        if plot is not None and sweep:
            draw(plot, sweep, f"outrider bench: {_what(result)}", result.get("cells", [result]))
            err.print(f"drawn into {plot}", markup=False)
        if profile_file is not None:
            profile_file.write_text(json.dumps(profiles, indent=1) + "\n", encoding="utf-8")
        print_json(result)


def _cells(path: Path | None, workloads: list[str], temperatures: list[float], num_prompts: int) -> list[Cell]:
    """Every workload at every temperature. Raises InvalidArgument on a workload that does not exist."""
    if "all" in workloads:
        workloads = list(WORKLOADS)
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown:
        raise InvalidArgument(f"--workload {unknown[0]!r} is none of {', '.join(WORKLOADS)}, all", field="workload")
    kinds: list[str | None] = list(dict.fromkeys(workloads)) or [None]
    return [
        Cell(kind or MIXED_WORKLOAD, temperature, tuple(spread(read_prompts(path, kind), num_prompts)))
        for kind in kinds
        for temperature in dict.fromkeys(temperatures)
    ]


class _Run:
    """One call of the command: the cells in turn, on one set of services."""

    def __init__(
        self, settings: TargetWorkerSettings, draft: str | None, cells: list[Cell], sweep: str | None, *, quiet: bool
    ) -> None:
        self._settings = settings
        self._draft = draft
        self._cells = cells
        self._sweep = sweep
        self._quiet = quiet
        self._exact: Bench | None = None
        self._profiles: list[dict[str, Any]] = []

    async def run(self, common: GenerateOptions, speculation: GenerateOptions) -> tuple[dict[str, Any], dict[str, Any]]:
        """(figures, profile). Of several cells the figures stand in a list, `cells`."""
        from outrider.cli.reference import PlainLoop, load_target

        async with AsyncExitStack() as cleanup:
            await asyncio.to_thread(prepare, self._settings.model, self._draft)
            # The engine alone is the yardstick of the plain service; once is enough, and it takes memory.
            loaded = None
            if not self._sweep and len(self._cells) == 1:
                loaded = await asyncio.to_thread(load_target, self._settings)
            # Whatever the environment says of numerics, the sweep over it has one of each.
            workers: list[dict[str, Any]] = [{}]
            if self._sweep == "numerics":
                workers = [{"numerics": FAST}, {"numerics": EXACT}]
            bench, *others = [
                await cleanup.enter_async_context(
                    bench_services(self._settings, self._draft, common, speculation, **values)
                )
                for values in workers
            ]
            self._exact = others[0] if others else None
            engine = None
            if loaded is not None:
                engine = await cleanup.enter_async_context(PlainLoop(loaded, self._settings))
            report = cleanup.enter_context(progress("measuring"))
            info = bench.info
            told = {
                "target": info.model, "draft": info.draft_model, "heads": await bench.heads(), "dtype": info.dtype,
                "simulated": info.simulated,
            }  # fmt: skip
            results = []
            for number, cell in enumerate(self._cells):
                result = {"workload": cell.workload, "temperature": cell.temperature}
                result |= await self._measure(bench, cell, engine, _part(report, number, len(self._cells)))
                results.append(result)
                self._print(cell, result | told)
            memory = await bench.memory()
            profiles = {**told, "cells": self._profiles, "workers": await bench.worker_timings()}
        figures = results[0] if len(results) == 1 else {"cells": results}
        if not self._quiet:
            _print_memory(memory)
        sweep = {"sweep": self._sweep} if self._sweep else {}
        return {**sweep, **figures, **told, "memory": memory}, profiles

    async def _measure(self, bench: Bench, cell: Cell, engine: Any, report: OnProgress) -> dict[str, Any]:
        if self._exact is not None:
            return await compare_numerics(bench, self._exact, cell, report)
        if self._sweep:
            return await (sweep_gamma if self._sweep == "gamma" else sweep_concurrency)(bench, cell, report)
        plain: list[Timed] = []
        speculative: list[Timed] = []
        ratios: list[float] = []
        engine_s: list[float] = []
        prompts = bench.prompts(cell)
        max_tokens = bench.common["max_tokens"]
        for index, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it warms all up
            report(
                f"{cell.workload} {cell.temperature:g}, prompt {index} of {len(prompts)}", index / (len(prompts) + 1)
            )
            seconds = 0.0
            if engine is not None:
                prompt_ids = prompt if bench.info.simulated else await bench.client.tokenize(prompt)  # type: ignore[arg-type]
                _, seconds = await engine.decode(prompt_ids, max_tokens, SamplingParams(temperature=0.0))
            without = greedy = await bench.time(prompt, cell, PLAIN)
            if engine is not None and cell.temperature:
                greedy = await bench.time(prompt, cell, {**PLAIN, "temperature": 0.0})
            with_drafts = await bench.time(prompt, cell, bench.speculation)
            if index:
                plain.append(without)
                speculative.append(with_drafts)
                ratios.append(seconds / greedy.last_s)
                engine_s.append(seconds)
        result = _summary(plain, speculative, await bench.draft_pass_ms(_context(speculative)))
        if engine is not None:
            result["gamma0_ratio"] = median(ratios)
            result["engine_tokens_per_s"] = median(max_tokens / seconds for seconds in engine_s)
        self._profiles.append(
            {
                "workload": cell.workload,
                "temperature": cell.temperature,
                "plain": profile(steps_of(run.completion for run in plain)),
                "speculative": profile(steps_of(run.completion for run in speculative)),
            }
        )
        return result

    def _print(self, cell: Cell, result: dict[str, Any]) -> None:
        if self._quiet:
            return
        what = _what(result)
        if self._sweep:
            out.print(f"outrider bench: {what}", markup=False)
            _PRINTERS[self._sweep](cell, result)
        else:
            _print_table(cell, what, result)


def _what(result: dict[str, Any]) -> str:
    drafts = [result["draft"] or "", *(f"head {name}" for name in result["heads"])]
    what = f"{result['target']} with {' and '.join(filter(None, drafts)) or 'no draft'}, {result['dtype']}"
    return f"{what}: SIMULATED costs" if result["simulated"] else what


def _part(report: OnProgress, number: int, num_parts: int) -> OnProgress:
    """Tells the progress of one part of several as that of the whole."""

    def report_part(text: str, fraction: float | None) -> None:
        report(text, (number + (fraction or 0.0)) / num_parts)

    return report_part


def _context(runs: list[Timed]) -> float:
    """Tokens that a pass of these reads, in the mean."""
    usages = [run.completion.usage for run in runs]
    return median(usage.prompt_tokens + usage.completion_tokens / 2 for usage in usages)


def _summary(plain: list[Timed], speculative: list[Timed], draft_pass_ms: float) -> dict[str, Any]:
    without, with_drafts = Pace.of(plain), Pace.of(speculative)
    acceptance = Acceptance.of(run.completion for run in speculative)
    rounds = [step for step in steps_of(run.completion for run in speculative) if step.num_draft_tokens]
    plain_rounds = [step for step in steps_of(run.completion for run in plain) if step.verify_ms]
    verify_ms = median(step.verify_ms for step in plain_rounds)
    draft_ms = draft_ms_per_token((run.completion for run in speculative), draft_pass_ms)
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
        "tokens_per_step": acceptance.tokens_per_step,
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
        "profile_ms": mean_parts(rounds),
        "bytes_per_draft_token": acceptance.bytes_per_draft_token,
        "num_draft_tokens": acceptance.num_draft_tokens,
        "num_rounds": acceptance.num_rounds,
        "num_prompts": len(plain),
        "inconclusive": why_inconclusive(acceptance.num_rounds, len(plain_rounds)),
    }


def _print_table(cell: Cell, what: str, result: dict[str, Any]) -> None:
    title = f"outrider bench: {what}; {cell.workload}, temperature {cell.temperature:g}"
    table = Table("", "plain", "speculative", title=title, title_justify="left")
    names = {"tokens_per_s": "tokens/s", "ttft_ms": "time to first token, ms", "tpot_ms": "time per token, ms"}
    for key, name in names.items():
        table.add_row(name, f"{result['plain_' + key]:.1f}", f"{result['speculative_' + key]:.1f}")
    print_table(table)
    shares = describe_positions(result["acceptance_by_position"]) or "none"
    rows = {
        "speedup measured / by formula": f"{result['speedup']:.2f} / {result['formula_speedup']:.2f}",
        "tokens a step": f"{result['tokens_per_step']:.2f}",
        "drafted": f"{result['num_draft_tokens']} tokens, {result['mean_gamma']:.2f} a drafted round in the mean",
        "acceptance by position": shares,
        "γ histogram": " ".join(f"{gamma}:{count}" for gamma, count in enumerate(result["gamma_histogram"]) if count),
        "draft cost ratio c": f"{result['draft_cost_ratio']:.3f} ({result['draft_ms_per_token']:.2f} ms a draft token)",
        "a round in the mean, ms": describe_parts(result["profile_ms"]),
        "overhead per round": f"{result['overhead_ms_p50']:.2f} ms (p90 {result['overhead_ms_p90']:.2f})",
        "bytes per drafted token": f"{result['bytes_per_draft_token']:.1f}",
    }
    if not result["num_draft_tokens"]:
        rows["speedup measured / by formula"] = f"{result['speedup']:.2f} / none"
        rows |= dict.fromkeys(("drafted", "draft cost ratio c", "bytes per drafted token"), "none")
    if "gamma0_ratio" in result:
        rows["γ = 0 against the engine alone"] = f"{result['gamma0_ratio']:.3f}"
    if result["inconclusive"]:
        rows |= dict.fromkeys(set(rows) & _RATIOS, "INCONCLUSIVE")
        rows["INCONCLUSIVE"] = result["inconclusive"]
    for name, value in rows.items():
        out.print(f"  {name:31} {value}", markup=False)


def _print_memory(memory: dict[str, dict[str, int]]) -> None:
    text = ", ".join(
        f"{role} {sizes['resident_bytes'] / 2**20:.0f} MiB ({sizes['weight_bytes'] / 2**20:.0f} of weights)"
        for role, sizes in memory.items()
    )
    out.print(f"  {'memory':31} {text}", markup=False)
