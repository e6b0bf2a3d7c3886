"""Sweeps of `outrider bench`: fixed γ against adaptive, and how the gain falls as streams share the target."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from outrider.cli.bench_runs import PLAIN, Bench, Cell
from outrider.cli.console import OnProgress, out, print_table
from outrider.cli.measure import Acceptance, Timed, median, steps_of, why_inconclusive, zero_gain_concurrency
from outrider.client import GenerateOptions

GAMMAS = (0, 1, 2, 3, 4, 5, 6, 8)
ADAPTIVE = "adaptive"
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
DEFAULT_GAMMA = 4
"""Fixed γ of the concurrency sweep when the user names none."""


async def sweep_gamma(bench: Bench, cell: Cell, report: OnProgress) -> dict[str, Any]:
    """Every γ and the adaptive controller on every prompt, one after the other; speedups are medians over prompts."""
    top = min(bench.info.max_speculative_tokens, GAMMAS[-1]) if bench.info.drafters else 0
    gammas: list[int | str] = [gamma for gamma in GAMMAS if gamma <= top] + [ADAPTIVE]
    runs: dict[int | str, list[Timed]] = {gamma: [] for gamma in gammas}
    prompts = bench.prompts(cell)
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it warms up
        for gamma in gammas:
            report(f"prompt {index} of {len(prompts)}, γ {gamma}", index / (len(prompts) + 1))
            options: GenerateOptions = {**bench.speculation}
            options.pop("num_speculative_tokens", None)
            if isinstance(gamma, int):
                options["num_speculative_tokens"] = gamma
            timed = await bench.time(prompt, cell, options)
            if index:
                runs[gamma].append(timed)
    points = [_gamma_point(gamma, runs[gamma], runs[0]) for gamma in gammas]
    *fixed, adaptive = points
    fewest = min((point["num_rounds"] for point in fixed if point["gamma"]), default=0)
    best = max(fixed, key=lambda point: point["speedup"])
    return {
        "points": points,
        "best_gamma": best["gamma"],
        "best_speedup": best["speedup"],
        "adaptive_vs_best": adaptive["speedup"] / best["speedup"],
        "num_draft_tokens": sum(point["num_draft_tokens"] for point in points),
        "inconclusive": why_inconclusive(fewest, points[0]["num_rounds"]),
    }


def _num_rounds(acceptance: Acceptance) -> int:
    """Drafted ones; all where none are."""
    return acceptance.num_rounds or sum(acceptance.gamma_histogram)


def _gamma_point(gamma: int | str, runs: list[Timed], plain: list[Timed]) -> dict[str, Any]:
    acceptance = Acceptance.of(run.completion for run in runs)
    return {
        "gamma": gamma,
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "speedup": median(a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, plain, strict=True)),
        "tokens_per_step": acceptance.tokens_per_step,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
        "mean_gamma": acceptance.mean_gamma,
        "round_ms": median(step.round_ms for step in steps_of(run.completion for run in runs)),
        "num_draft_tokens": acceptance.num_draft_tokens,
        "num_rounds": _num_rounds(acceptance),
    }


async def sweep_concurrency(bench: Bench, cell: Cell, report: OnProgress) -> dict[str, Any]:
    """Plain, fixed γ and adaptive at 1 to 32 streams at once. A gain is aggregate tokens/s over plain at that load."""
    gamma = bench.speculation.get("num_speculative_tokens") or DEFAULT_GAMMA
    adaptive: GenerateOptions = {**bench.speculation}
    adaptive.pop("num_speculative_tokens", None)
    modes: dict[str, GenerateOptions] = {
        "plain": PLAIN,
        "fixed": {**bench.speculation, "num_speculative_tokens": gamma},
        ADAPTIVE: adaptive,
    }
    own = bench.prompts(cell)
    for options in modes.values():
        await bench.time(own[0], cell, options)  # warm-up
    points: list[dict[str, Any]] = []
    for concurrency in CONCURRENCIES:
        num_requests = max(concurrency, len(own))
        prompts = [own[index % len(own)] for index in range(num_requests)]
        point: dict[str, Any] = {"concurrency": concurrency, "num_requests": num_requests, "num_draft_tokens": 0}
        for mode, options in modes.items():
            report(f"{concurrency} streams, {mode}", len(points) / len(CONCURRENCIES))
            runs, seconds = await bench.time_together(prompts, cell, options, concurrency)
            point[f"{mode}_tokens_per_s"] = sum(run.num_tokens for run in runs) / seconds
            point[f"{mode}_tpot_ms"] = median(run.tpot_ms for run in runs)
            acceptance = Acceptance.of(run.completion for run in runs)
            point["num_draft_tokens"] += acceptance.num_draft_tokens
            point[f"{mode}_num_rounds"] = _num_rounds(acceptance)
            if mode != "plain":
                point[f"{mode}_mean_gamma"] = acceptance.mean_gamma
                point[f"{mode}_gain"] = point[f"{mode}_tokens_per_s"] / point["plain_tokens_per_s"]
        points.append(point)
    return {
        "gamma": gamma,
        "points": points,
        "zero_gain_concurrency": {
            mode: zero_gain_concurrency([(point["concurrency"], point[f"{mode}_gain"]) for point in points])
            for mode in ("fixed", ADAPTIVE)
        },
        "plain_scaling_at_8": _scaling(points, 8),
        "num_draft_tokens": sum(point["num_draft_tokens"] for point in points),
        "inconclusive": why_inconclusive(points[0]["fixed_num_rounds"], points[0]["plain_num_rounds"]),
    }


def _scaling(points: list[dict[str, Any]], concurrency: int) -> float:
    by_load = {point["concurrency"]: point["plain_tokens_per_s"] for point in points}
    return by_load[concurrency] / by_load[1]


def print_gamma_sweep(cell: Cell, result: dict[str, Any]) -> None:
    table = Table("γ", "tokens/s", "speedup", "tokens a step", "round, ms", title_justify="left", title=_title(cell))
    for point in result["points"]:
        numbers = (point["tokens_per_s"], point["speedup"], point["tokens_per_step"], point["round_ms"])
        table.add_row(str(point["gamma"]), *(f"{number:.2f}" for number in numbers))
    print_table(table)
    if result["inconclusive"]:
        out.print(f"  INCONCLUSIVE: {result['inconclusive']}", markup=False)
        return
    out.print(
        f"  best fixed γ {result['best_gamma']} ({result['best_speedup']:.2f}x); "
        f"adaptive {result['adaptive_vs_best']:.3f} of that",
        markup=False,
    )


def print_concurrency_sweep(cell: Cell, result: dict[str, Any]) -> None:
    names = ("streams", "plain tokens/s", f"γ = {result['gamma']}", "gain", "adaptive", "gain", "its γ")
    table = Table(*names, title_justify="left", title=_title(cell))
    for point in result["points"]:
        table.add_row(
            str(point["concurrency"]),
            f"{point['plain_tokens_per_s']:.1f}",
            f"{point['fixed_tokens_per_s']:.1f}",
            f"{point['fixed_gain']:.2f}",
            f"{point['adaptive_tokens_per_s']:.1f}",
            f"{point['adaptive_gain']:.2f}",
            f"{point['adaptive_mean_gamma']:.2f}",
        )
    print_table(table)
    if result["inconclusive"]:
        out.print(f"  INCONCLUSIVE: {result['inconclusive']}", markup=False)
        return
    for mode, streams in result["zero_gain_concurrency"].items():
        where = f"at {streams:.1f} streams" if streams else f"not up to {CONCURRENCIES[-1]} streams"
        out.print(f"  {mode} γ: the gain reaches zero {where}", markup=False)


def _title(cell: Cell) -> str:
    return f"{cell.workload}, temperature {cell.temperature:g}"
