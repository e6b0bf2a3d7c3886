"""γ and drafter that commit most tokens per second, plain decoding at its true cost among them.

rate(drafter, γ) = E[tokens | drafter, γ] / T(drafter, γ); rate(plain) = 1 / T(plain token). The best is taken. What is
not best is tried again whenever the time since its last try makes the expected loss a small share of that time: so no
choice is forever, and a hopeless one costs next to nothing.

A local guess is judged by its own tokens' chances, which are learnt whether it is used or not: it needs no tries. So a
merge is nothing but the better of the two plans at this very place, a guess with its match against the drafter with its
survival so far, and it is made before the drafter has drawn anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.gamma.estimates import PairEstimates, Survival
from coordinator.gamma.policy import Choice, RoundReport
from outrider.drafting.guess import Guess

PROBE_SHARE = 0.005
"""Of a stream's time that probes may lose, all together."""
MIN_PROBE_INTERVAL_TOKENS = 32
WARM_UP_ROUNDS = 2
WARM_UP_GAMMA = 4
PLAIN_PROBE_TOKENS = 4
MIN_PLAIN_RUN_TOKENS = 16
MIN_GUESS_GAIN = 1.03
"""Over plain decoding: a guess that promises less is not worth its rows."""
MIN_MS = 1e-6
PLAIN = ""
"""Name of plain decoding among the drafters."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a choice is expected to commit and to take."""

    drafter: str
    num_draft_tokens: int
    tokens: float
    ms: float
    reason: str = "best"

    @property
    def rate(self) -> float:
        return self.tokens / max(MIN_MS, self.ms)

    def loss_ms(self, best: _Plan) -> float:
        """Time lost when this is done once instead of the best."""
        return max(0.0, self.ms - self.tokens / best.rate)


@dataclass(slots=True)
class _LastTry:
    ms: float = 0.0
    tokens: int = 0


class AdaptiveGamma:
    """One stream's controller over the estimates that it shares with its neighbours."""

    def __init__(self, shared: PairEstimates, max_draft_tokens: int) -> None:
        self._shared = shared
        self._max_draft_tokens = max_draft_tokens
        self._survival: dict[str, Survival] = {}
        self._last_try: dict[str, _LastTry] = {}
        self._plan: _Plan | None = None
        self._ms = 0.0
        self._tokens = 0

    def choose(
        self, max_draft_tokens: int, max_credit_tokens: int, drafters: tuple[str, ...], guesses: tuple[Guess, ...] = ()
    ) -> Choice:
        cap = min(max_draft_tokens, self._max_draft_tokens)
        self._plan = None
        if cap < 1 or not (drafters or guesses):
            return Choice("", 0, "no-room" if cap < 1 else "no-match", max_credit_tokens)
        for name in drafters:
            if self._shared.survival(name).num_rounds < WARM_UP_ROUNDS:
                return Choice(name, min(WARM_UP_GAMMA, cap), "warm-up")
        if not self._shared.plain:
            return Choice("", 0, "warm-up", min(PLAIN_PROBE_TOKENS, max_credit_tokens))
        plain = self._plain_plan(max_credit_tokens)
        plans = [plain, *(self._best_plan(name, cap) for name in drafters)]
        best = max([*plans, *self._guess_plans(guesses, cap, plain)], key=lambda plan: plan.rate)
        others = [plan for plan in plans if plan is not best]
        waits = {plan.drafter: self._ms_to_probe(plan, best, len(others)) for plan in others}
        for plan in plans:
            if waits.get(plan.drafter, 1.0) <= 0:
                return self._choice(plan, "probe", min(PLAIN_PROBE_TOKENS, max_credit_tokens))
        if best is not plain:
            self._plan = best
            return self._choice(best, best.reason, 0)
        tokens_to_probe = int(min(waits.values()) * plain.rate) if waits else max_credit_tokens
        return self._choice(best, "best", min(max(MIN_PLAIN_RUN_TOKENS, tokens_to_probe), max_credit_tokens))

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        if not self._shared.plain:
            return False
        plain = self._plain_plan(MIN_PLAIN_RUN_TOKENS)
        return bool(self._guess_plans(guesses, self._max_draft_tokens, plain))

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        """As many as raise the rate of the plan that the chain was chosen for."""
        plan, verify = self._plan, self._shared.verify
        if plan is None or choice.drafter != plan.drafter:
            return 0
        reached = math.prod(self._own_survival(choice.drafter).hazards(num_drafted))

        def rate(num_tokens: int) -> float:
            ms = plan.ms + verify.ms(num_drafted + num_tokens) - verify.ms(num_drafted)
            return (plan.tokens + reached * guess.expected_accepted(num_tokens)) / max(MIN_MS, ms)

        return max(range(len(guess) + 1), key=rate)

    def observe(self, report: RoundReport) -> None:
        shared, choice = self._shared, report.choice
        self._ms += report.round_ms
        self._tokens += report.num_committed
        name = choice.drafter if choice.num_draft_tokens else PLAIN
        if name == PLAIN:
            shared.observe_plain(report)
        elif report.is_local:
            shared.observe_verify(report)
            return
        else:
            shared.observe_round(report)
        self._last_try[name] = _LastTry(self._ms, self._tokens)
        if name != PLAIN and not report.ended:
            num_accepted = min(report.num_accepted, report.num_own_drafts)
            self._own_survival(name).observe(choice.num_draft_tokens, num_accepted)
            shared.survival(name).observe(choice.num_draft_tokens, num_accepted)

    def _plain_plan(self, credit: int) -> _Plan:
        ms = self._shared.plain.value() + self._shared.verify_network.value() / max(1, credit)
        return _Plan(PLAIN, 0, PLAIN_PROBE_TOKENS, PLAIN_PROBE_TOKENS * max(MIN_MS, ms))

    def _best_plan(self, name: str, cap: int) -> _Plan:
        expected = self._own_survival(name).expected_tokens(cap)
        plans = (_Plan(name, gamma, expected[gamma], self._shared.round_ms(name, gamma)) for gamma in range(1, cap + 1))
        return max(plans, key=lambda plan: plan.rate)

    def _guess_plans(self, guesses: tuple[Guess, ...], cap: int, plain: _Plan) -> list[_Plan]:
        """The best of each guess, where it is more than the noise of costs above plain decoding."""
        best = []
        for guess in guesses:
            plans = (
                _Plan(guess.drafter, n, 1 + guess.expected_accepted(n), self._shared.local_round_ms(n), "match")
                for n in range(1, min(cap, len(guess)) + 1)
            )
            best.append(max(plans, key=lambda plan: plan.rate))
        return [plan for plan in best if plan.rate > MIN_GUESS_GAIN * plain.rate]

    def _ms_to_probe(self, plan: _Plan, best: _Plan, num_others: int) -> float:
        """Time until a try of `plan` is due; not positive: it is."""
        last = self._last_try.get(plan.drafter, _LastTry())
        tokens_missing = last.tokens + MIN_PROBE_INTERVAL_TOKENS - self._tokens
        allowed_at = last.ms + plan.loss_ms(best) * num_others / PROBE_SHARE
        return max(allowed_at - self._ms, tokens_missing / best.rate)

    def _own_survival(self, name: str) -> Survival:
        if name not in self._survival:
            self._survival[name] = Survival(prior=self._shared.survival(name))
        return self._survival[name]

    def _choice(self, plan: _Plan, reason: str, credit: int) -> Choice:
        return Choice(plan.drafter, plan.num_draft_tokens, reason, 0 if plan.num_draft_tokens else credit)
