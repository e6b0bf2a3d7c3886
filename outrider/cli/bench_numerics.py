"""What numerics=exact costs: two sets of services, fast and exact, asked the same in turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
from rich.table import Table

from outrider.cli.bench_profile import PREFILL
from outrider.cli.bench_runs import PLAIN, Bench, Cell
from outrider.cli.console import OnProgress, print_table
from outrider.cli.measure import Acceptance, Timed, median, steps_of
from outrider.cli.stack import TARGET_WORKER
from outrider.client import GenerateOptions, Prompt

FAST, EXACT = "fast", "exact"
DEFAULT_GAMMA = 4
"""Fixed γ of the speculative runs when the user names none: an adaptive one would differ between the two."""


async def compare_numerics(fast: Bench, exact: Bench, cell: Cell, report: OnProgress) -> dict[str, Any]:
    """Plain and speculative answers to each prompt, by the one and by the other, first one first in turn.

    A cost is exact over fast, less 1, of each prompt; the median counts. `time`: from the request to the last token.
    `pass`: a pass of the target. `cpu`: processor time of the target worker, which others on the machine disturb least.
    """
    gamma = fast.speculation.get("num_speculative_tokens") or DEFAULT_GAMMA
    modes: dict[str, GenerateOptions] = {
        "plain": PLAIN,
        "speculative": {**fast.speculation, "num_speculative_tokens": gamma},
    }
    runs: dict[tuple[str, str], list[_Run]] = {}
    prompts = fast.prompts(cell)
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it warms up
        report(f"{cell.workload} {cell.temperature:g}, prompt {index} of {len(prompts)}", index / (len(prompts) + 1))
        for mode, options in modes.items():
            pair = [(FAST, fast), (EXACT, exact)]
            for numerics, bench in pair if index % 2 else reversed(pair):
                run = await _run(bench, prompt, cell, options)
                if index:
                    runs.setdefault((mode, numerics), []).append(run)
    answers = [run.timed.completion for run in runs["speculative", EXACT]]
    result: dict[str, Any] = {"gamma": gamma, "num_draft_tokens": Acceptance.of(answers).num_draft_tokens}
    for mode in modes:
        pairs = list(zip(runs[mode, FAST], runs[mode, EXACT], strict=True))
        for numerics in (FAST, EXACT):
            of_mode = runs[mode, numerics]
            result[f"{mode}_{numerics}_tokens_per_s"] = median(run.timed.tokens_per_s for run in of_mode)
            result[f"{mode}_{numerics}_pass_ms"] = median(run.pass_ms for run in of_mode)
        result[f"{mode}_time_cost"] = _cost((a.timed.last_s, b.timed.last_s) for a, b in pairs)
        result[f"{mode}_pass_cost"] = _cost((a.pass_ms, b.pass_ms) for a, b in pairs)
        result[f"{mode}_cpu_cost"] = _cost((a.cpu_s, b.cpu_s) for a, b in pairs)
    result["num_prompts"] = len(prompts)
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    timed: Timed
    pass_ms: float
    """Of the target, the median over rounds without the prompt's own."""
    cpu_s: float
    """Of the target worker."""


async def _run(bench: Bench, prompt: Prompt, cell: Cell, options: GenerateOptions) -> _Run:
    process = psutil.Process(bench.stack.processes[TARGET_WORKER].pid)
    before = process.cpu_times()
    timed = await bench.time(prompt, cell, options)
    after = process.cpu_times()
    rounds = [step for step in steps_of([timed.completion]) if step.reason != PREFILL]
    pass_ms = median(max(0.0, step.verify_ms - step.sampling_ms) for step in rounds)
    return _Run(timed, pass_ms, after.user + after.system - before.user - before.system)


def _cost(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Median of exact over fast, less 1; None where the clock saw nothing of the fast one."""
    ratios = [exact / fast - 1 for fast, exact in pairs if fast]
    return median(ratios) if ratios else None


def print_numerics(cell: Cell, result: dict[str, Any]) -> None:
    """A row for plain and for speculative decoding."""
    names = ("", "tokens/s\nfast", "\nexact", "pass, ms\nfast", "\nexact")
    costs = {"time": "cost in\ntime", "pass": "\na pass", "cpu": "\nCPU time"}
    title = f"{cell.workload}, temperature {cell.temperature:g}: what numerics=exact costs"
    table = Table(*names, *costs.values(), title_justify="left", title=title)
    for mode, name in (("plain", "plain"), ("speculative", f"γ = {result['gamma']}")):
        rates = [f"{result[f'{mode}_{numerics}_tokens_per_s']:.1f}" for numerics in (FAST, EXACT)]
        passes = [f"{result[f'{mode}_{numerics}_pass_ms']:.2f}" for numerics in (FAST, EXACT)]
        shares = [result[f"{mode}_{cost}_cost"] for cost in costs]
        table.add_row(name, *rates, *passes, *("-" if share is None else f"{share:+.1%}" for share in shares))
    print_table(table)
