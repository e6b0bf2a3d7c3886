"""The objective: of everything that could be done next, committed tokens per ms. In one place, for every kind of round.

rate(plan) = (E[tokens committed] - tokens that other streams lose to it) / E[ms], from how far this stream's drafts
survive, what rounds of this model take, and what a pass takes from others (`price.py`):

    plain             1 / (a token of a run)
    a draft worker    (1 + s_1 + ... + s_γ) / (network + drafting γ + a round trip + verifying γ + 1 rows)
                      with drafting ahead a hit is spared the network and the drafting (`ahead.py`)
    a tree of it      as well, each level of which adds the chance that a sibling is right where the chain is wrong
    inside the target (1 + s_1 + ... + s_γ) / (drafting γ + verifying γ + 1 rows); a run's steps share its round trip
    a tree of it      as well, of whatever shape pays (`head_trees.py`)
    a guess at hand   (1 + its own tokens' chances) / (a round trip + verifying), several that disagree as one tree

s_i: chance that the first i drafts all stand. A guess is judged by its own tokens' chances, which are learnt whether it
is used or not; so a merge is nothing but the better of the plans at this very place, and it is made before any drafter
has drawn anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.gamma.acceptance import Acceptance
from coordinator.gamma.ahead import HitRate, best_ahead
from coordinator.gamma.costs import RoundCosts
from coordinator.gamma.crowd import MIN_GAIN
from coordinator.gamma.head_trees import MAX_DEPTH, MAX_WIDTH, Chance, best_shape, chances, expected_accepted, widened
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from outrider.drafting.guess import Guess
from outrider.drafting.guess_tree import GuessTree, best_part, merged
from outrider.drafting.ratio_stop import Price
from outrider.drafting.tree import depths
from outrider.drafting.tree_plan import RoundCost, shape_of_size
from outrider.serving.messages import NOTHING_AHEAD, AheadWish

PLAIN_PROBE_TOKENS = 4
WARM_UP_TOKENS = 2
"""Of plain decoding, where nothing has told what it costs: an answer may be short."""
PROBE_STEPS = 2
MIN_RUN_TOKENS = 16
ROUND_TRIP_SHARE = 0.02
"""Of a run's time that its one round trip may take before the run is made longer."""
MIN_GUESS_GAIN = 1.03
"""Over what goes on without it: a guess that promises less is not worth its rows."""
MIN_MS = 1e-6
MIN_RATE = 1e-9
PLAIN = ""
"""Key of plain decoding among the candidates'."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a choice is expected to commit and to take: a round, or as much of a run as is worth its round trip.
    `taken`: tokens that other streams of the target lose to it. `if_asked`: tokens that it is worth where drafts are
    asked for, if that differs."""

    drafter: str
    num_draft_tokens: int
    tokens: float
    ms: float
    candidate: Candidate | None = None
    is_guess: bool = False
    tree: GuessTree | None = None
    tree_width: int = 0
    taken: float = 0.0
    ahead: AheadWish = NOTHING_AHEAD
    shape: tuple[int, ...] = ()
    if_asked: float = 0.0

    @property
    def key(self) -> str:
        return self.candidate.key if self.candidate is not None else self.drafter

    @property
    def rate(self) -> float:
        """Tokens per ms that the target as a whole gains by it."""
        return (self.tokens - self.taken) / max(MIN_MS, self.ms)

    @property
    def own_rate(self) -> float:
        """Tokens per ms of the stream itself."""
        return self.tokens / max(MIN_MS, self.ms)

    @property
    def is_run(self) -> bool:
        return self.choice("", 1).is_run

    def loss_ms(self, best: Plan) -> float:
        """Time lost when this is done once instead of the best."""
        return max(0.0, self.ms - (self.tokens - self.taken) / max(MIN_RATE, best.rate))

    def choice(self, reason: str, credit_tokens: int) -> Choice:
        """`credit_tokens` matter to runs alone."""
        choice = Choice(
            self.drafter,
            self.num_draft_tokens,
            reason,
            credit_tokens,
            self.candidate,
            1000 * self.own_rate,
            self.tree,
            self.tree_width,
            self.ahead,
            self.shape,
        )
        return choice if choice.is_run else dataclasses.replace(choice, credit_tokens=0)


class Objective:
    """Of one stream."""

    def __init__(self, shared: PairEstimates, draft_ahead: str = "auto") -> None:
        """draft_ahead: auto (where it pays), on, or off."""
        self._shared = shared
        self._costs = shared.costs
        self._draft_ahead = draft_ahead
        self._hit_rates: dict[str, HitRate] = {}
        self._target = ""
        self._passes_ms: float | None = None
        """Of the target's passes when its last verdict came; None: there was none."""
        self._acceptance: dict[str, Acceptance] = {}

    def acceptance(self, candidate: Candidate) -> Acceptance:
        """This stream's own, which begins with what its scope has seen."""
        name = candidate.learnt_as
        if name not in self._acceptance:
            self._acceptance[name] = Acceptance(prior=self._shared.prior(candidate))
        return self._acceptance[name]

    def hit_rate(self, candidate: Candidate) -> HitRate:
        """Of drafting ahead for this stream, which begins with what its scope has seen."""
        name = candidate.learnt_as
        if name not in self._hit_rates:
            self._hit_rates[name] = HitRate(self._shared.hit_rate(candidate))
        return self._hit_rates[name]

    def pass_over(self, num_tokens: int) -> None:
        """The stream's text went on by so many, whoever drafted them: to be told before what was drafted is."""
        for acceptance in self._acceptance.values():
            acceptance.pass_over(num_tokens)

    def plain(self, credit_tokens: int) -> Plan:
        ms = max(MIN_MS, self._costs.plain_ms(credit_tokens))
        taken = PLAIN_PROBE_TOKENS * self._costs.taken(0)
        return Plan(PLAIN, 0, PLAIN_PROBE_TOKENS, PLAIN_PROBE_TOKENS * ms, taken=taken)

    def best_of(self, candidate: Candidate, max_draft_tokens: int, credit_tokens: int, min_width: int = 1) -> Plan:
        """With the γ that pays most, 0 not among them; of a tree with the shape that does, `min_width` at least, which
        must be among the drafts allowed."""
        if candidate.max_width > 1 and candidate.on_target:
            return self._shaped(candidate, max_draft_tokens, credit_tokens, is_chain=min_width == 1)
        if candidate.max_width > 1:
            return _best(self._trees(candidate, candidate.cap(max_draft_tokens), min_width))
        expected = self.acceptance(candidate).expected_tokens(candidate.cap(max_draft_tokens))
        gammas = range(1, len(expected))
        if candidate.on_target:
            return _best(self._run(candidate, gamma, expected[gamma], credit_tokens) for gamma in gammas)
        rounds_ms = self._costs.rounds_ms(candidate, gammas)
        rates = [
            (expected[gamma] - self._costs.taken(gamma)) / max(MIN_MS, ms)
            for gamma, ms in zip(gammas, rounds_ms, strict=True)
        ]
        best = rates.index(max(rates))
        plan = self._round(candidate, gammas[best], expected[gammas[best]], rounds_ms[best])
        return self._ahead(candidate, expected, rounds_ms, plan) or plan

    def fixed_shape(self, candidate: Candidate, num_draft_tokens: int) -> tuple[int, ...]:
        """Of the tree of so many nodes that commits most per ms, no chain where there are two or more."""
        cost = RoundCost(verify_ms=self._costs.verify_ms(0), row_ms=0.0, level_ms=self._level_ms(candidate))
        depth = self._max_depth(candidate, num_draft_tokens)
        chance = self._chance(candidate, depth)
        shape = shape_of_size(chance, cost, num_draft_tokens, max_depth=depth, max_width=MAX_WIDTH)
        return widened(shape, num_draft_tokens)

    def observe_tree(self, report: RoundReport, candidate: Candidate) -> None:
        """A round over a tree that was drawn inside the target. To be told before what else it teaches."""
        shape = report.wanted_shape
        chance = self._chance(candidate, max(depths(shape), default=0))
        self._shared.gain(candidate).observe(report.num_accepted, expected_accepted(shape, chance))

    def guessed(self, guesses: Sequence[Guess], max_draft_tokens: int, instead_of: Plan) -> list[Plan]:
        """The best of each guess, and of all together, where it is more than the noise of costs above what else would
        be done."""
        best = [
            _best(self._guess(guess, n) for n in range(1, min(max_draft_tokens, len(guess)) + 1)) for guess in guesses
        ]
        together = self._together(guesses, max_draft_tokens, instead_of.rate) if len(guesses) > 1 else None
        if together is not None:
            best.append(together)
        return [plan for plan in best if plan.rate > MIN_GUESS_GAIN * instead_of.rate]

    def num_continued(self, plan: Plan, num_drafted: int, guess: Guess) -> int:
        """Tokens of a guess after the plan's own chain: as many as raise the plan's rate."""
        assert plan.candidate is not None
        reached = math.prod(self.acceptance(plan.candidate).hazards(num_drafted))
        verify_ms, taken = self._costs.verify_ms, self._costs.taken

        def rate(num_tokens: int) -> float:
            num_drafts = num_drafted + num_tokens
            ms = plan.ms + verify_ms(num_drafts) - verify_ms(num_drafted)
            return (plan.tokens + reached * guess.expected_accepted(num_tokens) - taken(num_drafts)) / max(MIN_MS, ms)

        return max(range(len(guess) + 1), key=rate)

    @property
    def costs(self) -> RoundCosts:
        """As they are on the stream's target."""
        return self._costs

    def heard_of(self, report: RoundReport) -> None:
        """The target worker that the stream is on, and how long its passes took meanwhile. To be told before what else
        it teaches."""
        if report.target != self._target:
            self._target, self._costs = report.target, self._shared.costs.on(report.target)
            self._passes_ms = None
        load = self._costs.load
        if self._passes_ms is not None and not report.choice.is_run:
            load.observe_round(report.round_ms, load.crowd.passes_ms - self._passes_ms)
        self._passes_ms = load.crowd.passes_ms

    def parted(self, plan: Plan) -> Plan:
        """A draft worker's plan, or one with fewer drafts where the stream is to leave a crowd (`crowd.py`): with as
        many as let half of the crowd be served before the others are back."""
        candidate, costs, crowd = plan.candidate, self._costs, self._costs.load.crowd
        if candidate is None or candidate.on_target or candidate.max_width > 1 or plan.ahead or crowd.num_streams < 2:
            return plan
        gamma, half, near = plan.num_draft_tokens, crowd.num_streams / 2, costs.load.other_rows

        def pass_ms(num_streams: float, num_draft_tokens: float) -> float:
            return costs.verify.ms(round(num_streams * (1 + num_draft_tokens)) - 1, near)

        if not crowd.may_part(pass_ms(half, 1)) or pass_ms(2 * half, gamma) - pass_ms(half, gamma) < MIN_GAIN * plan.ms:
            return plan
        *earlier, (_, away_ms) = costs.away(candidate, range(1, gamma + 1))
        in_time = [ms + pass_ms(half, num_drafted) <= away_ms for num_drafted, ms in earlier]
        if True not in in_time:
            return plan
        fewer = len(in_time) - in_time[::-1].index(True)
        if not crowd.sends_early(pass_ms(half, fewer)):
            return plan
        tokens = self.acceptance(candidate).expected_tokens(fewer)[fewer]
        return self._round(candidate, fewer, tokens, costs.round_ms(candidate, fewer))

    def run_tokens(self, plan: Plan) -> int:
        """Of a run: few, so that γ stays right, but enough for what its start takes."""
        return max(MIN_RUN_TOKENS, math.ceil(plan.own_rate * self._costs.run_start_ms / ROUND_TRIP_SHARE))

    def price(self, plan: Plan, rate: float) -> Price | None:
        """What each draft of a plan must earn where the best plan has this rate; None: its drafter ends nothing."""
        candidate = plan.candidate
        if candidate is None or candidate.on_target or candidate.max_width > 1 or plan.num_draft_tokens < 2:
            return None
        rate, num_drafts = max(0.0, rate), plan.num_draft_tokens
        taken = (self._costs.taken(num_drafts) - self._costs.taken(0)) / num_drafts
        expected = tuple(self.acceptance(candidate).hazards(num_drafts))
        row_tokens = rate * self._costs.row_ms(num_drafts) + taken
        return Price(rate * self._lengthening(candidate, num_drafts), row_tokens, expected)

    def _lengthening(self, candidate: Candidate, gamma: int) -> float:
        """Of a round, by a ms of drafting; 0 to 1. Drafts that are made while a stream would wait for a pass, or ahead
        of the verdict, cost nothing. Of the second half of γ drafts: with the first ones most chains go on anyway."""
        fewer, costs = gamma // 2, self._costs
        few, many = (costs.draft_ms(candidate, costs.draft(candidate).num_drafted(n)) for n in (fewer, gamma))
        grows_ms = costs.round_ms(candidate, gamma) - costs.round_ms(candidate, fewer)
        grows_ms -= costs.verify_ms(gamma) - costs.verify_ms(fewer)
        return min(1.0, max(0.0, grows_ms / (many - few))) if many > few else 1.0

    def max_wait_ms(self, best: Plan) -> float:
        """For the drafts of the best plan: as long as the time is worth less, at the plan's own rate, than what they
        commit beyond the token of a plain pass. 0: nobody is waited for."""
        if best.candidate is None or best.candidate.on_target or best.rate <= 0:
            return 0.0
        costs, num_drafts = self._costs, best.num_draft_tokens
        further = (best.if_asked or best.tokens) - 1 - costs.taken(num_drafts) + costs.taken(0)
        return max(0.0, further / best.rate - costs.verify_ms(num_drafts) + costs.verify_ms(0))

    def is_held_back(self, plan: Plan, plans: Iterable[Plan]) -> bool:
        """Whether the stream would draft more were it alone on its target."""
        if not self._costs.load.num_others:
            return False
        more = [other for other in plans if other.num_draft_tokens > plan.num_draft_tokens]
        if plan.candidate is not None and not plan.candidate.on_target and plan.candidate.max_width == 1:
            longer = plan.num_draft_tokens + 1
            if longer <= plan.candidate.cap(longer):
                expected = self.acceptance(plan.candidate).expected_tokens(longer)
                ms = self._costs.round_ms(plan.candidate, longer)
                more.append(self._round(plan.candidate, longer, expected[longer], ms))
        return any(other.taken and other.own_rate > plan.own_rate for other in more)

    def _trees(self, candidate: Candidate, max_draft_tokens: int, min_width: int) -> Iterator[Plan]:
        """Every depth and width: a level takes one draft of the chain and adds as many rows as it is wide."""
        siblings, ask_ms = self._shared.siblings(candidate), self._costs.ask_ms(candidate)
        for width in range(min_width, candidate.max_width + 1):
            expected = siblings.expected_tokens(self.acceptance(candidate).hazards(max_draft_tokens // width), width)
            for levels in range(1, len(expected)):
                num_drafts = levels * width
                ms = ask_ms + self._costs.draft_ms(candidate, levels) + self._costs.local_round_ms(num_drafts)
                taken = self._costs.taken(num_drafts)
                yield Plan(candidate.name, num_drafts, expected[levels], ms, candidate, tree_width=width, taken=taken)

    def _shaped(self, candidate: Candidate, max_nodes: int, credit_tokens: int, *, is_chain: bool) -> Plan:
        """A tree inside the target, of the shape that pays most for rows, levels and what they take from others."""
        costs, plain_rate = self._costs, max(MIN_RATE, self.plain(credit_tokens).rate)
        level_ms, row_ms = self._level_ms(candidate), costs.row_ms(max_nodes)
        price = RoundCost(
            verify_ms=costs.tree_step_ms(candidate, 0, 1, credit_tokens) - row_ms - level_ms,
            row_ms=row_ms + (costs.taken(1) - costs.taken(0)) / plain_rate,
            level_ms=level_ms + (costs.taken(0, drafting_ms=level_ms) - costs.taken(0)) / plain_rate,
        )
        depth = self._max_depth(candidate, max_nodes)
        chance = self._chance(candidate, depth)
        shape = best_shape(chance, price, max_nodes=max_nodes, max_depth=depth, is_chain=is_chain)
        num_levels = max(depths(shape))
        tokens = 1 + self._shared.gain(candidate).value() * expected_accepted(shape, chance)
        ms = costs.tree_step_ms(candidate, len(shape), num_levels, credit_tokens / tokens)
        taken = costs.taken(len(shape), drafting_ms=costs.draft_ms(candidate, num_levels))
        steps = PROBE_STEPS
        return Plan(candidate.name, len(shape), steps * tokens, steps * ms, candidate, taken=steps * taken, shape=shape)

    def _level_ms(self, candidate: Candidate) -> float:
        """Of each level of a tree but the first."""
        return max(0.0, self._costs.draft_ms(candidate, 2) - self._costs.draft_ms(candidate, 1))

    def _chance(self, candidate: Candidate, max_depth: int) -> Chance:
        return chances(self.acceptance(candidate).hazards(max_depth), self._shared.siblings(candidate))

    def _max_depth(self, candidate: Candidate, max_nodes: int) -> int:
        return min(candidate.max_depth or MAX_DEPTH, max_nodes, MAX_DEPTH)

    def _round(self, candidate: Candidate, gamma: int, tokens: float, ms: float) -> Plan:
        return Plan(candidate.name, gamma, tokens, ms, candidate, taken=self._costs.taken(gamma))

    def _ahead(
        self, candidate: Candidate, expected: Sequence[float], rounds_ms: Sequence[float], on_demand: Plan
    ) -> Plan | None:
        """The same with drafts ahead of the verdict, where it pays or is wished."""
        if self._draft_ahead == "off":
            return None
        hits, always = self.hit_rate(candidate), self._draft_ahead == "on"
        found = best_ahead(self._costs, candidate, expected, rounds_ms, hits, on_demand.rate, always=always)
        if found is None:
            return None
        return Plan(
            candidate.name, found.num_on_demand, found.tokens, found.ms, candidate,
            taken=self._costs.taken(found.num_drafts), ahead=found.wish, if_asked=found.tokens_if_asked,
        )  # fmt: skip

    def _guess(self, guess: Guess, num_tokens: int) -> Plan:
        tokens, ms = 1 + guess.expected_accepted(num_tokens), self._costs.local_round_ms(num_tokens)
        return Plan(guess.drafter, num_tokens, tokens, ms, is_guess=True, taken=self._costs.taken(num_tokens))

    def _together(self, guesses: Sequence[Guess], max_draft_tokens: int, rate: float) -> Plan | None:
        """As a tree, where rows are cheap enough for more than one chain of it. rate: tokens per ms without it."""
        tree = merged(guesses)
        if tree is None:
            return None
        round_ms, row_ms = self._costs.local_round_ms(0), self._costs.row_ms(max_draft_tokens)
        # what a row takes from others, in ms of this stream
        taken_ms = (self._costs.taken(1) - self._costs.taken(0)) / max(MIN_RATE, rate)
        priced_ms = row_ms + taken_ms
        tree = best_part(tree, RoundCost(verify_ms=round_ms - row_ms, row_ms=priced_ms), max_draft_tokens)
        if tree is None:
            return None
        ms, tokens, taken = round_ms + row_ms * len(tree), 1 + tree.expected_accepted, self._costs.taken(len(tree))
        return Plan(tree.drafter, len(tree), tokens, ms, is_guess=True, tree=tree, taken=taken)

    def _run(self, candidate: Candidate, gamma: int, tokens: float, credit_tokens: int) -> Plan:
        ms = self._costs.step_ms(candidate, gamma, credit_tokens / tokens)
        taken = self._costs.taken(gamma, drafting_ms=self._costs.draft_ms(candidate, gamma))
        return Plan(candidate.name, gamma, PROBE_STEPS * tokens, PROBE_STEPS * ms, candidate, taken=PROBE_STEPS * taken)


def _best(plans: Iterable[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.rate)
