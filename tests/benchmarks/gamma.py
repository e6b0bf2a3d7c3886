"""How good the chosen γ is, in simulation: `make bench-gamma`.

The coordinator's own controller (`coordinator/gamma`) against every fixed γ and against one that knows the text, on
simulated workers, networks and texts (`coordinator/simulator`), cold: it is told nothing and sees the timings of its
messages alone. A target's pass takes 30 + 0.3 ms a row, a draft 2.9 + 0.1 ms a row, round trips to the target 0.5 ms;
all vary by 3%. Acceptance: the same at every place of the text; two-regime .94 and .6 in stretches of 64 tokens in the
mean; drifting between .95 and .5 along a sine of 2048 tokens. All policies meet the same texts with the same coins.
The last line of stdout is one JSON object, a key per row, each with its figure, its bar, and whether it is reached.

Variables: SEEDS, RTTS (ms, to the draft worker), BATCHES (streams at once), TOKENS (of a stream alone; of eight
half as many each, of more a quarter), JOBS (processes), SERVICES=0 to leave out what is timed through real services.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

from options import number, reals, text, whole_numbers

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.simulator.clairvoyant import Clairvoyant, unloaded_ms
from coordinator.simulator.engine import Line
from coordinator.simulator.simulation import CREDIT_TOKENS, NewPolicy, Outcome, Simulation
from coordinator.simulator.texts import Levels, Text, constant, drifting, two_regimes
from coordinator.simulator.world import World
from outrider.cli.console import err, print_json, reporting_errors

MAX_DRAFT_TOKENS = 16
TEXTS: dict[str, Levels] = {
    **{f"{chance:g}": constant(chance) for chance in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)},
    "two-regime": two_regimes(),
    "drifting": drifting(),
}
CHANGING = ("two-regime", "drifting")
RTTS_MS, BATCHES = (0.5, 5.0, 20.0, 80.0, 200.0), (1, 8, 32)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
MAX_LOSS, MIN_CHANGING_GAIN, MAX_CHANGING_RTT_MS = 0.03, 0.05, 80.0
MAX_CLAIRVOYANT_RATIO = 1.3
MAX_SETTLING_ROUNDS, SETTLED_SHARE, SETTLED_ROUNDS = 10, 0.95, 8
MIN_GOODPUT = 0.97
TRIED_SHARE, HOPELESS = 0.25, 0.85
TELL_EVERY = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cell:
    rtt_ms: float
    batch: int
    kind: str

    def __str__(self) -> str:
        return f"RTT {self.rtt_ms:g} ms, batch {self.batch}, {self.kind}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one cell and seed. Tokens/s; `fixed` by γ, `clairvoyant` at batch 1 only."""

    fixed: tuple[float, ...]
    chosen: float
    mean_gamma: float
    clairvoyant: float | None

    @property
    def best(self) -> float:
        """Of the γ that was best on this very text: known in hindsight alone."""
        return max(self.fixed)

    @property
    def loss(self) -> float:
        return 1 - self.chosen / self.best


def adaptive(shared: PairEstimates) -> NewPolicy:
    return lambda *_: AdaptiveGamma(shared, MAX_DRAFT_TOKENS)


def fixed(gamma: int) -> NewPolicy:
    return lambda *_: FixedGamma(gamma)


def measure(cell: Cell, seed: int, stream_tokens: int) -> Figures:
    """The controller, every fixed γ and the one that knows, on the same text."""
    text, world = Text(TEXTS[cell.kind], seed=seed), World(draft_rtt_ms=cell.rtt_ms)
    num_tokens = cell.batch * stream_tokens

    def play(policy: NewPolicy) -> Outcome:
        return Simulation(world, [text], policy, num_streams=cell.batch, seed=seed).run(num_tokens)

    rates = fixed_rates(cell, lambda gamma: Simulation(world, [text], fixed(gamma), num_streams=cell.batch, seed=seed),
                        num_tokens)  # fmt: skip
    chosen = play(adaptive(PairEstimates()))
    clairvoyant = None
    if cell.batch == 1:
        clairvoyant = play(
            lambda text, place: Clairvoyant(
                text, place, num_tokens + CREDIT_TOKENS, lambda gamma: unloaded_ms(world, gamma), MAX_DRAFT_TOKENS
            )
        ).tokens_per_s
    return Figures(rates, chosen.tokens_per_s, chosen.mean_gamma, clairvoyant)


def fixed_rates(cell: Cell, simulation: Callable[[int], Simulation], num_tokens: int) -> tuple[float, ...]:
    """Tokens/s by γ. Many streams see all of a text's kinds in a part of the time: what is far behind by then is left
    at what it was."""
    simulations = [simulation(gamma) for gamma in range(MAX_DRAFT_TOKENS + 1)]
    first_tokens = num_tokens if cell.batch == 1 else round(TRIED_SHARE * num_tokens)
    outcomes = [[one.run(first_tokens)] for one in simulations]
    best = max(first.tokens_per_s for (first,) in outcomes)
    for one, told in zip(simulations, outcomes, strict=True):
        if num_tokens > first_tokens and told[0].tokens_per_s > HOPELESS * best:
            told.append(one.run(num_tokens - first_tokens))
    return tuple(1000 * sum(o.num_tokens for o in told) / sum(o.ms for o in told) for told in outcomes)


def _in_order(function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], num_jobs: int, what: str) -> list[T]:
    """The results of all jobs, which are told while they go by."""
    found = []
    with ExitStack() as cleanup:
        if num_jobs == 1:
            results: Iterable[T] = itertools.starmap(function, jobs)
        else:
            pool = cleanup.enter_context(ProcessPoolExecutor(num_jobs))
            results = pool.map(function, *zip(*jobs, strict=True))
        for result in results:
            found.append(result)
            if len(found) % TELL_EVERY == 0 or len(found) == len(jobs):
                err.print(f"{what}: {len(found)} of {len(jobs)}", style="dim")
    return found


def measure_all(cells: Iterable[Cell], num_seeds: int, num_tokens: int, num_jobs: int = 1) -> dict[Cell, list[Figures]]:
    """num_tokens: of a stream alone."""
    jobs = [(cell, seed, num_tokens // (1, 2, 4)[min(2, cell.batch.bit_length() // 3)]) for cell in cells
            for seed in range(num_seeds)]  # fmt: skip
    jobs.sort(key=lambda job: -job[0].batch)  # the dear ones first
    found: dict[Cell, list[Figures]] = {cell: [] for cell, _, _ in jobs}
    for (cell, _, _), figures in zip(jobs, _in_order(measure, jobs, num_jobs, "cells"), strict=True):
        found[cell].append(figures)
    return found


def fixed_row(found: dict[Cell, list[Figures]]) -> dict[str, Any]:
    """Against the best fixed γ in hindsight: means over seeds of its loss, on each seed against the γ that was best on
    that very text with those very coins. That γ was lucky there; so beside it the loss to the one γ that is best over
    all seeds, and what the γ that is best on the other seeds loses by the same measure: noise of the comparison."""
    losses = {cell: mean(f.loss for f in figures) for cell, figures in found.items()}
    worst = max(losses, key=losses.__getitem__)
    return {
        "worst_loss": losses[worst],
        "bar": MAX_LOSS,
        "reached": losses[worst] <= MAX_LOSS,
        "worst_cell": str(worst),
        "worst_loss_to_one_gamma": max(loss_to_one_gamma(figures) for figures in found.values()),
        "worst_loss_of_a_seed": max(f.loss for figures in found.values() for f in figures),
        "mean_loss": mean(losses.values()),
        "worst_noise": max(noise(figures) for figures in found.values()),
        "mean_noise": mean(noise(figures) for figures in found.values()),
        "num_cells": len(losses),
        "num_cells_missed": sum(loss > MAX_LOSS for loss in losses.values()),
    }


def loss_to_one_gamma(figures: Sequence[Figures]) -> float:
    """Of the mean speed over seeds, to that of the best γ for all of them."""
    return 1 - mean(f.chosen for f in figures) / max(map(mean, zip(*(f.fixed for f in figures), strict=True)))


def noise(figures: Sequence[Figures]) -> float:
    """Mean loss of the γ that is best on the other seeds to the best on the seed at hand; 0 of one seed."""
    losses = []
    for f in figures:
        others = [other.fixed for other in figures if other is not f] or [f.fixed]
        means = [mean(rates) for rates in zip(*others, strict=True)]
        losses.append(1 - f.fixed[means.index(max(means))] / f.best)
    return mean(losses)


def changing_row(found: dict[Cell, list[Figures]]) -> dict[str, Any]:
    """Texts that change, one stream: means over round trips and seeds."""
    gains: dict[str, list[float]] = {kind: [] for kind in CHANGING}
    for cell, figures in found.items():
        if cell.batch == 1 and cell.kind in CHANGING and cell.rtt_ms <= MAX_CHANGING_RTT_MS:
            gains[cell.kind].append(mean(f.chosen / f.best - 1 for f in figures))
    if not all(gains.values()):
        return {"gain": None, "bar": MIN_CHANGING_GAIN, "reached": None}
    gain = mean(itertools.chain(*gains.values()))
    by_kind = {kind: mean(values) for kind, values in gains.items()}
    return {"gain": gain, "bar": MIN_CHANGING_GAIN, "reached": gain >= MIN_CHANGING_GAIN, "by_text": by_kind}


def clairvoyant_row(found: dict[Cell, list[Figures]]) -> dict[str, Any]:
    """How much faster knowing each place's chance of acceptance would be, one stream."""
    ratios = {
        cell: mean(f.clairvoyant / f.chosen for f in figures if f.clairvoyant)
        for cell, figures in found.items()
        if cell.batch == 1
    }
    if not ratios:
        return {"worst_ratio": None, "bar": MAX_CLAIRVOYANT_RATIO, "reached": None}
    worst = max(ratios, key=ratios.__getitem__)
    reached = ratios[worst] <= MAX_CLAIRVOYANT_RATIO
    return {"worst_ratio": ratios[worst], "bar": MAX_CLAIRVOYANT_RATIO, "reached": reached, "worst_cell": str(worst)}


@dataclass(frozen=True, slots=True)
class Step:
    """A change of world or text, and what it was before."""

    name: str
    before: tuple[World, float]
    after: tuple[World, float]
    """(costs, chance of acceptance)."""


def steps() -> list[Step]:
    near, far, slow = (lambda: World(draft_rtt_ms=1.0)), World(draft_rtt_ms=80.0), Line(29.0, 1.0)
    return [
        Step("RTT 1 to 80 ms, acceptance .9", (near(), 0.9), (far, 0.9)),
        Step("RTT 1 to 80 ms, acceptance .8", (near(), 0.8), (far, 0.8)),
        Step("drafts 10x slower", (near(), 0.8), (World(draft_rtt_ms=1.0, draft=slow), 0.8)),
        Step("acceptance .9 to .3", (near(), 0.9), (near(), 0.3)),
        Step("acceptance .9 to .3, RTT 20 ms", (World(draft_rtt_ms=20.0), 0.9), (World(draft_rtt_ms=20.0), 0.3)),
    ]


def settling(step: Step, seed: int, num_tokens: int = 3000) -> list[dict[str, float]]:
    """There and back: rounds, and tokens, until the choices of 8 rounds in a row are expected to commit 95% of what the
    best γ does; infinite where they never do."""
    rounds: list[RoundReport] = []
    world = World()
    texts = {chance: Text(constant(chance), seed=seed) for chance in (step.before[1], step.after[1])}
    simulation = Simulation(
        world, [texts[step.before[1]]], adaptive(PairEstimates()), seed=seed, on_round=rounds.append
    )
    told = []
    for now, (costs, chance) in enumerate((step.before, step.after, step.before)):
        world.draft_rtt_ms, world.draft = costs.draft_rtt_ms, costs.draft
        simulation.read([texts[chance]])
        rounds.clear()
        simulation.run(num_tokens)
        if now:
            told.append(_settled(rounds, costs, chance))
    return told


def _settled(rounds: list[RoundReport], world: World, chance: float) -> dict[str, float]:
    def expected(report: RoundReport) -> tuple[float, float]:
        gamma = report.choice.num_draft_tokens
        if gamma:
            return sum(chance**i for i in range(gamma + 1)), unloaded_ms(world, gamma)
        start_ms = world.target_rtt_ms + world.overhead_ms
        return report.num_committed, report.num_committed * unloaded_ms(world, 0) + start_ms

    def rate(gamma: int) -> float:
        return sum(chance**i for i in range(gamma + 1)) / unloaded_ms(world, gamma)

    best = max(map(rate, range(MAX_DRAFT_TOKENS + 1)))
    pairs = [expected(report) for report in rounds]
    for first in range(len(pairs) - SETTLED_ROUNDS + 1):
        tokens, ms = map(sum, zip(*pairs[first : first + SETTLED_ROUNDS], strict=True))
        if tokens / ms >= SETTLED_SHARE * best:
            return {"rounds": first, "tokens": sum(report.num_committed for report in rounds[:first])}
    return {"rounds": math.inf, "tokens": math.inf}


def steps_row(num_seeds: int, num_jobs: int = 1) -> dict[str, Any]:
    """Bounded is the way there; the way back begins where nothing is drafted, and has to be noticed first."""
    there: dict[str, float] = {}
    back: dict[str, float] = {}
    jobs = [(step, seed) for step in steps() for seed in range(num_seeds)]
    settled = _in_order(settling, jobs, num_jobs, "settling")
    for i, step in enumerate(steps()):
        told = settled[i * num_seeds : (i + 1) * num_seeds]
        there[step.name] = max(change["rounds"] for change, _ in told)
        back[step.name] = max(change["tokens"] for _, change in told)
    slowest = max(there.values())
    reached = slowest <= MAX_SETTLING_ROUNDS and max(back.values()) < math.inf
    return {
        "rounds": slowest, "bar": MAX_SETTLING_ROUNDS, "reached": reached, "by_step": there,
        "tokens_until_it_returns": back,
    }  # fmt: skip


def goodput(kind: str, num_streams: int, seed: int, stream_tokens: int) -> float:
    """The controller's over that of γ = 0."""
    chosen, plain = (
        Simulation(World(), [Text(TEXTS[kind], seed=seed)], policy, num_streams=num_streams, seed=seed,
                   stream_tokens=stream_tokens).run(num_streams * stream_tokens)
        for policy in (adaptive(PairEstimates()), fixed(0))
    )  # fmt: skip
    return chosen.tokens_per_s / plain.tokens_per_s


def goodput_row(
    num_seeds: int, stream_tokens: int, concurrencies: Iterable[int] = CONCURRENCIES, num_jobs: int = 1
) -> dict[str, Any]:
    """Against γ = 0 at every load."""
    cells = [(kind, streams) for kind in ("0.5", "0.8", "two-regime") for streams in concurrencies]
    jobs = [(*cell, seed, stream_tokens) for cell in cells for seed in range(num_seeds)]
    ratios = _in_order(goodput, jobs, num_jobs, "goodput")
    gains = {
        f"{kind}, {streams} streams": mean(ratios[i * num_seeds : (i + 1) * num_seeds])
        for i, (kind, streams) in enumerate(cells)
    }
    where = min(gains, key=gains.__getitem__)
    worst = gains[where]
    return {"worst": worst, "bar": MIN_GOODPUT, "reached": worst >= MIN_GOODPUT, "worst_cell": where, "gains": gains}


def rows(
    found: dict[Cell, list[Figures]], num_seeds: int, stream_tokens: int, num_jobs: int
) -> dict[str, dict[str, Any]]:
    """Those that are simulated, by name."""
    return {
        "gamma_vs_best_fixed": fixed_row(found),
        "gain_on_changing_texts": changing_row(found),
        "clairvoyant_vs_gamma": clairvoyant_row(found),
        "settling": steps_row(num_seeds, num_jobs),
        "goodput_vs_plain": goodput_row(num_seeds, stream_tokens, num_jobs=num_jobs),
    }


def timed_rows() -> dict[str, dict[str, Any]]:
    """Through real services on toy models."""
    import draft_ahead
    import simulator_check

    return asyncio.run(simulator_check.figures()) | asyncio.run(draft_ahead.figures())


def print_cells(found: dict[Cell, list[Figures]]) -> None:
    for cell in sorted(found, key=lambda cell: (cell.batch, cell.kind, cell.rtt_ms)):
        figures = found[cell]
        best, chosen, loss = (mean(getattr(f, name) for f in figures) for name in ("best", "chosen", "loss"))
        rates = [mean(of_seeds) for of_seeds in zip(*(f.fixed for f in figures), strict=True)]
        knows = [f.clairvoyant for f in figures if f.clairvoyant]
        known = f", knowing the text {mean(knows):8.1f}" if knows else ""
        print(
            f"{cell!s:36} best fixed γ {rates.index(max(rates)):2}: {best:8.1f} tokens/s, "
            f"chosen {mean(f.mean_gamma for f in figures):4.1f}: {chosen:8.1f} "
            f"({-100 * loss:+5.1f}%, noise {100 * noise(figures):.1f}%){known}"
        )


def main() -> None:
    with reporting_errors():
        num_seeds, num_tokens = number("SEEDS", 8), number("TOKENS", 4000)
        rtts, batches = (
            reals("RTTS", ",".join(map(str, RTTS_MS))),
            whole_numbers("BATCHES", ",".join(map(str, BATCHES))),
        )
        cells = [Cell(rtt, batch, kind) for batch in batches for kind in TEXTS for rtt in rtts]
        num_jobs = number("JOBS", os.cpu_count() or 1)
        found = measure_all(cells, num_seeds, num_tokens, num_jobs)
        print("SIMULATED workers, networks and texts; the controller is the coordinator's own")
        print_cells(found)
        result = rows(found, num_seeds, num_tokens // 8, num_jobs)
        if text("SERVICES", "1") != "0":
            result |= timed_rows()
        for name, row in result.items():
            reached = {True: "reached", False: "NOT reached", None: "not measured"}[row.get("reached")]
            print(
                f"{name}: {reached}: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "reached")
            )
        print_json(result)


if __name__ == "__main__":
    main()
