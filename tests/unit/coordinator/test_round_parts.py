"""The parts of a stream's rounds follow one another, leave nothing out, and are what was measured."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from conftest import scaled

from coordinator.round_parts import COORDINATE, DRAFT_COMPUTE, EMIT, PARTS, PREFILL, RoundClock
from outrider.results import Step


def step(**values: float | str) -> Step:
    told: dict[str, float | str] = {
        "num_draft_tokens_wanted": 3, "num_draft_tokens": 3, "num_accepted_draft_tokens": 1, "drafter": "model",
        "draft_ms": 0.0, "verify_ms": 0.0, "network_ms": 0.0, "queue_ms": 0.0, "round_ms": 0.0, "reason": "best",
    }  # fmt: skip
    return Step(**(told | values))  # type: ignore[arg-type]


def lay(clock: RoundClock, one: Step) -> dict[str, float]:
    times = dict.fromkeys(PARTS, 0.0)
    for part, start_ms, end_ms in clock.lay(one):
        times[part] += end_ms - start_ms
    return {part: round(ms, 6) for part, ms in times.items() if ms}


def test_a_round_is_its_parts_in_order() -> None:
    one = step(
        start_ms=10.0, round_ms=40.0, draft_ms=6.0, draft_queue_ms=1.0, network_ms=5.0, draft_network_ms=2.0,
        queue_ms=3.0, verify_ms=20.0, sampling_ms=0.5, emit_ms=0.25,
    )  # fmt: skip
    clock = RoundClock(8.0)
    assert [part for part, *_ in clock.lay(one)] == [
        COORDINATE, "draft_network", "draft_queue", DRAFT_COMPUTE, "draft_network", "verify_network", "verify_queue",
        "verify_compute", "verify_sampling", "verify_network", COORDINATE, EMIT,
    ]  # fmt: skip
    assert clock.at_ms == 50.25
    assert lay(RoundClock(8.0), one) == {
        COORDINATE: 8.0, "draft_network": 2.0, "draft_queue": 1.0, DRAFT_COMPUTE: 5.0, "verify_network": 3.0,
        "verify_queue": 3.0, "verify_compute": 19.5, "verify_sampling": 0.5, EMIT: 0.25,
    }  # fmt: skip


def test_the_first_round_is_the_prompts_and_a_branch_was_drafted_before() -> None:
    assert lay(RoundClock(0.0), step(reason="prefill", round_ms=9.0, verify_ms=9.0)) == {PREFILL: 9.0}
    hit = step(ahead="hit", round_ms=9.0, verify_ms=8.0, draft_ms=7.0)
    assert lay(RoundClock(0.0), hit) == {"verify_compute": 8.0, COORDINATE: 1.0}


@pytest.mark.parametrize("seed", range(scaled(200, at_least=20)))
def test_nothing_is_left_out_or_counted_twice(seed: int) -> None:
    """Whatever was measured: rounds that overlap, parts that are longer than their round."""
    rng = random.Random(seed)
    at_ms = start_ms = rng.uniform(0, 5)
    clock, laid = RoundClock(at_ms), []
    for _ in range(20):
        names = ("draft_ms", "verify_ms", "queue_ms", "emit_ms", "round_ms")
        values = {name: rng.choice((0.0, rng.uniform(0, 20))) for name in names}
        network_ms = rng.uniform(0, 4)
        at_ms += rng.uniform(-5, 10)
        one = step(
            **values,
            start_ms=at_ms,
            network_ms=network_ms,
            draft_network_ms=rng.uniform(0, network_ms),
            draft_queue_ms=rng.uniform(0, values["draft_ms"]),
            sampling_ms=rng.uniform(0, values["verify_ms"]),
            ahead=rng.choice(("", "hit", "late")),
        )
        laid += clock.lay(one)
        assert clock.at_ms >= one.start_ms + one.round_ms
        at_ms += one.round_ms
    assert laid[0].start_ms == start_ms
    assert all(before.end_ms == after.start_ms for before, after in pairwise(laid))
    assert all(timed.end_ms > timed.start_ms for timed in laid)
    assert sum(end_ms - began_ms for _, began_ms, end_ms in laid) == pytest.approx(clock.at_ms - start_ms)
