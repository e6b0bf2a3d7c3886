"""The simulator beside the real services, on toy models with slept costs: tokens/s of a stream, setting by setting.

One stream at γ = 0 and 4 tells what passes, drafts and networks take here, as its step reports give them. With these
costs other γ, other loads and the controller are simulated, and measured through three processes with a relay of 5 ms
before the draft worker. Each is simulated with the acceptance that its own rounds showed, so that the luck of few draws
is not taken for an error. The simulated figure is to lie within 10% of the measured one; a busy machine spoils it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from draft_ahead import BLOCK, Setting, acceptance, agreement_for, draft_of, services

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.shared import PairEstimates
from coordinator.simulator.engine import Line
from coordinator.simulator.simulation import Simulation
from coordinator.simulator.texts import Text, constant
from coordinator.simulator.world import World
from outrider.cli.console import err, print_json
from outrider.cli.measure import steps_of
from outrider.results import Completion, Step
from outrider.settings import CoordinatorSettings

RTT_MS = 5.0
MAX_DIFFERENCE = 0.1
NUM_TOKENS = 256
CALIBRATION_GAMMAS = (0, 4)
MAX_DRAFT_TOKENS = CoordinatorSettings.model_fields["max_speculative_tokens"].default


@dataclass(frozen=True, slots=True)
class Case:
    """gamma: None for the controller."""

    gamma: int | None
    num_streams: int = 1

    def __str__(self) -> str:
        return f"γ {'adaptive' if self.gamma is None else self.gamma}, {self.num_streams} streams"


CASES = (Case(0), Case(2), Case(8), Case(None), Case(0, 4), Case(4, 4), Case(None, 4))


async def measured(client: Any, case: Case, seed: int, num_tokens: int) -> list[Completion]:
    options: dict[str, Any] = {} if case.gamma is None else {"num_speculative_tokens": case.gamma}
    return list(
        await asyncio.gather(
            *(
                client.complete(
                    [1, 2 + stream, 3 + seed], seed=100 * seed + stream, max_tokens=num_tokens, acceptance=BLOCK,
                    report_steps=True, drafter="auto" if case.gamma is None else "model", **options,
                )
                for stream in range(case.num_streams)
            )
        )
    )  # fmt: skip


def costs_of(steps: Sequence[Step]) -> World:
    """From rounds of two γ of one stream alone: means, since a rate is made of all rounds, the slow ones too."""
    rounds = [step for step in steps if step.reason != "prefill"]
    few, many = CALIBRATION_GAMMAS
    verify = {gamma: fmean(s.verify_ms for s in rounds if s.num_draft_tokens == gamma) for gamma in (few, many)}
    drafted = [step for step in rounds if step.num_draft_tokens == many]
    row_ms = max(0.0, (verify[many] - verify[few]) / (many - few))
    draft_ms = fmean(step.draft_ms / many for step in drafted)
    network_ms = fmean(step.network_ms for step in drafted)
    known = (step.round_ms - step.draft_ms - step.verify_ms - step.network_ms - step.queue_ms for step in drafted)
    return World(
        target=Line(verify[few] - row_ms, row_ms),
        # the toy's own: one stream says nothing of another one's row
        draft=Line(draft_ms - 0.1, 0.1),
        draft_rtt_ms=min(network_ms, RTT_MS),
        target_rtt_ms=max(0.0, network_ms - RTT_MS),
        overhead_ms=max(0.0, fmean(known)),
    )


def simulated(world: World, case: Case, chance: float) -> float:
    """tokens/s of a stream."""
    shared = PairEstimates()
    simulation = Simulation(
        world,
        [Text(constant(chance))],
        lambda *_: AdaptiveGamma(shared, MAX_DRAFT_TOKENS) if case.gamma is None else FixedGamma(case.gamma),
        num_streams=case.num_streams,
        stream_tokens=NUM_TOKENS,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )
    simulation.run(case.num_streams * NUM_TOKENS)
    return simulation.run(12 * case.num_streams * NUM_TOKENS).tokens_per_s / case.num_streams


def realised(steps: Sequence[Step]) -> float:
    """Chance of a draft once those before it were accepted: accepted / (accepted + rounds that rejected); 0 without
    drafts."""
    pairs = [(step.num_draft_tokens, step.num_accepted_draft_tokens) for step in steps]
    num_accepted = sum(accepted for _, accepted in pairs)
    num_judged = num_accepted + sum(accepted < drafted for drafted, accepted in pairs)
    return num_accepted / num_judged if num_judged else 0.0


def rate(answers: Sequence[Completion]) -> float:
    """tokens/s of a stream, first tokens apart."""
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return 1000 * num_tokens / sum(a.timings.total_ms - a.timings.time_to_first_token_ms for a in answers)


async def figures(
    *, num_repeats: int = 3, num_tokens: int = NUM_TOKENS, cases: Sequence[Case] = CASES
) -> dict[str, Any]:
    """One row: the largest difference of all cases, and each."""
    agreement = agreement_for(0.8, BLOCK)
    setting = Setting("synchronous", RTT_MS, "off")
    runs: dict[Case, list[Completion]] = {case: [] for case in cases}
    calibration: list[Completion] = []
    async with services(draft_of(agreement), [setting]):
        for repeat in range(num_repeats + 1):
            for gamma in CALIBRATION_GAMMAS:
                calibration += await measured(setting.client, Case(gamma), repeat, num_tokens // 2)
            for case in cases:
                answers = await measured(setting.client, case, repeat, num_tokens)
                if repeat:
                    runs[case] += answers
    world = costs_of(steps_of(calibration))
    err.print(f"{world}, acceptance {acceptance(agreement, BLOCK):.3f}", style="dim", markup=False)
    differences = {}
    for case in cases:
        chance = realised(steps_of(runs[case])) or acceptance(agreement, BLOCK)
        told, seen = simulated(world, case, chance), rate(runs[case])
        differences[str(case)] = told / seen - 1
        err.print(f"{case}: simulated {told:.1f}, measured {seen:.1f} tokens/s, acceptance {chance:.3f}", markup=False)
    num_drafted = sum(answer.speculation.num_draft_tokens for answers in runs.values() for answer in answers)
    worst = max(map(abs, differences.values()))
    reached = worst <= MAX_DIFFERENCE if num_drafted else None
    row = {"value": worst, "bar": MAX_DIFFERENCE, "reached": reached, "by_case": differences}
    return {"simulator_vs_services": row}


if __name__ == "__main__":
    print_json(asyncio.run(figures()))
