"""The exact law of what the coordinator's own round loop commits, by running it along every possible path.

The loop, its policy and its local drafters are the shipped ones. The draft worker and the target are replaced by
question marks: whenever the loop asks one of them for something random, the run ends there and is begun anew once for
each possible answer, with its probability. What is summed over all paths is the joint law of the text over all rounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asking_workers import Ask, FakeDraft, FakeTarget, Ids, Pair, Script

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.local_drafts import LocalDrafts, LocalMemory
from coordinator.request import ResolvedRequest
from coordinator.round_loop import RoundLoop
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.settings import CoordinatorSettings

MODEL = Candidate("model")
SETTINGS = CoordinatorSettings()
"""Read once: reading them for every path took two thirds of the time."""


def warm_policy(
    *, draft_ms: float, verify_ms: float = 10.0, row_ms: float = 0.1, accept: int = 1, cap: int = 2
) -> GammaPolicy:
    """An adaptive controller that has seen these costs, and `accept` of 2 drafts accepted in its first rounds."""
    policy = AdaptiveGamma(PairEstimates(), cap)
    for _ in range(4):
        policy.observe(
            RoundReport(
                choice=Choice("model", 2, "warm-up", candidate=MODEL),
                num_draft_tokens=2, num_accepted=accept, num_committed=accept + 1,
                draft_ms=2 * draft_ms, verify_ms=verify_ms + 2 * row_ms, round_ms=2 * draft_ms + verify_ms + 2 * row_ms,
            )
        )  # fmt: skip
        policy.observe(
            RoundReport(
                choice=Choice("", 0, "best"), num_committed=4, verify_ms=4 * verify_ms, round_ms=4 * verify_ms + 0.5
            )
        )
    return policy


@dataclass
class World:
    """One loop under test, in everything that is not random.

    past, corrections: what earlier streams left. `make_loop` may be a biased twin of the round loop, `make_draft`
    another drafter, or one that lies.
    """

    pair: Pair
    rule: AcceptanceRule
    policy: Callable[[], GammaPolicy]
    prompt: Ids = (0, 1, 0, 1, 1, 0, 1)
    num_tokens: int = 3
    drafter: str = ""
    max_drafts: int = 2
    fixed: int | None = None
    drafters: tuple[str, ...] = ("model",)
    inside: tuple[Candidate, ...] = ()
    is_late: Callable[[int], bool] = lambda length: False
    past: Sequence[Ids] = ()
    corrections: Sequence[tuple[Ids, int]] = ()
    make_loop: type[RoundLoop] = RoundLoop
    make_draft: type[FakeDraft] = FakeDraft
    reasons: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    num_mixed: int = 0
    """Chains that a local drafter went on with."""
    num_trees: int = 0
    """Those that the target drew."""

    def law(self) -> dict[Ids, float]:
        """P(text), over all rounds, by exhaustion."""
        return asyncio.run(self._law())

    def target_law(self) -> dict[Ids, float]:
        law: dict[Ids, float] = {(): 1.0}
        for _ in range(self.num_tokens):
            law = {
                (*text, x): mass * float(chance)
                for text, mass in law.items()
                for x, chance in enumerate(self.pair.p((*self.prompt, *text)))
            }
        return law

    async def _law(self) -> dict[Ids, float]:
        law: dict[Ids, float] = defaultdict(float)
        paths: list[tuple[list[Any], float]] = [([], 1.0)]
        while paths:
            answers, mass = paths.pop()
            try:
                law[await self._run(answers)] += mass
            except Ask as ask:
                paths += [([*answers, answer], mass * chance) for answer, chance in ask.answers if chance > 0]
        return dict(law)

    async def _run(self, answers: list[Any]) -> Ids:
        request = ResolvedRequest(
            request_id="r",
            model="toy",
            prompt_ids=self.prompt,
            prompt_hash=hash_ids(self.prompt),
            sampling=SamplingParams(acceptance=self.rule),
            stopping=StoppingParams(self.num_tokens),
            num_speculative_tokens=self.fixed,
            max_speculative_tokens=self.max_drafts,
            drafter=self.drafter,
            has_fresh_seed=True,
            report_steps=True,
        )
        stream = Stream(request, 0, ToyCodec(self.pair.vocab_size))
        memory = LocalMemory(SETTINGS)
        for text in self.past:
            memory.past.add(memory.scope(stream), text)
        for context, token_id in self.corrections:
            memory.corrections.learn(memory.scope(stream), context, token_id)
        script = Script(answers)
        draft = self.make_draft(stream, self.pair, script, self.is_late, self.drafter in ("", "model"), self.drafters)
        target = FakeTarget(stream, self.pair, script, self.rule, self.inside)
        local, outbox, policy = LocalDrafts(stream, memory), _Steps(), Timeless(self.policy())
        loop: Any = self.make_loop(stream, target, draft, local, policy, outbox, 0.0)  # type: ignore[arg-type]
        await loop.run()
        for reason in outbox.reasons:
            self.reasons[reason] += 1
        self.num_trees += target.num_trees
        self.num_mixed += draft.num_drafted > 0 and target.num_drafted > draft.num_drafted
        return tuple(stream.log.output_ids)


@dataclass
class Timeless:
    """A policy that is told the costs it knew already: a path's clock must not decide, or runs would differ."""

    policy: GammaPolicy

    def choose(self, *args: Any) -> Choice:
        return self.policy.choose(*args)

    def interrupts(self, guesses: Any) -> bool:
        return self.policy.interrupts(guesses)

    def num_continued(self, *args: Any) -> int:
        return self.policy.num_continued(*args)

    def outlooks(self) -> Any:
        return self.policy.outlooks()

    def observe(self, report: RoundReport) -> None:
        num = max(1, report.num_committed) if not report.choice.num_draft_tokens else 1
        self.policy.observe(dataclasses.replace(report, draft_ms=0.5, verify_ms=10.0 * num, round_ms=10.5 * num))


class _Steps:
    """An outbox that always has room."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []

    async def room(self, choice: int) -> int:
        return 8

    def put(self, event: Any) -> None:
        step = getattr(event, "step", None)
        if step is not None and step.num_draft_tokens:
            self.reasons.append((step.drafter, step.reason))


def total_variation(a: dict[Ids, float], b: dict[Ids, float]) -> float:
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b}) / 2
