"""What each part of a round costs: medians of the last few messages, so that one slow call moves nothing.

Shared by all streams of a model. Until something was measured here, what the workers measured themselves stands in, and
until they have told that, guesses in units of a verify pass.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from coordinator.gamma.policy import Candidate, RoundReport
from outrider.drafting.tree import depths

FRESH_PASSES = 256
"""A pass size not seen among this many passes is stale."""
VERIFY_SLOPE = 0.03
"""Assumed growth of a pass per row, relative to one row, until passes of different sizes were seen."""
DRAFT_SHARE = 0.1
"""Assumed time of a draft in verify passes, until one was seen."""
PROPORTIONAL = 1e9
"""Relative slope of a line through the origin."""


class Median:
    """Of the last few values."""

    def __init__(self, size: int = 12) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._cached: float | None = None

    def add(self, value: float) -> None:
        self._values.append(value)
        self._cached = None

    def __len__(self) -> int:
        return len(self._values)

    def value(self, default: float = 0.0) -> float:
        if self._cached is None and self._values:
            self._cached = median(self._values)
        return default if self._cached is None else self._cached


class LineCost:
    """ms of a piece of work by its size: measured where measured of late, else on the line through what was."""

    def __init__(self, relative_slope: float) -> None:
        """relative_slope: growth per unit relative to size 0, until works of different sizes were seen."""
        self._relative_slope = relative_slope
        self._by_size: dict[int, Median] = {}
        self._seen_at: dict[int, int] = {}
        self._clock = 0
        self._told: tuple[float, float] | None = None
        self._fitted: tuple[dict[int, float], float, float] | None = None

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._by_size) or self._told is not None

    @property
    def is_told(self) -> bool:
        return self._told is not None

    def tell(self, base_ms: float, ms_per_unit: float) -> None:
        """What somebody else has measured: it stands until works of two sizes were seen here."""
        self._told, self._fitted = (base_ms, ms_per_unit), None

    def observe(self, size: int, ms: float) -> None:
        self._clock += 1
        self._fitted = None
        self._by_size.setdefault(size, Median(8)).add(ms)
        self._seen_at[size] = self._clock

    def ms(self, size: float) -> float:
        if self._fitted is None:
            self._fitted = self._fit()
        measured, base, slope = self._fitted
        return measured.get(size, base + slope * size)  # type: ignore[call-overload]

    def _fit(self) -> tuple[dict[int, float], float, float]:
        fresh = {n: m for n, m in self._by_size.items() if self._clock - self._seen_at[n] < FRESH_PASSES}
        if not fresh:
            base_ms, ms_per_unit = self._told or (0.0, 0.0)
            return {}, base_ms, ms_per_unit
        measured = {n: m.value() for n, m in fresh.items() if len(m) >= 3}
        relative_slope = self._relative_slope
        if self._told is not None and self._told[0] > 0:
            relative_slope = self._told[1] / self._told[0]
        base_ms, ms_per_unit = _line([(n, m.value(), len(m)) for n, m in fresh.items()], relative_slope)
        return measured, base_ms, ms_per_unit


def _line(points: list[tuple[int, float, int]], relative_slope: float) -> tuple[float, float]:
    """Weighted least squares through (x, y, weight), rising; with one x, a line of the assumed relative slope."""
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if spread > 0:
        slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread)
    else:
        slope = relative_slope * mean_y / (1 + relative_slope * mean_x)
    return max(0.0, mean_y - slope * mean_x), slope


class DraftCost:
    """Of one drafter: what a round pays for asking (network, queue), and for the drafts."""

    def __init__(self) -> None:
        self.network = Median()
        self.work = LineCost(PROPORTIONAL)
        self._fill = 1.0

    def observe(self, num_wanted: int, num_drafts: int, draft_ms: float, network_ms: float) -> None:
        self.network.add(network_ms)
        self._fill += 0.1 * (num_drafts / num_wanted - self._fill)
        self.work.observe(num_drafts, draft_ms)

    def num_drafted(self, num_wanted: int) -> float:
        """Drafts to expect of a drafter that does not always give as many as wanted."""
        return self._fill * num_wanted


class RoundCosts:
    """Of all the kinds of rounds of one model. Its streams share it."""

    def __init__(self) -> None:
        self.verify = LineCost(VERIFY_SLOPE)
        """The target's own time for a pass over γ + 1 rows of a stream, at the load of late, by γ."""
        self.verify_network = Median()
        self.plain = Median()
        """Time per token of a plain run, less its one round trip."""
        self._overhead = Median()
        self._step_overhead = Median()
        self._drafts: dict[str, DraftCost] = {}

    def draft(self, candidate: Candidate) -> DraftCost:
        return self._drafts.setdefault(candidate.learnt_as, DraftCost())

    def knows(self, candidate: Candidate) -> bool:
        """Whether anybody has measured what drafts of it take."""
        return bool(self.draft(candidate).work)

    def draft_ms(self, candidate: Candidate, num_draft_tokens: int) -> float:
        work = self.draft(candidate).work
        return work.ms(num_draft_tokens) if work else DRAFT_SHARE * num_draft_tokens * self.verify_ms(0)

    def verify_ms(self, num_draft_tokens: float) -> float:
        return self.verify.ms(num_draft_tokens) if self.verify else 1 + VERIFY_SLOPE * num_draft_tokens

    def row_ms(self, num_rows: int) -> float:
        """Of each of so many further rows of a pass."""
        return max(0.0, self.verify_ms(num_rows) - self.verify_ms(0)) / max(1, num_rows)

    def plain_ms(self, run_tokens: int) -> float:
        """Of a token of a plain run of so many."""
        ms = self.plain.value() if self.plain else self.verify_ms(0) + self._step_overhead.value()
        return ms + self.verify_network.value() / max(1, run_tokens)

    def round_ms(self, candidate: Candidate, num_draft_tokens: int) -> float:
        """Of a round that a draft worker is asked for, from the choice to the commit."""
        draft = self.draft(candidate)
        ms = draft.network.value() + self.draft_ms(candidate, num_draft_tokens)
        return ms + self.local_round_ms(draft.num_drafted(num_draft_tokens))

    def step_ms(self, candidate: Candidate, num_draft_tokens: int, run_steps: float) -> float:
        """Of a step of a run of so many, drafted for by the target itself."""
        ms = self.draft_ms(candidate, num_draft_tokens) + self._step_overhead.value()
        verify_ms = self.verify_ms(self.draft(candidate).num_drafted(num_draft_tokens))
        return ms + verify_ms + self.verify_network.value() / max(1.0, run_steps)

    def local_round_ms(self, num_draft_tokens: float) -> float:
        """Of a round whose drafts are at hand."""
        return self.verify_network.value() + self.verify_ms(num_draft_tokens) + self._overhead.value()

    def observe_round(self, report: RoundReport, candidate: Candidate) -> None:
        """A round that a draft worker was asked for. A level of a tree takes what a token of a chain does."""
        draft_network_ms = report.draft_network_ms + report.wait_ms
        num_wanted, num_drafts = report.choice.num_draft_tokens, report.num_own_drafts
        if report.parents:
            num_drafts = max(depths(report.parents))
            num_wanted = max(num_drafts, -(-num_wanted // max(1, report.choice.tree_width)))
        self.draft(candidate).observe(num_wanted, num_drafts, report.draft_ms, draft_network_ms)
        self.observe_verify(report)

    def observe_verify(self, report: RoundReport) -> None:
        """What any round with drafts tells of the target."""
        draft_network_ms = report.draft_network_ms + report.wait_ms
        self.verify.observe(report.num_draft_tokens, report.verify_ms)
        self.verify_network.add(report.verify_network_ms)
        known_ms = report.draft_ms + draft_network_ms + report.verify_ms + report.verify_network_ms
        self._overhead.add(max(0.0, report.round_ms - known_ms))

    def observe_step(self, report: RoundReport, candidate: Candidate) -> None:
        """A step that the target drafted for; the first of a run also tells of the network."""
        num_wanted = report.choice.num_draft_tokens
        self.draft(candidate).observe(num_wanted, report.num_draft_tokens, report.draft_ms, 0.0)
        self.verify.observe(report.num_draft_tokens, report.verify_ms)
        if report.verify_network_ms:
            self.verify_network.add(report.verify_network_ms)
        known_ms = report.draft_ms + report.verify_ms + report.verify_network_ms
        self._step_overhead.add(max(0.0, report.round_ms - known_ms))

    def observe_plain(self, report: RoundReport) -> None:
        if not report.num_committed:
            return
        self.verify.observe(0, report.verify_ms / report.num_committed)
        network_ms = self.verify_network.value(report.verify_network_ms)
        if report.num_committed == 1 and self.plain:
            return  # a run of one token says little about those without a round trip
        self.plain.add(max(report.verify_ms, report.round_ms - network_ms) / report.num_committed)
