"""Deaths of late: processes that are gone, once each, but for those that a stream has killed."""

from coordinator.fleet.deaths import MAX_REMEMBERED, MEMORY_S, Deaths


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_processes_are_counted_once_each_besides_those_that_one_knows_of() -> None:
    deaths = Deaths(Clock())
    for incarnation in ("a", "b", "a", "b", "c", ""):
        deaths.lost(incarnation)
    assert deaths.num_besides(()) == 3
    assert deaths.num_besides({"a", "c"}) == 1
    assert deaths.num_besides({"a", "b", "c", "d"}) == 0


def test_one_that_answers_was_not_dead_and_one_of_long_ago_says_nothing() -> None:
    clock = Clock()
    deaths = Deaths(clock)
    deaths.lost("a")
    deaths.answers("a")
    assert not deaths.num_besides(())
    deaths.lost("b")
    clock.now += MEMORY_S / 2
    deaths.lost("c")
    deaths.lost("b")
    clock.now += MEMORY_S / 2 + 1
    assert deaths.num_besides(()) == 1
    assert deaths.num_besides({"c"}) == 0


def test_those_that_a_stream_has_killed_say_nothing_about_others_however_often_they_are_found() -> None:
    deaths = Deaths(Clock())
    deaths.lost("a")
    deaths.explained({"a", "b"})
    deaths.lost("a")
    deaths.lost("b")
    assert not deaths.num_besides(())


def test_its_memory_is_bounded() -> None:
    deaths = Deaths(Clock())
    for number in range(2 * MAX_REMEMBERED):
        deaths.lost(f"lost {number}")
        deaths.explained({f"killed {number}"})
    assert deaths.num_besides(()) == MAX_REMEMBERED


def test_what_has_died_is_known_until_it_answers_and_so_is_what_a_stream_has_killed() -> None:
    deaths = Deaths(Clock())
    deaths.lost("a")
    deaths.explained({"b"})
    assert deaths.has_died("a")
    assert deaths.has_died("b")
    assert not deaths.has_died("c")
    assert (deaths.is_explained("a"), deaths.is_explained("b")) == (False, True)
    for incarnation in "ab":
        deaths.answers(incarnation)
        assert not deaths.has_died(incarnation)
        assert not deaths.is_explained(incarnation)
