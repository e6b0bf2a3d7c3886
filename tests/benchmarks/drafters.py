"""Every way to draft on every kind of work: `make bench-drafters TARGET=... DRAFT=... HEADS=...`.

Through coordinator, target worker and (with DRAFT) draft worker as processes of their own. Each prompt is answered
plain, then once by each drafter, then plain again: a speedup is the median over prompts of a drafter's tokens/s over
the mean of the two plain runs around it, prompt pass included. `auto` is what a user gets who names no drafter: the
best of all, round by round. The formula is Leviathan et al.'s (2023, theorem 3.8) with the measured acceptance, drafts
a round, and draft cost over a plain pass; it knows nothing of a wider pass's cost, of trees or of the services.
The last line of stdout is one JSON object. `default_pair` in it is of `auto`: accepted length and speedup on held-out
chat at temperature 0, speedup there at 1, and on code-edit at 0; null where no draft and no head took part.

Variables: TARGET (default: the embedded model), DRAFT (for a draft worker; absent: none), HEADS (for the target worker,
as `--heads` of `outrider up`: heads, which are measured with chains and as NAME-tree, an exit adapter's folder, skip),
DRAFTERS (of those offered, and auto; absent: all), WORKLOADS (of chat, code, code-edit, summarise, off-domain,
long-context), TEMPERATURES, NUM_PROMPTS (of each), MAX_TOKENS, GAMMA (fixed; absent: adaptive), DTYPE. The draft worker
offers model and tree; for other drafters and its other settings, say OUTRIDER_DRAFTERS=... as for any worker.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from drafter_figures import AUTO, LEGEND, Row, default_pair, lines
from drafter_workloads import check_workloads, prompts_of
from options import number, reals, text, words

from outrider.cli.bench_profile import PREFILL
from outrider.cli.bench_runs import NEUTRAL, PLAIN, Bench, Cell, bench_services
from outrider.cli.bundles import prepare
from outrider.cli.console import err, print_json, reporting_errors
from outrider.cli.measure import Timed, median, steps_of
from outrider.cli.options import AUTO_HEADS, choose_heads
from outrider.cli.stack import DEFAULT_MODEL
from outrider.client import GenerateOptions, Prompt
from outrider.errors import InvalidArgument
from outrider.settings import TargetWorkerSettings

DEFAULT_WORKLOADS = "chat,code,code-edit"
DRAFT_WORKER_DRAFTERS = ("model", "tree")


def main() -> None:
    with reporting_errors():
        target, draft = text("TARGET", DEFAULT_MODEL), text("DRAFT")
        workloads = words("WORKLOADS", DEFAULT_WORKLOADS)
        check_workloads(workloads)
        temperatures = reals("TEMPERATURES", "0,1")
        num_prompts, max_tokens = number("NUM_PROMPTS", 6), number("MAX_TOKENS", 96)
        speculation: GenerateOptions = {"acceptance": "block"}
        if text("GAMMA"):
            speculation["num_speculative_tokens"] = number("GAMMA", 1)
        common: GenerateOptions = {**NEUTRAL, "max_tokens": max_tokens, "ignore_eos": False}
        heads = choose_heads(target, text("HEADS", AUTO_HEADS))
        values = {"model": prepare(target), "dtype": text("DTYPE", "auto"), "heads": heads}
        settings = TargetWorkerSettings(**values)  # type: ignore[arg-type]
        draft_path = prepare(draft) or None
        cells = [Cell(workload, temperature, ()) for workload in workloads for temperature in temperatures]
        figures = asyncio.run(run(settings, draft_path, cells, num_prompts, common, speculation))
        print_json({"target": target, "draft": draft or None, "heads": list(settings.heads), **figures})


async def run(
    settings: TargetWorkerSettings,
    draft: str | None,
    cells: list[Cell],
    num_prompts: int,
    common: GenerateOptions,
    speculation: GenerateOptions,
) -> dict[str, Any]:
    """All cells on one set of services."""
    drafts = {} if os.environ.get("OUTRIDER_DRAFTERS") else {"drafters": DRAFT_WORKER_DRAFTERS}
    async with bench_services(settings, draft, common, speculation, draft_worker=drafts) as bench:
        drafters = chosen(bench.info.drafters)
        if not draft and not settings.heads:
            print("default_pair is null: the target has neither a DRAFT nor HEADS, only local drafters", flush=True)
        rows = []
        for cell in cells:
            prompts = prompts_of(cell.workload, num_prompts, bench.info)
            here = await measure(bench, cell, prompts, drafters)
            simulated = ", SIMULATED costs" if bench.info.simulated else ""
            title = f"{cell.workload}, temperature {cell.temperature:g}, {len(prompts)} prompts{simulated}"
            print("\n".join(lines(title, here)), flush=True)
            rows += here
        print(LEGEND)
        for name in drafters:
            if not any(row["num_draft_tokens"] for row in rows if row["drafter"] == name):
                print(f"INCONCLUSIVE: {name} never drafted", flush=True)
        about = {"dtype": bench.info.dtype, "simulated": bench.info.simulated}
    return {**about, "rows": rows, "default_pair": default_pair(rows)}


def chosen(offered: tuple[str, ...]) -> list[str]:
    """DRAFTERS, or all. Raises InvalidArgument on one that nobody offers here."""
    known = [AUTO, *offered]
    asked = words("DRAFTERS", ",".join(known))
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise InvalidArgument(
            f"DRAFTERS {', '.join(unknown) or '(none)'}: these services offer {', '.join(known)}", field="DRAFTERS"
        )
    return asked


async def measure(bench: Bench, cell: Cell, prompts: list[Prompt], drafters: list[str]) -> list[dict[str, Any]]:
    """Figures of each drafter on one cell. The first prompt is asked twice: once to warm up all that adapts."""
    rows = {name: Row(cell.workload, cell.temperature, name) for name in drafters}
    plain: list[Timed] = []
    for index, prompt in enumerate([prompts[0], *prompts]):
        err.print(f"{cell.workload}, T={cell.temperature:g}, prompt {index} of {len(prompts)}", style="dim")
        before = await bench.time(prompt, cell, PLAIN)
        # in another order for every prompt, so that none always follows the same one
        turn = index % len(drafters)
        runs = {}
        for name in [*drafters[turn:], *drafters[:turn]]:
            options: GenerateOptions = {**bench.speculation, "drafter": name}
            runs[name] = await bench.time(prompt, cell, options)
        after = await bench.time(prompt, cell, PLAIN)
        if not index:
            continue
        plain += [before, after]
        rate = (before.num_tokens + after.num_tokens) / (before.last_s + after.last_s)
        for name, timed in runs.items():
            rows[name].runs.append(timed)
            rows[name].ratios.append(timed.tokens_per_s / rate)
    plain_steps = [step for step in steps_of(run.completion for run in plain) if step.reason != PREFILL]
    pass_ms = median(step.verify_ms for step in plain_steps)
    return [row.figures(pass_ms) for row in rows.values()]


if __name__ == "__main__":
    main()
