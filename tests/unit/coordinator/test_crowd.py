"""Streams that are away from a target all at once: every second one comes back earlier, where that pays."""

from __future__ import annotations

import pytest

from coordinator.gamma.crowd import MAX_PATIENCE, REST_ROUNDS, Crowd
from coordinator.gamma.plans import Objective, Plan
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates

NUM_STREAMS = 8
MODEL = Candidate("model")


def crowd(idle_ms: float, *, num_rounds: int = 40) -> Crowd:
    found = Crowd()
    found.passed(60.0, NUM_STREAMS)
    rounds(found, idle_ms, num_rounds)
    return found


def rounds(found: Crowd, idle_ms: float, num_rounds: int) -> None:
    for _ in range(num_rounds):
        found.observe(idle_ms, NUM_STREAMS)


def test_every_second_stream_of_a_crowd_comes_back_earlier_once() -> None:
    found = crowd(idle_ms=50.0)
    early = [found.sends_early(40.0) for _ in range(3 * NUM_STREAMS)]
    assert early[:NUM_STREAMS] == [True, False] * (NUM_STREAMS // 2)
    assert not any(early[NUM_STREAMS:]), "it has parted"


def test_a_target_that_is_busy_or_idles_for_less_than_a_pass_has_no_crowd_to_part() -> None:
    assert not Crowd().sends_early(0.1)
    assert not any(crowd(idle_ms=idle_ms).sends_early(40.0) for idle_ms in (-5.0, 0.0, 39.0))


def test_where_it_was_in_vain_it_is_done_ever_more_seldom() -> None:
    found, rests = crowd(idle_ms=50.0), []
    for _ in range(8):
        assert [found.sends_early(40.0) for _ in range(NUM_STREAMS)].count(True) == NUM_STREAMS // 2
        num_rounds = 0
        while not found.sends_early(40.0):
            found.observe(50.0, NUM_STREAMS)
            num_rounds += 1
        rests.append(num_rounds)
        for _ in range(NUM_STREAMS - 1):
            found.sends_early(40.0)
        rounds(found, 50.0, 2 * MAX_PATIENCE * REST_ROUNDS * NUM_STREAMS)
    assert rests[0] == REST_ROUNDS * NUM_STREAMS
    assert rests[-1] == MAX_PATIENCE * REST_ROUNDS * NUM_STREAMS
    assert sorted(rests) == rests
    rounds(found, 0.0, 200)
    assert not found.sends_early(40.0), "it has helped at last"
    rounds(found, 50.0, 200)
    assert [found.sends_early(40.0) for _ in range(NUM_STREAMS)].count(True) == NUM_STREAMS // 2
    rounds(found, 50.0, REST_ROUNDS * NUM_STREAMS)
    assert found.sends_early(40.0), "so soon again"


def test_passes_are_counted_once_by_all_their_streams_together() -> None:
    found = Crowd()
    for _ in range(NUM_STREAMS):
        found.passed(60.0, NUM_STREAMS)
    found.passed(35.0, 1)
    assert found.passes_ms == pytest.approx(95.0)
    assert found.num_streams == 1


def in_step(num_streams: int, num_rounds: int = 20) -> tuple[Objective, Plan]:
    """All in one pass of 30 ms + 0.3 a row, away for 12 ms + 4 a draft, γ = 12."""
    shared = PairEstimates()
    streams, gamma = [Objective(shared) for _ in range(num_streams)], 12
    choice = Choice("model", gamma, "best", candidate=MODEL)
    for round_index in range(num_rounds):
        for stream in streams:
            num_drafts = gamma - (round_index < 2)  # two sizes, for a slope
            rows = num_streams * (1 + num_drafts)
            draft_ms, verify_ms = 4.0 * num_drafts, 30 + 0.3 * rows
            report = RoundReport(
                choice=choice, num_draft_tokens=num_drafts, num_committed=8, draft_ms=draft_ms, draft_network_ms=10.0,
                verify_ms=verify_ms, verify_network_ms=2.0, round_ms=12 + draft_ms + verify_ms, target="t",
                num_batch_rows=rows,
            )  # fmt: skip
            stream.heard_of(report)
            stream.costs.observe_round(report, MODEL)
    costs = streams[0].costs
    return streams[0], Plan("model", gamma, 8.0, costs.round_ms(MODEL, gamma), MODEL)


def test_half_of_a_crowd_takes_as_many_drafts_as_let_it_be_served_before_the_others_are_back() -> None:
    objective, plan = in_step(8)
    costs = objective.costs
    assert costs.load.crowd.num_streams == pytest.approx(8, rel=0.01)
    assert costs.load.crowd.idle_ms == pytest.approx(12 + 48, rel=0.1), "while all are away"
    plans = [objective.parted(plan) for _ in range(8)]
    assert [one is plan for one in plans] == [False, True] * 4
    fewer = plans[0].num_draft_tokens
    away_ms = {gamma: 12 + 4.0 * gamma for gamma in range(13)}
    assert away_ms[fewer] + 30 + 0.3 * 4 * (1 + fewer) <= away_ms[12] + 1
    assert away_ms[fewer + 1] + 30 + 0.3 * 4 * (2 + fewer) > away_ms[12] - 1
    assert (plans[0].candidate, plans[0].tokens < plan.tokens) == (MODEL, True)


def test_streams_that_win_little_by_parting_stay_together() -> None:
    objective, plan = in_step(2)
    assert objective.costs.load.crowd.idle_ms > 50
    assert objective.parted(plan) is plan, "a pass over one of them is hardly shorter"
    objective, plan = in_step(8)
    plain = Plan("", 0, 4.0, 120.0)
    inside = Plan("head", 3, 4.0, 40.0, Candidate("head", on_target=True))
    assert objective.parted(plain) is plain
    assert objective.parted(inside) is inside, "no stream is away from the target by these"
