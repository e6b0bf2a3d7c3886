"""What each part of a round costs: medians of the last few messages, so that one slow call moves nothing.

Shared by all streams of a model. A pass is known by its rows, those of other streams included, so that what was learnt
under one load holds under the next; the wait for it, drafts and network are known by themselves. Each duration is
measured inside one process; network is a round trip less what both ends report. Until something was measured here, what
the workers measured themselves stands in, and until they have told that, guesses in units of a verify pass.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from coordinator.gamma.ahead import AheadCosts
from coordinator.gamma.policy import HIT, LATE, Candidate, RoundReport
from coordinator.gamma.price import Load
from outrider.drafting.proposal import MAX_STEP_ROWS
from outrider.drafting.tree import depths
from outrider.median import Median

MIN_MS = 1e-6
MIN_MEASURED = 3
"""Messages of a size that count as knowing it."""
FRESH_PASSES = 256
"""A pass size not seen among this many passes is stale."""
VERIFY_SLOPE = 0.03
"""Assumed growth of a pass per row, relative to one row, until passes of different sizes were seen."""
DRAFT_SHARE = 0.1
"""Assumed time of a draft in verify passes, until one was seen."""
PROPORTIONAL = 1e9
"""Relative slope of a line through the origin."""
TOLD_WEIGHT = 0.5
"""Of a size that somebody else has measured, in messages of our own."""
FILL_DECAY = 0.9
NUM_SLOWED = 5
"""Messages whose median says how busy a draft worker is."""
CHANGED, NUM_CHANGED = 1.3, 4
"""A worker has become slower or faster when so many messages in a row were off by this factor, to the same side."""

Points = Sequence[tuple[float, float, float]]
"""(size, ms, weight)."""


class LineCost:
    """ms of a piece of work by its size: measured where measured of late, else on the line through what was."""

    def __init__(self, relative_slope: float) -> None:
        """relative_slope: growth per unit relative to size 0, until works of different sizes were seen."""
        self._relative_slope = relative_slope
        self._by_size: dict[float, Median] = {}
        self._seen_at: dict[float, int] = {}
        self._clock = 0
        self._told: tuple[float, float] | None = None
        self._told_sizes: Points = ()
        self._surprises: deque[float] = deque(maxlen=NUM_CHANGED)
        self._lines: dict[int, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._by_size) or self.is_told

    @property
    def is_told(self) -> bool:
        return self._told is not None

    def tell(self, base_ms: float, ms_per_unit: float, sizes: Points = ()) -> None:
        """What somebody else has measured: it stands until works of two sizes were seen here. `sizes`: what works of
        these sizes take there, under whatever load they came; it counts beside what is seen here."""
        self._told, self._told_sizes = (base_ms, ms_per_unit), sizes
        self._lines.clear()

    def observe(self, size: int, ms: float) -> None:
        self._clock += 1
        if size in self._by_size and len(self._by_size[size]) >= MIN_MEASURED:
            self._notice_change(ms / max(MIN_MS, self._by_size[size].value()))
        self._lines.clear()
        self._by_size.setdefault(size, Median(8)).add(ms)
        self._seen_at[size] = self._clock
        if len(self._by_size) > FRESH_PASSES:
            self._by_size = {n: m for n, m in self._by_size.items() if self._is_fresh(n)}

    def ms(self, size: float, near: float = 0.0) -> float:
        """near: the sizes around it shape the line, as work need not grow evenly: a pass is flat at first."""
        seen = self._by_size.get(size)
        if seen is not None and len(seen) >= MIN_MEASURED and self._is_fresh(size):
            return seen.value()
        base, slope = self.line(near)
        return base + slope * size

    def line(self, near: float = 0.0) -> tuple[float, float]:
        """(ms at size 0, ms per unit) around a size."""
        key = round(near)
        if key not in self._lines:
            self._lines[key] = self._fit(near)
        return self._lines[key]

    def _notice_change(self, ratio: float) -> None:
        """ratio: of what a size takes to what it used to. All sizes change with it: those not seen again would
        otherwise be avoided, or wished for, for what they took once."""
        self._surprises.append(ratio)
        if len(self._surprises) < NUM_CHANGED or 1 / CHANGED < median(self._surprises) < CHANGED:
            return
        if min(self._surprises) > CHANGED or max(self._surprises) < 1 / CHANGED:
            factor = median(self._surprises)
            for values in self._by_size.values():
                values.scale(factor)
            self._surprises.clear()

    def _is_fresh(self, size: float) -> bool:
        return self._clock - self._seen_at[size] < FRESH_PASSES

    def _fit(self, near: float) -> tuple[float, float]:
        fresh: Points = [(n, m.value(), len(m)) for n, m in self._by_size.items() if self._is_fresh(n)]
        if not fresh and not self._told_sizes:
            return self._told or (0.0, 0.0)
        relative_slope = self._relative_slope
        if self._told is not None and self._told[0] > 0:
            relative_slope = self._told[1] / self._told[0]
        points = [*fresh, *self._told_sizes]
        if near:
            points = [(x, y, w / (1 + 4 * math.log2((x + 1) / (near + 1)) ** 2)) for x, y, w in points]
        return _line(points, relative_slope)


def _line(points: Points, relative_slope: float) -> tuple[float, float]:
    """Weighted least squares through (x, y, weight), rising; with one x, a line of the assumed relative slope."""
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if spread > 1e-9 * total:
        slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread)
    else:
        slope = relative_slope * mean_y / (1 + relative_slope * mean_x)
    return max(0.0, mean_y - slope * mean_x), slope


class DraftCost:
    """Of one drafter: what a round pays for asking (network, queue), and for the drafts."""

    def __init__(self) -> None:
        self.network = Median()
        self.queue = Median()
        self.work = LineCost(PROPORTIONAL)
        """At the load that most of it was seen under, see `slowed`."""
        self.catch_up = Median()
        """Of a token that the drafter had to compute before it could draft, behind a plain run."""
        self.told_catch_up_ms = 0.0
        """The same as the worker has measured it."""
        self._slowed = Median(NUM_SLOWED)
        self._fill: list[float] = []
        self._filled: list[float] = []
        """Sums of those."""

    def observe(
        self, num_wanted: int, num_drafts: int, draft_ms: float, network_ms: float, queue_ms: float = 0.0
    ) -> None:
        """draft_ms: without the wait for the drafter's engine, which is `queue_ms`."""
        self.network.add(network_ms)
        self.queue.add(queue_ms)
        self._filled = []
        self._fill += [1.0] * (num_wanted - len(self._fill))
        for place in range(num_wanted):
            self._fill[place] = FILL_DECAY * self._fill[place] + (1 - FILL_DECAY) * (place < num_drafts)
        usual_ms = self.work.ms(num_drafts)
        if num_drafts and usual_ms:
            self._slowed.add(draft_ms / usual_ms)
        self.work.observe(num_drafts, draft_ms / self.slowed)

    @property
    def slowed(self) -> float:
        """By other streams that draft at the same time, as a factor: these come and go with what their controllers
        choose, and with them what drafts of all numbers take, those not seen since as well."""
        return self._slowed.value(1.0) or 1.0

    def num_drafted(self, num_wanted: int) -> float:
        """Drafts to expect of a drafter that does not always give as many as wanted: by place, since it ends chains
        where they do not pay."""
        if not self._fill:
            return float(num_wanted)
        if not self._filled:
            self._filled = [0.0, *itertools.accumulate(self._fill)]
        known = min(num_wanted, len(self._fill))
        return self._filled[known] + self._fill[-1] * (num_wanted - known)


class RoundCosts:
    """Of all the kinds of rounds of one model. Its streams share it; `on` is what one target makes of it."""

    def __init__(self) -> None:
        self.verify = LineCost(VERIFY_SLOPE)
        """The target's own time for a pass, by its rows of all streams but one: 0 is one stream's plain step."""
        self.verify_network = Median()
        self.load = Load()
        """Of the target that was heard of last."""
        self.context_ms = 0.0
        """What the cached tokens of a stream add to a pass."""
        self._plain_overhead = Median()
        """Of a token of a plain run, beside its pass and the run's one round trip and wait."""
        self._overhead = Median()
        self._step_overhead = Median()
        self._drafts: dict[str, DraftCost] = {}
        self._ahead: dict[str, AheadCosts] = {}
        self._loads: dict[str, Load] = {}

    def on(self, target: str) -> RoundCosts:
        """The same costs under the load of this target worker."""
        self.load = self._loads.setdefault(target, Load())
        return copy.copy(self)

    def draft(self, candidate: Candidate) -> DraftCost:
        name = candidate.costs_as
        if name not in self._drafts:  # asked for at each γ of each choice: no `setdefault`
            self._drafts[name] = DraftCost()
        return self._drafts[name]

    def ahead(self, candidate: Candidate) -> AheadCosts:
        name = candidate.learnt_as
        if name not in self._ahead:
            self._ahead[name] = AheadCosts()
        return self._ahead[name]

    def knows(self, candidate: Candidate) -> bool:
        """Whether anybody has measured what drafts of it take."""
        return bool(self.draft(candidate).work)

    @property
    def knows_plain(self) -> bool:
        """Whether a plain run was seen."""
        return bool(self._plain_overhead)

    def draft_ms(self, candidate: Candidate, num_draft_tokens: float) -> float:
        draft = self.draft(candidate)
        if not draft.work:
            return DRAFT_SHARE * num_draft_tokens * self.verify_ms(0)
        return draft.slowed * draft.work.ms(num_draft_tokens)

    def verify_ms(self, num_draft_tokens: float) -> float:
        """Of a pass with so many drafts of one's own, beside what others put into it."""
        others = self.load.other_rows
        return self.verify.ms(others + num_draft_tokens, others) if self.verify else 1 + VERIFY_SLOPE * num_draft_tokens

    def step_verify_ms(self, num_draft_tokens: float) -> float:
        """The same of a run's pass: the target goes on with it whoever else is there."""
        others = self.load.other_rows_of_run
        return self.verify.ms(others + num_draft_tokens, others) if self.verify else self.verify_ms(num_draft_tokens)

    def row_ms(self, num_rows: int) -> float:
        """Of each of so many further rows of a pass."""
        return max(0.0, self.verify_ms(num_rows) - self.verify_ms(0)) / max(1, num_rows)

    def taken(self, num_draft_tokens: float, drafting_ms: float = 0.0) -> float:
        """Tokens that other streams lose to one pass of this one. drafting_ms: on the target itself, before the
        pass."""
        row_ms = self.verify.line(self.load.other_rows)[1]
        per_ms = self.load.taken_per_ms(row_ms + self.context_ms)
        return per_ms * (row_ms * (1 + num_draft_tokens) + self.context_ms + drafting_ms)

    def plain_ms(self, run_tokens: int) -> float:
        """Of a token of a plain run of so many."""
        overhead_ms = self._plain_overhead.value() if self._plain_overhead else self._step_overhead.value()
        return self.step_verify_ms(0) + overhead_ms + self.run_start_ms / max(1, run_tokens)

    @property
    def run_start_ms(self) -> float:
        """What a run takes beside its steps: a round trip, and the wait for a pass that is under way."""
        return self.verify_network.value() + self.load.run_queue.value()

    def round_ms(self, candidate: Candidate, num_draft_tokens: int) -> float:
        """Of a round that a draft worker is asked for, from the choice to the commit."""
        (ms,) = self.rounds_ms(candidate, (num_draft_tokens,))
        return ms

    def rounds_ms(self, candidate: Candidate, nums_draft_tokens: Iterable[int]) -> list[float]:
        """The same for several γ."""
        return [
            away_ms + self.load.wait_ms(away_ms) + self.verify_ms(num_drafted)
            for num_drafted, away_ms in self.away(candidate, nums_draft_tokens)
        ]

    def away(self, candidate: Candidate, nums_draft_tokens: Iterable[int]) -> Iterator[tuple[float, float]]:
        """(drafts to expect, ms) from the choice to the target's queue, and from its verdict to the commit: all of a
        round but the target's own time. By γ."""
        draft = self.draft(candidate)
        messages_ms = self.ask_ms(candidate) + self.verify_network.value() + self._overhead.value()
        for num_draft_tokens in nums_draft_tokens:
            num_drafted = draft.num_drafted(num_draft_tokens)
            yield num_drafted, messages_ms + self.draft_ms(candidate, num_drafted)

    def ask_ms(self, candidate: Candidate) -> float:
        """What a question to a draft worker takes beside the drafts: the network, and the wait for its engine."""
        draft = self.draft(candidate)
        return draft.network.value() + draft.queue.value()

    def catch_up_ms(self, candidate: Candidate, num_tokens: int) -> float:
        """What a drafter takes once to come level with so many tokens that were committed without it."""
        draft = self.draft(candidate)
        return draft.catch_up.value(draft.told_catch_up_ms) * num_tokens

    def step_ms(self, candidate: Candidate, num_draft_tokens: int, run_steps: float) -> float:
        """Of a step of a run of so many, drafted for by the target itself."""
        num_drafted = self.draft(candidate).num_drafted(num_draft_tokens)
        ms = self.draft_ms(candidate, num_drafted) + self._step_overhead.value()
        return ms + self.step_verify_ms(num_drafted) + self.run_start_ms / max(1.0, run_steps)

    def tree_step_ms(self, candidate: Candidate, num_draft_tokens: int, num_levels: int, run_steps: float) -> float:
        """The same of a tree, each level of which is one run of the drafter."""
        ms = self.draft_ms(candidate, num_levels) + self._step_overhead.value()
        return ms + self.step_verify_ms(num_draft_tokens) + self.run_start_ms / max(1.0, run_steps)

    def local_round_ms(self, num_draft_tokens: float) -> float:
        """Of a round whose drafts are at hand."""
        wait_ms = self.verify_network.value() + self.load.queue.value()
        return wait_ms + self.verify_ms(num_draft_tokens) + self._overhead.value()

    def observe_round(self, report: RoundReport, candidate: Candidate) -> None:
        """A round that a draft worker was asked for. A level of a tree takes what a token of a chain does."""
        draft_network_ms = report.draft_network_ms + report.wait_ms
        num_wanted, num_drafts = report.num_wanted, report.num_own_drafts
        if report.parents:
            num_drafts = max(depths(report.parents))
            num_wanted = max(num_drafts, -(-num_wanted // max(1, report.choice.tree_width)))
        work_ms = report.draft_ms - report.draft_queue_ms - report.draft_catch_up_ms
        if report.ahead not in (HIT, LATE):
            self.draft(candidate).observe(num_wanted, num_drafts, work_ms, draft_network_ms, report.draft_queue_ms)
        if report.draft_catch_up_ms and report.num_ingested_tokens >= MAX_STEP_ROWS:  # else the prompt was waited for
            self.draft(candidate).catch_up.add(report.draft_catch_up_ms / report.num_ingested_tokens)
        is_typical = self.ahead(candidate).observe(report, self.verify_ms(report.num_draft_tokens))
        self.observe_verify(report, is_typical=is_typical)

    def observe_verify(self, report: RoundReport, *, is_typical: bool = True) -> None:
        """What any round with drafts tells of the target. is_typical: nothing drafted ahead has slowed its pass."""
        draft_network_ms = report.draft_network_ms + report.wait_ms + report.branch_wait_ms
        self._observe_pass(report, was_asked=True, is_typical=is_typical)
        self.load.observe_wait(report.round_ms - report.verify_ms, report.verify_queue_ms)
        self.verify_network.add(report.verify_network_ms)
        known_ms = report.draft_ms + draft_network_ms + report.verify_ms + report.verify_network_ms
        self._overhead.add(max(0.0, report.round_ms - known_ms))

    def observe_step(self, report: RoundReport, candidate: Candidate) -> None:
        """A step that the target drafted for; the first of a run also tells of the network."""
        num_wanted, num_drafts = report.choice.num_draft_tokens, report.num_draft_tokens
        if report.choice.shape:
            num_wanted = max(depths(report.wanted_shape))
            num_drafts = max(depths(report.drawn_shape), default=0)
        self.draft(candidate).observe(num_wanted, num_drafts, report.draft_ms, 0.0)
        self._observe_pass(report, was_asked=False)
        if report.verify_network_ms:
            self.verify_network.add(report.verify_network_ms)
        known_ms = report.draft_ms + report.verify_ms + report.verify_network_ms
        self._step_overhead.add(max(0.0, report.round_ms - known_ms))

    def observe_plain(self, report: RoundReport) -> None:
        if not report.num_committed:
            return
        self._observe_pass(report, was_asked=False)
        network_ms = self.verify_network.value(report.verify_network_ms)
        if report.num_committed == 1 and self.knows_plain:
            return  # a run of one token says little about those without a round trip
        known_ms = report.verify_ms + network_ms
        self._plain_overhead.add(max(0.0, report.round_ms - known_ms) / report.num_committed)

    def _observe_pass(self, report: RoundReport, *, was_asked: bool, is_typical: bool = True) -> None:
        num_passes = 1 if report.choice.num_draft_tokens else max(1, report.num_committed)
        own_rows = 1 + report.num_draft_tokens
        batch_rows = max(own_rows, report.num_batch_rows)
        pass_ms = (report.verify_ms - report.verify_queue_ms) / num_passes
        if is_typical:
            self.verify.observe(round(batch_rows) - 1, pass_ms)
        self.load.observe_passes(
            num_passes, own_rows=own_rows, batch_rows=batch_rows, pass_ms=pass_ms, queue_ms=report.verify_queue_ms,
            was_asked=was_asked,
        )  # fmt: skip
        self.load.observe_tokens(report.num_committed, report.round_ms)
