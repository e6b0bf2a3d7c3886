"""Where the time of a stream goes: its rounds as parts that follow one another and leave nothing out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from coordinator.gamma.policy import HIT
from outrider.results import Step

DRAFT_NETWORK, DRAFT_QUEUE, DRAFT_COMPUTE = "draft_network", "draft_queue", "draft_compute"
VERIFY_NETWORK, VERIFY_QUEUE, VERIFY_COMPUTE, VERIFY_SAMPLING = (
    "verify_network",
    "verify_queue",
    "verify_compute",
    "verify_sampling",
)
PREFILL = "prefill_compute"
"""In the place of VERIFY_COMPUTE, in the round of the first token."""
COORDINATE = "coordinate"
"""The coordinator's own work, waits for its client, and for drafts that never came."""
EMIT = "emit"
"""The verdict's way into log, text and outbox."""
PARTS = (
    DRAFT_NETWORK, DRAFT_QUEUE, DRAFT_COMPUTE, VERIFY_NETWORK, VERIFY_QUEUE, VERIFY_COMPUTE, VERIFY_SAMPLING, PREFILL,
    COORDINATE, EMIT,
)  # fmt: skip


class TimedPart(NamedTuple):
    """In ms since the request arrived."""

    part: str
    start_ms: float
    end_ms: float


class RoundClock:
    """Of one stream. `at_ms`: where its last round ended."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def lay(self, step: Step) -> Iterator[TimedPart]:
        """The parts from the end of the last round to that of this one. How a round trip is split between both ways
        nobody measures: half of it is laid on each side of the work."""
        end_ms = step.start_ms + step.round_ms
        if step.start_ms > self.at_ms:
            yield self._until(step.start_ms, COORDINATE)
        for part, ms in _parts(step):
            until_ms = min(self.at_ms + ms, end_ms)
            if until_ms > self.at_ms:
                yield self._until(until_ms, part)
        if end_ms > self.at_ms:
            yield self._until(end_ms, COORDINATE)
        if step.emit_ms > 0:
            yield self._until(self.at_ms + step.emit_ms, EMIT)

    def _until(self, end_ms: float, part: str) -> TimedPart:
        start_ms, self.at_ms = self.at_ms, end_ms
        return TimedPart(part, start_ms, end_ms)


def _parts(step: Step) -> tuple[tuple[str, float], ...]:
    """In the order in which they happen; some of them 0."""
    to_draft_ms = step.draft_network_ms / 2
    to_target_ms = (step.network_ms - step.draft_network_ms) / 2
    is_drafted_now = step.ahead != HIT  # else while the target had the round before
    return (
        (DRAFT_NETWORK, to_draft_ms),
        (DRAFT_QUEUE, step.draft_queue_ms * is_drafted_now),
        (DRAFT_COMPUTE, (step.draft_ms - step.draft_queue_ms) * is_drafted_now),
        (DRAFT_NETWORK, to_draft_ms),
        (VERIFY_NETWORK, to_target_ms),
        (VERIFY_QUEUE, step.queue_ms),
        (PREFILL if step.reason == "prefill" else VERIFY_COMPUTE, step.verify_ms - step.sampling_ms),
        (VERIFY_SAMPLING, step.sampling_ms),
        (VERIFY_NETWORK, to_target_ms),
    )
