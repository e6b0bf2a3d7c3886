"""γ and drafter that commit most tokens per second, plain decoding at its true cost among them: no bandit.

Every verified row tells of its drafter, used guesses and unused ones alike, and every candidate is judged by the one
objective (`plans.py`). The best is taken. What was never tried starts from its prior; what is not best is tried again
whenever the time since its last try makes the expected loss a small share of that time: so no choice is forever, and a
hopeless one costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.gamma.acceptance import chances_of
from coordinator.gamma.plans import MIN_RUN_TOKENS, PLAIN, PLAIN_PROBE_TOKENS, WARM_UP_TOKENS, Objective, Plan
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from outrider.drafting.guess import Guess
from outrider.results import DrafterOutlook

PROBE_SHARE = 0.005
"""Of a stream's time that probes may lose, all together, on an even text."""
PLAIN_PROBE_SHARE = 0.001
"""For plain decoding: its passes cost what those with drafts do, but for rows, so that a try tells little."""
CHANGING_PROBE_SHARE = 0.05
"""The same where the text changes all the time, so that what a probe told does not hold for long, and where probes pay
now and then."""
LUCK_WEIGHT = 0.2
"""Of the last probe in how often they pay."""
FIRST_PROBE_SHARE = 0.02
"""For the first try of a drafter that nobody of the scope has used: what is expected of it is hearsay."""
MIN_PROBE_INTERVAL_TOKENS = 32
MIN_PAYBACK_TOKENS = 64
"""In which a drafter is expected to earn what its coming level with the text takes."""
MAX_SHARED_RUN_TOKENS = 64
STAGGER_SHARE = 0.5
"""Of a plain run, that streams of one target end theirs earlier by, each by another part of it. They see the same and
would begin to draft at once: then all are away together, and back for one pass that takes as long as all of theirs."""


@dataclass(slots=True)
class _LastTry:
    ms: float = 0.0
    tokens: int = 0


class AdaptiveGamma:
    """One stream's controller over the estimates that it shares with its neighbours."""

    def __init__(
        self, shared: PairEstimates, max_draft_tokens: int, *, draft_ahead: str = "auto", ends_chains: bool = True
    ) -> None:
        """draft_ahead: of the verdict: auto (where it pays), on, or off. ends_chains: drafters are told prices."""
        self._ends_chains = ends_chains
        self._shared = shared
        self._objective = Objective(shared, draft_ahead)
        self._max_draft_tokens = max_draft_tokens
        self._last_try: dict[str, _LastTry] = {}
        self._probed: str | None = None
        """Key of the plan that the last choice was a probe of."""
        self._luck: dict[str, float] = {}
        """How often a probe was followed by the choice of what it probed, by key."""
        self._plans: tuple[Plan, ...] = ()
        self._chosen: Plan | None = None
        self._ms = 0.0
        self._tokens = 0

    def choose(
        self,
        max_draft_tokens: int,
        max_credit_tokens: int,
        candidates: tuple[Candidate, ...],
        guesses: tuple[Guess, ...] = (),
    ) -> Choice:
        cap = min(max_draft_tokens, self._max_draft_tokens)
        plain = self._chosen = self._objective.plain(max_credit_tokens)
        if cap < 1 or not (candidates or guesses):
            return plain.choice("no-room" if cap < 1 else "no-match", max_credit_tokens)
        plans = [plain, *self._asked(candidates, cap, max_credit_tokens)]
        untried = self._untried([*plans[1:], plain])
        if untried is not None:
            return self._warm_up(untried, max_credit_tokens)
        best = self._best([*plans, *self._objective.guessed(guesses, cap, plain)])
        if self._probed is not None:
            luck = self._luck.get(self._probed, 1.0)
            self._luck[self._probed] = luck + LUCK_WEIGHT * ((best.key == self._probed) - luck)
            self._probed = None
        others = [plan for plan in plans if plan is not best]
        self._plans = (best, *sorted(others, key=lambda plan: -plan.rate))
        waits = [self._ms_to_probe(plan, best, len(others)) for plan in others]
        due = next((plan for plan, wait in zip(others, waits, strict=True) if wait <= 0), None)
        if due is not None:
            self._probed = due.key
            self._shared.tries(due.key)
            return self._priced(self._take(due, "probe", max_credit_tokens), due, best)
        credit_tokens = self._credit_tokens(best, int(min(waits) * best.rate) if waits else max_credit_tokens)
        reason = self._reason(best)
        if reason == "best" and self._objective.is_held_back(best, plans):
            reason = "load"
        parted = self._chosen = self._objective.parted(best)
        if parted is not best:
            reason = "load"
        choice = self._priced(parted.choice(reason, min(credit_tokens, max_credit_tokens)), parted, best)
        return dataclasses.replace(choice, max_wait_ms=self._objective.max_wait_ms(best))

    def _warm_up(self, plan: Plan, max_credit_tokens: int) -> Choice:
        self._shared.tries(plan.key)
        num_tokens = max_credit_tokens
        if plan.candidate is None:
            num_tokens = WARM_UP_TOKENS + round(WARM_UP_TOKENS * self._shared.stagger())
        return self._take(plan, "warm-up", min(num_tokens, max_credit_tokens))

    def _best(self, plans: list[Plan]) -> Plan:
        # who decodes plainly sees nothing of how drafts fare, and has to pay for tries of them
        blind = max((self._probe_share(plan) for plan in plans if plan.candidate is not None), default=0.0)
        return max(plans, key=lambda plan: plan.rate * (1 - blind) if plan.key == PLAIN else self._rate_from_here(plan))

    def _rate_from_here(self, plan: Plan) -> float:
        """A drafter that has fallen behind comes level first. Nobody knows for how long it will then be the best: as
        long as it was not, at least."""
        catch_up_ms, num_behind = self._catch_up(plan)
        per_token_ms = catch_up_ms / max(MIN_PAYBACK_TOKENS, num_behind)
        return plan.rate / (1 + plan.own_rate * per_token_ms)

    def _catch_up(self, plan: Plan) -> tuple[float, int]:
        """(ms, tokens) that its drafter would have to come level first."""
        if plan.candidate is None:
            return 0.0, 0
        num_behind = self._tokens - self._last_try.get(plan.key, _LastTry()).tokens
        return self._objective.costs.catch_up_ms(plan.candidate, num_behind), num_behind

    def _credit_tokens(self, best: Plan, tokens_to_probe: int) -> int:
        """Of a run."""
        run_tokens = self._objective.run_tokens(best)
        if best.num_draft_tokens:
            return run_tokens
        num_tokens = max(run_tokens, tokens_to_probe)
        if self._objective.costs.load.num_others < 1:
            return num_tokens
        return math.ceil(min(num_tokens, MAX_SHARED_RUN_TOKENS) * (1 - STAGGER_SHARE * self._shared.stagger()))

    def _priced(self, choice: Choice, plan: Plan, best: Plan) -> Choice:
        price = self._objective.price(plan, best.rate) if self._ends_chains else None
        return choice if price is None else dataclasses.replace(choice, price=price)

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        if not self._knows_passes:
            return False
        chosen = self._chosen
        run = chosen if chosen is not None and chosen.is_run else self._objective.plain(MIN_RUN_TOKENS)
        return bool(self._objective.guessed(guesses, self._max_draft_tokens, run))

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        plan = self._chosen
        if plan is None or plan.candidate is None or choice.candidate != plan.candidate:
            return 0
        return self._objective.num_continued(plan, num_drafted, guess)

    def observe(self, report: RoundReport) -> None:
        candidate = report.choice.candidate
        self._ms += report.round_ms
        self._tokens += report.num_committed
        self._objective.pass_over(report.num_committed)
        self._objective.heard_of(report)
        costs = self._objective.costs
        if report.is_local:
            costs.observe_verify(report)
            return
        key = candidate.key if candidate is not None else PLAIN
        self._last_try[key] = _LastTry(self._ms, self._tokens)
        self._shared.passed(key, report.round_ms)
        if candidate is None:
            costs.observe_plain(report)
            return
        if candidate.max_branches:
            self._objective.hit_rate(candidate).observe(report)
        observe_cost = costs.observe_step if candidate.on_target else costs.observe_round
        observe_cost(report, candidate)
        if not report.ended:
            if report.choice.shape:
                self._objective.observe_tree(report, candidate)
            for acceptance in (self._objective.acceptance(candidate), self._shared.prior(candidate)):
                acceptance.observe(*chances_of(report))
            if report.parents:
                self._shared.siblings(candidate).observe(report)

    def outlooks(self) -> tuple[DrafterOutlook, ...]:
        return tuple(DrafterOutlook(plan.drafter, plan.num_draft_tokens, 1000 * plan.rate) for plan in self._plans)

    def _asked(self, candidates: tuple[Candidate, ...], cap: int, credit_tokens: int) -> Iterator[Plan]:
        """The best of each; of a tree whose chain can be asked for as well, what is not a chain."""
        chains = {candidate.learnt_as for candidate in candidates if candidate.max_width == 1}
        for candidate in candidates:
            min_width = 2 if candidate.max_width > 1 and candidate.learnt_as in chains else 1
            if cap >= min_width:
                yield self._objective.best_of(candidate, cap, credit_tokens, min_width)

    def _untried(self, plans: list[Plan]) -> Plan | None:
        """The first whose cost nobody knows or is about to, once for all streams of a model: drafters, then plain
        decoding."""
        costs = self._shared.costs
        for plan in plans:
            is_known = self._knows_passes if plan.candidate is None else costs.knows(plan.candidate)
            if not (is_known or self._shared.is_tried_now(plan.key)):
                return plan
        return None

    @property
    def _knows_passes(self) -> bool:
        """Whether anybody has measured what a pass of the target takes: a run of it by itself, or its worker."""
        costs = self._shared.costs
        return costs.knows_plain or costs.verify.is_told

    def _take(self, plan: Plan, reason: str, max_credit_tokens: int) -> Choice:
        """A short try: what its plan holds."""
        self._chosen = plan
        return plan.choice(reason, min(max(PLAIN_PROBE_TOKENS, round(plan.tokens)), max_credit_tokens))

    def _reason(self, plan: Plan) -> str:
        if plan.is_guess:
            return "match"
        return "prior" if self._is_fresh(plan) else "best"

    def _is_fresh(self, plan: Plan) -> bool:
        return plan.candidate is not None and not self._shared.prior(plan.candidate).num_rounds

    def _ms_to_probe(self, plan: Plan, best: Plan, num_others: int) -> float:
        """Time until a try of `plan` is due; not positive: it is."""
        last = self._last_try.get(plan.key, _LastTry())
        # a stream that begins has its drafters level with it: never again is a try as cheap
        interval_tokens = MIN_PROBE_INTERVAL_TOKENS if self._tokens else 0
        tokens_missing = last.tokens + interval_tokens - self._tokens
        share = FIRST_PROBE_SHARE if self._is_fresh(plan) else self._probe_share(plan)
        elapsed_ms = self._shared.ms_since_try(plan.key)
        loss_ms = plan.loss_ms(best)
        if plan.candidate is not None:  # a try of it tells of this stream's text too
            elapsed_ms = max(elapsed_ms, self._ms - last.ms)
            loss_ms += self._catch_up(plan)[0]
        return max(loss_ms * num_others / share - elapsed_ms, tokens_missing / best.rate)

    def _probe_share(self, plan: Plan) -> float:
        if plan.candidate is None:
            return PLAIN_PROBE_SHARE
        changes = self._objective.acceptance(plan.candidate).changes
        return PROBE_SHARE + changes**2 * self._luck.get(plan.key, 1.0) * (CHANGING_PROBE_SHARE - PROBE_SHARE)
