"""What the adaptive controller knows: how far drafts survive, and what each part of a round costs.

Survival is estimated by position from hazards (Kaplan-Meier): position i counts only in rounds that reached it, so that
tokens after a rejection, which nobody saw, do not bias it. accepted/proposed would be too low, more so with larger γ.
Costs are medians of the last few messages: one slow call moves nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from coordinator.gamma.policy import RoundReport

MAX_POSITIONS = 64
PRIOR_HAZARD = 0.7
"""Chance of acceptance assumed before anything was seen."""
LEAN_WEIGHT = 8.0
"""Observations that the prior counts for."""
FRESH_PASSES = 256
"""A pass size not seen among this many passes is stale."""


class Survival:
    """Chance that the first i drafts of one drafter are all there and all accepted.

    A proposal shorter than asked for fails at its end: a lookup that finds nothing is a failure at position 0.
    """

    def __init__(self, *, decay: float = 0.98, prior: Survival | None = None) -> None:
        self._decay = decay
        self._prior = prior
        self._reached = [0.0] * MAX_POSITIONS
        self._passed = [0.0] * MAX_POSITIONS
        self.num_rounds = 0

    def observe(self, num_wanted: int, num_accepted: int) -> None:
        """A round that asked for `num_wanted` drafts and saw the first `num_accepted` accepted, the next one not."""
        self.num_rounds += 1
        for i in range(MAX_POSITIONS):
            self._reached[i] *= self._decay
            self._passed[i] *= self._decay
        for i in range(min(num_accepted + 1, num_wanted, MAX_POSITIONS)):
            self._reached[i] += 1
            self._passed[i] += i < num_accepted

    def hazards(self, num_positions: int = MAX_POSITIONS) -> list[float]:
        """Per position the chance to pass it once it is reached. Where little was seen it leans on the prior, and
        without one on the position before."""
        prior = self._prior.hazards(num_positions) if self._prior is not None else None
        hazards: list[float] = []
        for i in range(num_positions):
            lean = prior[i] if prior is not None else (hazards[-1] if hazards else PRIOR_HAZARD)
            hazards.append((self._passed[i] + LEAN_WEIGHT * lean) / (self._reached[i] + LEAN_WEIGHT))
        return hazards

    def expected_tokens(self, max_draft_tokens: int) -> list[float]:
        """Entry γ: committed tokens a round when γ drafts are asked for, the correction or bonus included."""
        expected, alive = [1.0], 1.0
        for hazard in self.hazards(max_draft_tokens):
            alive *= hazard
            expected.append(expected[-1] + alive)
        return expected


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


class DraftCost:
    """Of one drafter: what a round pays for asking (network, queue), and for each drafted token."""

    def __init__(self) -> None:
        self._network = Median()
        self._per_token = Median()
        self._empty = Median()
        self._fill = 1.0

    def observe(self, num_wanted: int, num_draft_tokens: int, draft_ms: float, network_ms: float) -> None:
        self._network.add(network_ms)
        self._fill += 0.1 * (num_draft_tokens / num_wanted - self._fill)
        if num_draft_tokens:
            self._per_token.add(draft_ms / num_draft_tokens)
        else:
            self._empty.add(draft_ms)

    def num_drafted(self, num_wanted: int) -> float:
        """Drafts to expect: a lookup that finds nothing proposes none."""
        return self._fill * num_wanted

    def ms(self, num_wanted: int) -> float:
        drafted_ms = self._per_token.value() * self.num_drafted(num_wanted)
        return self._network.value() + max(drafted_ms, self._empty.value())


class VerifyCost:
    """The target's own time for a pass over γ + 1 rows of this stream, at the load of late."""

    SLOPE = 0.03
    """Assumed growth per row, relative to one row, until passes of different sizes were seen."""

    def __init__(self) -> None:
        self._by_gamma: dict[int, Median] = {}
        self._seen_at: dict[int, int] = {}
        self._clock = 0
        self._fitted: tuple[dict[int, float], float, float] | None = None

    def observe(self, num_draft_tokens: int, verify_ms: float) -> None:
        self._clock += 1
        self._fitted = None
        self._by_gamma.setdefault(num_draft_tokens, Median(8)).add(verify_ms)
        self._seen_at[num_draft_tokens] = self._clock

    def ms(self, num_draft_tokens: float) -> float:
        """Measured where measured of late, else on the line through what was measured of late."""
        if self._fitted is None:
            fresh = {g: m for g, m in self._by_gamma.items() if self._clock - self._seen_at[g] < FRESH_PASSES}
            measured = {g: m.value() for g, m in fresh.items() if len(m) >= 3}
            self._fitted = (measured, *_line([(g, m.value(), len(m)) for g, m in fresh.items()], self.SLOPE))
        measured, base, slope = self._fitted
        return measured.get(num_draft_tokens, base + slope * num_draft_tokens)  # type: ignore[call-overload]


def _line(points: list[tuple[int, float, int]], relative_slope: float) -> tuple[float, float]:
    """Weighted least squares through (x, y, weight), rising; with one x, a line of the assumed relative slope."""
    total = sum(w for _, _, w in points)
    if not total:
        return 0.0, 0.0
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if spread > 0:
        slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread)
    else:
        slope = relative_slope * mean_y / (1 + relative_slope * mean_x)
    return max(0.0, mean_y - slope * mean_x), slope


class PairEstimates:
    """Shared by all streams of a model: costs, and survival as a prior for new streams."""

    def __init__(self) -> None:
        self.verify = VerifyCost()
        self.verify_network = Median()
        self.plain = Median()
        """Time per token of a plain run, less its one round trip."""
        self._overhead = Median()
        self._draft: dict[str, DraftCost] = {}
        self._survival: dict[str, Survival] = {}

    def survival(self, drafter: str) -> Survival:
        return self._survival.setdefault(drafter, Survival(decay=0.995))

    def round_ms(self, drafter: str, num_draft_tokens: int) -> float:
        """Of a speculative round, from the choice to the commit."""
        draft = self._draft_cost(drafter)
        verify_ms = self.verify.ms(draft.num_drafted(num_draft_tokens))
        return draft.ms(num_draft_tokens) + self.verify_network.value() + verify_ms + self._overhead.value()

    def local_round_ms(self, num_draft_tokens: int) -> float:
        """Of a round whose drafts are at hand."""
        return self.verify_network.value() + self.verify.ms(num_draft_tokens) + self._overhead.value()

    def observe_round(self, report: RoundReport) -> None:
        """A round that a drafter was asked for."""
        draft_network_ms = report.draft_network_ms + report.wait_ms
        self._draft_cost(report.choice.drafter).observe(
            report.choice.num_draft_tokens, report.num_own_drafts, report.draft_ms, draft_network_ms
        )
        self.observe_verify(report)

    def observe_verify(self, report: RoundReport) -> None:
        """What any round with drafts tells of the target."""
        draft_network_ms = report.draft_network_ms + report.wait_ms
        self.verify.observe(report.num_draft_tokens, report.verify_ms)
        self.verify_network.add(report.verify_network_ms)
        known_ms = report.draft_ms + draft_network_ms + report.verify_ms + report.verify_network_ms
        self._overhead.add(max(0.0, report.round_ms - known_ms))

    def observe_plain(self, report: RoundReport) -> None:
        if not report.num_committed:
            return
        self.verify.observe(0, report.verify_ms / report.num_committed)
        network_ms = self.verify_network.value(report.verify_network_ms)
        if report.num_committed == 1 and self.plain:
            return  # a run of one token says little about those without a round trip
        self.plain.add(max(report.verify_ms, report.round_ms - network_ms) / report.num_committed)

    def _draft_cost(self, drafter: str) -> DraftCost:
        return self._draft.setdefault(drafter, DraftCost())
