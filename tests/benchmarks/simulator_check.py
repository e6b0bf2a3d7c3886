"""The simulator beside the real services, on toy models with slept costs: tokens/s of a stream, setting by setting.

What the simulator is given is what a user would give it, measured and never a toy's parameters: what passes take, by
rows and load, is what both workers tell of themselves; what messages take (coordinator, gRPC, processes that share this
machine) is what step reports leave unexplained, at the same number of streams. Both are taken from calibrating runs at
γ = 0 and 4; then other γ and the controller are simulated, and measured through three processes with a relay of 10 ms
before the draft worker, on demand and drafted ahead of the verdict. Each is simulated with the acceptance and the share
of branch hits that its own rounds showed, so that the luck of few draws is not taken for an error, and with a
controller that knows what the real one does: seeded streams learn from no other.

Passes are twice as long as in the other figures, so that a busy machine's noise is a smaller part of them. The
simulated figure is to lie within 10% of the measured one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any

from draft_ahead import SCALE, VOCAB, Setting, acceptance, agreement_for, services

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, GammaPolicy
from coordinator.gamma.shared import SharedEstimates
from coordinator.gamma.told import tell
from coordinator.simulator.measured import MeasuredCost
from coordinator.simulator.planning import NUM_BRANCHES
from coordinator.simulator.simulation import MODEL, Simulation
from coordinator.simulator.texts import Text, constant
from coordinator.simulator.world import World
from outrider.cli.bench_profile import profile
from outrider.cli.console import err, print_json
from outrider.cli.measure import steps_of
from outrider.results import Completion, Step
from outrider.serving.channel import open_channel
from outrider.serving.worker_calls import WorkerDescription, describe
from outrider.settings import CoordinatorSettings

TARGET = f"toy:vocab={VOCAB},seed=1,scale={SCALE},pass_ms=60,token_ms=0.6"
DRAFT = f"toy:vocab={VOCAB},seed=1,scale={SCALE},pass_ms=5.8,token_ms=0.2"
AHEAD = Candidate("model", max_branches=NUM_BRANCHES)
"""A fixed γ does not say what a branch is worth: all are whole."""
TOKEN = "token"
"""Under which each draft is accepted by itself, as in simulated texts."""
RTT_MS = 10.0
ACCEPTANCE, MAX_DIFFERENCE = 0.8, 0.1
NUM_TOKENS = 192
PROMPT_TOKENS = 3
CALIBRATION_GAMMAS = (0, 4)
MAX_DRAFT_TOKENS = CoordinatorSettings.model_fields["max_speculative_tokens"].default


@dataclass(frozen=True, slots=True)
class Case:
    """gamma: None for the controller."""

    gamma: int | None
    num_streams: int = 1
    drafts_ahead: bool = False

    def __str__(self) -> str:
        ahead = ", ahead" if self.drafts_ahead else ""
        return f"γ {'adaptive' if self.gamma is None else self.gamma}, {self.num_streams} streams{ahead}"


CASES = (
    Case(2), Case(8), Case(None), Case(2, 4), Case(8, 4), Case(None, 4), Case(2, 1, True), Case(5, 1, True),
)  # fmt: skip


async def measured(client: Any, case: Case, seed: int, num_tokens: int) -> list[Completion]:
    options: dict[str, Any] = {} if case.gamma is None else {"num_speculative_tokens": case.gamma}
    return list(
        await asyncio.gather(
            *(
                client.complete(
                    [1, 2 + stream, 3 + seed], seed=100 * seed + stream, max_tokens=num_tokens, acceptance=TOKEN,
                    report_steps=True, drafter="auto" if case.gamma is None else "model", **options,
                )
                for stream in range(case.num_streams)
            )
        )
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """workers: as they described themselves after the calibrating runs. steps: their rounds, by streams at once."""

    workers: Sequence[WorkerDescription]
    steps: dict[int, list[Step]]

    def world(self, num_streams: int, branch_survival: float = 0.0) -> World:
        """Means of messages, since a rate is made of all rounds, the slow ones too."""
        rounds = [step for step in self.steps[num_streams] if step.num_draft_tokens]
        rest_ms = fmean(s.round_ms - s.draft_ms - s.verify_ms - s.queue_ms - s.network_ms for s in rounds)
        target, draft = (MeasuredCost(worker.timings) for worker in self.workers)
        return World(
            target=target,
            draft=draft,
            draft_rtt_ms=fmean(step.draft_network_ms for step in rounds),
            target_rtt_ms=fmean(step.network_ms - step.draft_network_ms for step in rounds),
            overhead_ms=max(0.0, rest_ms),
            context_tokens=PROMPT_TOKENS,
            branch_survival=branch_survival,
        )

    @property
    def spread(self) -> float:
        """Of the chances of acceptance around their mean, as of a beta distribution."""
        told = [byte / 255 for steps in self.steps.values() for step in steps for byte in step.soft_acceptances]
        mean = fmean(told)
        return pvariance(told, mean) / (mean * (1 - mean))


def simulated(calibration: Calibration, case: Case, chance: float, branch_survival: float) -> float:
    """tokens/s of a stream."""
    estimates = SharedEstimates()

    def policy(*_: Any) -> GammaPolicy:
        if case.gamma is not None:
            return FixedGamma(case.gamma, drafts_ahead=case.drafts_ahead)
        apart = estimates.apart("")
        for worker in calibration.workers:
            tell(apart, worker, num_context_tokens=PROMPT_TOKENS)
        return AdaptiveGamma(apart, MAX_DRAFT_TOKENS, draft_ahead="off", ends_chains=False)

    simulation = Simulation(
        calibration.world(case.num_streams, branch_survival),
        [Text(constant(chance), spread=calibration.spread)],
        policy,
        num_streams=case.num_streams,
        stream_tokens=NUM_TOKENS,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        candidates=(AHEAD if case.drafts_ahead else MODEL,),
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


def survival(steps: Sequence[Step]) -> float:
    """Chance of each draft to leave its round an outcome with a branch; 0: nothing was drafted ahead."""
    ahead = profile(steps)["ahead"]
    return float(ahead["hit_rate"] ** (1 / max(1.0, ahead["mean_num_draft_tokens"])))


def rate(answers: Sequence[Completion]) -> float:
    """tokens/s of a stream, first tokens apart."""
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return 1000 * num_tokens / sum(a.timings.total_ms - a.timings.time_to_first_token_ms for a in answers)


async def calibrated(setting: Setting, addresses: Sequence[str], loads: Sequence[int], num_tokens: int) -> Calibration:
    steps = {}
    for load in loads:
        found: list[Completion] = []
        for gamma in CALIBRATION_GAMMAS:
            for seed in range(90, 92):
                found += await measured(setting.client, Case(gamma, load), seed, num_tokens)
        steps[load] = [step for step in steps_of(found) if step.reason != "prefill"]
    workers = []
    for address in addresses:
        async with open_channel(address) as channel:
            workers.append(await describe(channel, without_tokenizer=True, timeout_s=10.0))
    return Calibration(workers, steps)


async def figures(
    *, num_repeats: int = 3, num_tokens: int = NUM_TOKENS, cases: Sequence[Case] = CASES
) -> dict[str, Any]:
    """Two rows, on demand and ahead: the largest difference of all cases, and each."""
    agreement = agreement_for(ACCEPTANCE, TOKEN)
    setting, ahead = Setting("synchronous", RTT_MS, "off"), Setting("ahead", RTT_MS, "on")
    runs: dict[Case, list[Completion]] = {case: [] for case in cases}
    loads = sorted({case.num_streams for case in cases})
    async with services(f"{DRAFT},agreement={agreement:.4f}", [setting, ahead], target_model=TARGET) as addresses:
        calibration = await calibrated(setting, addresses, loads, num_tokens)
        for seed in range(num_repeats):
            for case in cases:
                client = ahead.client if case.drafts_ahead else setting.client
                runs[case] += await measured(client, case, seed, num_tokens)
    for load in loads:
        err.print(f"{load} streams: {calibration.world(load)}", style="dim", markup=False)
    differences = {}
    for case in cases:
        steps = steps_of(runs[case])
        chance, survives = realised(steps) or acceptance(agreement, TOKEN), survival(steps)
        told, seen = simulated(calibration, case, chance, survives), rate(runs[case])
        differences[str(case)] = told / seen - 1
        hits = f", branch survival {survives:.3f}" if case.drafts_ahead else ""
        err.print(
            f"{case}: simulated {told:.1f}, measured {seen:.1f} tokens/s, acceptance {chance:.3f}{hits}", markup=False
        )
    num_drafted = sum(answer.speculation.num_draft_tokens for answers in runs.values() for answer in answers)
    found = {}
    for name, drafts_ahead in (("simulator_vs_services", False), ("simulator_vs_services_ahead", True)):
        here = {str(case): differences[str(case)] for case in cases if case.drafts_ahead == drafts_ahead}
        worst = max(map(abs, here.values()), default=0.0)
        reached = worst <= MAX_DIFFERENCE if num_drafted and here else None
        found[name] = {"value": worst, "bar": MAX_DIFFERENCE, "reached": reached, "by_case": here}
    return found


if __name__ == "__main__":
    print_json(asyncio.run(figures()))
