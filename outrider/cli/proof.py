"""The proof that `outrider verify` runs: what is asked of the services, and how the verdict follows from it.

A client and the target's distributions go in, a report comes out; no model is loaded and no process started here.
Tokens are counted only in rounds that checked a draft. Which rounds those are is decided before their tokens are
drawn, so that given its prefix each counted token still follows the target's distribution.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.cli.console import OnProgress
from outrider.cli.law import LawTest, alarm, detectable_shift
from outrider.client import Client, GenerateOptions, Prompt
from outrider.results import Completion, Step
from outrider.sampling.params import AcceptanceRule
from outrider.server_info import ModelInfo

Distributions = Callable[[Sequence[int], Sequence[int]], list[np.ndarray]]
FALSE_ALARM_RATE = 1e-6
FIRST_COUNTED, LAST_COUNTED = 1, 3
"""Output indices of the counted tokens: the 2nd to the 4th."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    gammas: tuple[int, ...] = (1, 3, 5)
    max_tokens: int = 32
    num_samples: int = 150
    law_gamma: int = 3
    temperature: float = 1.0
    concurrency: int = 8
    seed: int = 0


@dataclass(slots=True)
class Equality:
    """Texts that had to be the same with and without speculation."""

    name: str
    num_texts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    differences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Law:
    """Tokens of one rule against the target's distribution."""

    name: str
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_impossible: int = 0
    p_uniform: float = 1.0
    p_rank: float = 1.0
    conclusive: bool = False
    detectable_shift: float = 1.0
    """The smallest total variation from the target's law that these tokens show with a power of 0.9, about."""
    ranks: list[tuple[str, float, float]] = field(default_factory=list)
    """(ranks by probability, tokens observed, tokens expected)."""


@dataclass(slots=True)
class Report:
    """Everything found, and the verdict with its reasons."""

    model: str
    draft_model: str
    simulated: bool
    seed: int
    equalities: list[Equality] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    false_alarm_rate: float = FALSE_ALARM_RATE
    seconds: float = 0.0
    verdict: str = ""
    reasons: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Verdict and sums first, then the parts they come from."""
        values = dataclasses.asdict(self)
        return {
            "verdict": values.pop("verdict"),
            "samples": sum(law.num_tokens for law in self.laws),
            "drafted": sum(row.num_drafted for row in self.equalities) + sum(law.num_drafted for law in self.laws),
            "p_values": {law.name: {"uniform": law.p_uniform, "rank": law.p_rank} for law in self.laws},
            **values,
        }

    def judge(self) -> None:
        """BROKEN on any proof of loss, INCONCLUSIVE where a part checked no draft or too few tokens, else LOSSLESS."""
        broken, unclear = [], []
        num_tests = 2 * len(self.laws)
        for row in self.equalities:
            if row.differences:
                broken.append(f"{row.name}: {len(row.differences)} of {row.num_texts} texts differ")
            if not row.num_drafted:
                unclear.append(f"{row.name}: nothing was drafted, so nothing was tested")
        for law in self.laws:
            law.detectable_shift = detectable_shift(law.num_tokens, num_tests, self.false_alarm_rate)
            if law.num_impossible:
                broken.append(f"{law.name}: {law.num_impossible} tokens that the target gives probability 0")
            for test, p_value in (("uniform", law.p_uniform), ("rank", law.p_rank)):
                if alarm(p_value, num_tests, self.false_alarm_rate):
                    broken.append(
                        f"{law.name}: sampled tokens do not follow the target's law ({test}, p = {p_value:.3g})"
                    )
            if not law.num_drafted:
                unclear.append(f"{law.name}: nothing was drafted, so nothing was tested")
            elif not law.conclusive:
                unclear.append(f"{law.name}: only {law.num_tokens} tokens were counted; raise --samples")
        self.verdict = "BROKEN" if broken else "INCONCLUSIVE" if unclear else "LOSSLESS"
        self.reasons = broken + unclear


async def prove(
    client: Client,
    info: ModelInfo,
    distributions: Distributions,
    *,
    greedy_prompts: Sequence[Prompt],
    sampling_prompts: Sequence[Sequence[int]],
    plan: Plan,
    on_progress: OnProgress = lambda text, fraction: None,
) -> Report:
    """Runs all parts. `distributions(prompt_ids, output_ids)` gives the target's own p for each output token."""
    started = time.monotonic()
    report = Report(info.model, info.draft_model, info.simulated, plan.seed)
    asker = _Asker(client, asyncio.Semaphore(plan.concurrency))
    num_parts = 5
    on_progress("greedy texts", 0.0)
    report.equalities += await _greedy(asker, info, greedy_prompts, plan)
    on_progress("coupled texts", 1 / num_parts)
    report.equalities.append(await _coupled(asker, sampling_prompts, plan))
    for index, rule in enumerate(AcceptanceRule):
        on_progress(f"sampled tokens, {rule.name}", (2 + index) / num_parts)
        report.laws.append(await _law(asker, rule, sampling_prompts, distributions, plan))
    report.seconds = time.monotonic() - started
    report.judge()
    return report


class _Asker:
    """Runs requests, a bounded number at once, all of them without the model's own stop tokens."""

    def __init__(self, client: Client, slots: asyncio.Semaphore) -> None:
        self._client = client
        self._slots = slots

    async def ask(self, prompt: Prompt, **options: Any) -> Completion:
        neutral: GenerateOptions = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        async with self._slots:
            return await self._client.complete(prompt, ignore_eos=True, report_steps=True, **{**neutral, **options})

    async def ask_all(self, requests: Iterable[Awaitable[Completion]]) -> list[Completion]:
        return list(await asyncio.gather(*requests))


async def _greedy(asker: _Asker, info: ModelInfo, prompts: Sequence[Prompt], plan: Plan) -> list[Equality]:
    def requests(**speculation: Any) -> list[Awaitable[Completion]]:
        return [asker.ask(p, temperature=0.0, max_tokens=plan.max_tokens, **speculation) for p in prompts]

    plain = await asker.ask_all(requests(num_speculative_tokens=0))
    rows = []
    for gamma in (g for g in plan.gammas if g <= info.max_speculative_tokens):
        speculative = await asker.ask_all(requests(num_speculative_tokens=gamma))
        rows.append(_compare(f"greedy, γ={gamma}", plain, speculative))
    return rows


async def _coupled(asker: _Asker, prompts: Sequence[Sequence[int]], plan: Plan) -> Equality:
    options = {"acceptance": "coupled", "temperature": plan.temperature, "max_tokens": plan.max_tokens}

    def requests(gamma: int) -> list[Awaitable[Completion]]:
        return [
            asker.ask(prompt, seed=plan.seed + index, num_speculative_tokens=gamma, **options)
            for index, prompt in enumerate(prompts)
        ]

    plain, speculative = await asker.ask_all(requests(0)), await asker.ask_all(requests(plan.law_gamma))
    return _compare(f"COUPLED sampling, γ={plan.law_gamma}", plain, speculative)


def _compare(name: str, plain: Sequence[Completion], speculative: Sequence[Completion]) -> Equality:
    row = Equality(name, num_texts=len(plain))
    for index, (expected, got) in enumerate(zip(plain, speculative, strict=True)):
        row.num_drafted += got.speculation.num_draft_tokens
        row.num_accepted += got.speculation.num_accepted_draft_tokens
        if expected.token_ids != got.token_ids or expected.text != got.text:
            pairs = zip(expected.token_ids, got.token_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.token_ids), len(got.token_ids)))
            row.differences.append(f"text {index} differs from output token {at} on")
    return row


async def _law(
    asker: _Asker,
    rule: AcceptanceRule,
    prompts: Sequence[Sequence[int]],
    distributions: Distributions,
    plan: Plan,
) -> Law:
    # The transform's own randomness must be independent of the noise that drew the tokens.
    test = LawTest(np.random.default_rng(np.random.SeedSequence([plan.seed, rule])))
    law = Law(rule.name)

    async def sample(index: int) -> None:
        prompt = prompts[index % len(prompts)]
        answer = await asker.ask(
            prompt,
            acceptance=rule,
            temperature=plan.temperature,
            seed=(plan.seed + (index << 8) + rule) % 2**64,
            max_tokens=LAST_COUNTED + 3,  # so that γ is not cut short by the end before the counted tokens
            num_speculative_tokens=plan.law_gamma,
        )
        positions: list[int] = []
        for first, num_tokens, step in _verified_rounds(answer):
            positions += range(max(first, FIRST_COUNTED), min(first + num_tokens, LAST_COUNTED + 1))
            law.num_drafted += step.num_draft_tokens
            law.num_accepted += step.num_accepted_draft_tokens
        if positions:
            output_ids = answer.token_ids[: positions[-1] + 1]
            ps = await asyncio.to_thread(distributions, prompt, output_ids)
            for position in positions:
                test.add(ps[position], output_ids[position])

    await asyncio.gather(*(sample(index) for index in range(plan.num_samples)))
    law.num_tokens, law.num_impossible, law.conclusive = test.num_tokens, test.num_impossible, test.conclusive
    law.p_uniform, law.p_rank, law.ranks = test.p_uniform(), test.p_rank(), test.ranks()
    return law


def _verified_rounds(answer: Completion) -> Iterator[tuple[int, int, Step]]:
    """(output index of its first token, tokens, step) of each round that checked drafts before LAST_COUNTED."""
    first = 0
    for chunk in answer.chunks:
        if chunk.step is not None and chunk.step.num_draft_tokens and first <= LAST_COUNTED:
            yield first, len(chunk.token_ids), chunk.step
        first += len(chunk.token_ids)
