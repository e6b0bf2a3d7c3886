"""Where the time of a round goes: draft, network, queue, verify, sampling, emit, and what none of them explains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.gamma.policy import MISS
from outrider.cli.measure import median, percentile
from outrider.results import Step

PREFILL = "prefill"
PARTS = ("draft", "network", "queue", "verify", "sampling", "emit", "other")
"""`verify` is the target's pass, `other` the coordinator's own time between the two workers."""


def parts_ms(step: Step) -> dict[str, float]:
    """One round by part. They add up to `round_ms` and `emit_ms`, except where clocks of three processes disagree."""
    known = step.draft_ms + step.network_ms + step.queue_ms + step.verify_ms
    return {
        "draft": step.draft_ms,
        "network": step.network_ms,
        "queue": step.queue_ms,
        "verify": max(0.0, step.verify_ms - step.sampling_ms),
        "sampling": step.sampling_ms,
        "emit": step.emit_ms,
        "other": max(0.0, step.round_ms - known),
    }


def mean_parts(steps: Iterable[Step]) -> dict[str, float]:
    """Mean ms per round of each part; empty without rounds."""
    rows = [parts_ms(step) for step in steps]
    return {part: sum(row[part] for row in rows) / len(rows) for part in PARTS} if rows else {}


def profile(steps: Sequence[Step]) -> dict[str, Any]:
    """Means, medians and 90th percentiles of each part over all rounds but the prompt's own pass, means by γ, and how
    often what was drafted ahead of a verdict was of use."""
    steps = [step for step in steps if step.reason != PREFILL]
    rows = [parts_ms(step) for step in steps]
    gammas = sorted({step.num_draft_tokens for step in steps})
    return {
        "num_rounds": len(rows),
        "round_ms": sum(step.round_ms for step in steps) / len(rows) if rows else 0.0,
        "mean_ms": mean_parts(steps),
        "p50_ms": {part: median(row[part] for row in rows) for part in PARTS},
        "p90_ms": {part: percentile((row[part] for row in rows), 0.9) for part in PARTS},
        "by_gamma": [_of_gamma(gamma, [step for step in steps if step.num_draft_tokens == gamma]) for gamma in gammas],
        "ahead": _ahead([step for step in steps if step.ahead]),
    }


def _ahead(steps: list[Step]) -> dict[str, Any]:
    """Of rounds that branches were drafted for; the lengths of those before them are theirs in the mean."""
    num_hits = sum(step.ahead != MISS for step in steps)
    return {
        "num_rounds": len(steps),
        "hit_rate": num_hits / len(steps) if steps else 0.0,
        "mean_num_draft_tokens": sum(step.num_draft_tokens for step in steps) / len(steps) if steps else 0.0,
    }


def _of_gamma(gamma: int, steps: list[Step]) -> dict[str, Any]:
    return {
        "num_draft_tokens": gamma,
        "num_rounds": len(steps),
        "mean_tokens": 1 + sum(step.num_accepted_draft_tokens for step in steps) / len(steps),
        "mean_ms": mean_parts(steps),
    }


def describe_parts(parts: dict[str, float]) -> str:
    """`draft 3.1, network 0.8, ...` in ms."""
    return ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items()) or "no rounds"
