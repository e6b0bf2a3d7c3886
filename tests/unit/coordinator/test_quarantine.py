"""Who proposes what cannot be is asked no more; time alone does not bring a broken process back."""

from __future__ import annotations

from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.quarantine import FORGIVEN_AFTER, MAX_CONDEMNED, Quarantine
from coordinator.fleet.standing import CIRCUIT_OPEN, QUARANTINED, Conduct, Standings
from outrider.settings import CoordinatorSettings


def quarantine(max_bad: int = 3, incarnation: str = "a") -> Quarantine:
    one = Quarantine(max_bad)
    one.meet(incarnation)
    return one


def test_at_the_threshold_and_not_before() -> None:
    one = quarantine()
    for _ in range(2):
        one.bad("a", "torn q")
    assert not one.reason
    one.bad("a", "7 bytes of q_ids")
    assert "3 bad proposals" in one.reason
    assert "7 bytes of q_ids" in one.reason


def test_no_time_and_no_good_proposals_bring_it_back_and_another_process_does() -> None:
    one = quarantine(max_bad=1)
    one.bad("a", "torn q")
    for _ in range(5 * FORGIVEN_AFTER):
        one.good("a")
    one.meet("a")
    assert one.reason
    one.meet("b")
    assert not one.reason
    one.meet("a")
    assert one.reason, "two processes behind one address: the broken one is known again"
    assert one.num_bad == 1


def test_what_a_process_did_that_has_gone_is_not_held_against_the_next() -> None:
    one = quarantine(max_bad=1)
    one.meet("b")
    one.bad("a", "came late")
    assert not one.reason
    assert one.num_bad == 1


def test_a_bad_one_in_very_many_is_made_up_for() -> None:
    one = quarantine()
    for _ in range(20):
        one.bad("a", "a bit flipped")
        for _ in range(FORGIVEN_AFTER):
            one.good("a")
    assert not one.reason
    assert one.num_bad == 20


@settings(max_examples=scaled(300, at_least=50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["meet", "good", "bad"])), max_size=200))
def test_a_process_once_condemned_stays_so(steps: list[tuple[str, str]]) -> None:
    one, present, num_bad, condemned = quarantine(incarnation="a"), "a", {"a": 0, "b": 0}, set()
    for incarnation, what in steps:
        if what == "meet":
            if incarnation != present:
                num_bad[incarnation] = 0
            present = incarnation
            one.meet(incarnation)
        elif what == "good":
            one.good(incarnation)
        else:
            one.bad(incarnation, "x")
            num_bad[incarnation] += incarnation == present
            if num_bad[incarnation] >= 3 and incarnation == present:
                condemned.add(incarnation)
        assert bool(one.reason) == (present in condemned)


def test_what_is_remembered_is_bounded() -> None:
    one = Quarantine(1)
    for number in range(3 * MAX_CONDEMNED):
        one.meet(str(number))
        one.bad(str(number), "x")
    assert len(one._condemned) == MAX_CONDEMNED
    assert one.reason


def test_standings_outlive_workers_that_come_and_go() -> None:
    standings = Standings(CoordinatorSettings(max_bad_proposals=2, draft_breaker_share=0.02))
    standing = standings.of("host:1")
    standing.quarantine.meet("a")
    conduct = Conduct(standing, "a")
    conduct.bad("torn q")
    assert standing.why_not("stream", 0.0) == ""
    conduct.bad("torn q")
    assert standings.of("host:1").why_not("stream", 0.0) == QUARANTINED
    assert "another process" in standing.fault(0.0)
    assert standings.of("host:2").why_not("stream", 0.0) == ""
    standing.quarantine.meet("b")
    standing.breaker.failed(0.0, 5.0)
    assert standing.why_not("stream", 0.0) == CIRCUIT_OPEN
    assert "circuit open" in standing.fault(0.0)
    assert not standing.takes_streams(0.0)
