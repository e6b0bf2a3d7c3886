"""A round as segments of its time, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.results import Step

COLOURS = {
    "draft": "cyan",
    "network": "yellow",
    "queue": "red",
    "verify": "green",
    "other": "bright_black",
}
"""Of each kind, as rich names them. `other` is the coordinator's own work, and waits for what never came."""


def segments(step: Step) -> Iterator[tuple[str, float]]:
    """(kind, ms), which sum to the round's time. Where a round trip is split between both ways nobody measures: half
    of it is drawn on each side of the work."""
    to_target_ms = step.network_ms - step.draft_network_ms
    parts = (
        ("network", step.draft_network_ms / 2),
        ("queue", step.draft_queue_ms),
        ("draft", step.draft_ms - step.draft_queue_ms),
        ("network", (step.draft_network_ms + to_target_ms) / 2),
        ("queue", step.queue_ms),
        ("verify", step.verify_ms),
        ("network", to_target_ms / 2),
    )
    left_ms = step.round_ms
    for kind, ms in parts:
        shown_ms = min(max(0.0, ms), left_ms)
        if shown_ms > 0:
            yield kind, shown_ms
            left_ms -= shown_ms
    if left_ms > 0:
        yield "other", left_ms


def totals(steps: Iterable[Step]) -> dict[str, float]:
    """ms of each kind, those that took none left out."""
    times = dict.fromkeys(COLOURS, 0.0)
    for step in steps:
        for kind, ms in segments(step):
            times[kind] += ms
    return {kind: ms for kind, ms in times.items() if ms > 0}
