"""Which streams are suspects when target workers die, how they are tried, and which of them fail alone."""

from __future__ import annotations

import asyncio

import pytest
from moving_streams import (
    DIED,
    DRAFTS,
    DRAINS,
    FULL,
    SILENT,
    another_choice,
    begun,
    make,
    no_pauses,  # noqa: F401  # the fixture
)

import coordinator.suspicion as suspicion_module
from coordinator.fleet.deaths import Deaths
from coordinator.gamma.policy import Choice
from coordinator.suspicion import (
    CLOSE_TOKENS,
    LATE_MS,
    MAX_CLOSE_DEATHS,
    MAX_TRIAL_TOKENS,
    TRIAL_TOKENS,
    RequestSuspicion,
    trial_tokens,
)
from coordinator.verifying import TargetSide
from outrider.errors import Internal, Unavailable


async def test_a_stream_that_is_there_when_two_workers_die_fails_alone_only_if_it_had_its_turn() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [SILENT]
    with pytest.raises(Internal, match="one after another") as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "POISONED_REQUEST"
    assert pool.questions == [("a", 3), ("b", 3)], "no third worker"
    assert pool.suspected == [0, 1]
    assert (counts.causes, counts.num_poisoned) == ({"died": 1, "silent": 1}, 1)
    side.close()
    assert pool.num_open == 0


async def test_a_worker_that_still_answers_was_not_killed() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.dies = False
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1]
    assert not counts.num_poisoned


async def test_one_that_answers_after_all_was_no_death_whichever_it_was() -> None:
    for alive in "ab":
        side, pool, _, counts = await begun("a", "b", "c", "d")
        pool.lives = {f"process at {alive}"}
        for address in "ab":
            pool.faults[address, "computes"] = [DIED]
        await side.verify(DRAFTS)
        assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
        assert pool.suspected == [0, 1, 1], "of the other one it is a suspect still"
        assert not counts.num_poisoned

    side, pool, _, counts = await begun("a", "b", "c", "d")
    pool.lives = {"process at a"}
    for address in "abc":
        pool.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal):
        await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)], "the second that died"


async def test_silent_workers_are_waited_for_before_a_stream_is_found_guilty() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [SILENT]
    pool.faults["b", "computes"] = [SILENT]
    suspicion_module.SILENT_DOUBT_S = 10.0
    going_on = asyncio.create_task(side.verify(DRAFTS))
    await asyncio.sleep(0.05)
    assert not going_on.done()
    pool.lives = {"process at a"}  # it stood still, and goes on
    await going_on
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
    assert not counts.num_poisoned


async def test_what_another_request_was_found_to_have_killed_does_not_count() -> None:
    side, pool, stream, counts = await begun("a", "b", "c", "d")
    pool.faults["a", "computes"] = [DIED]
    stream.commit((await side.verify(DRAFTS)).verdict)
    pool.deaths.explained({"process at a"})
    pool.faults["b", "computes"] = [DIED]
    stream.commit((await side.verify(DRAFTS)).verdict)
    pool.faults["c", "computes"] = [DIED]
    pool.deaths.explained({"process at b"})
    await side.verify(DRAFTS)
    assert not counts.num_poisoned

    side, pool, stream, counts = await begun("a", "b")
    for _ in range(3 * MAX_CLOSE_DEATHS):  # others' deadly requests, each found out
        address = pool.openings[-1][0]
        pool.faults = {(address, "computes"): [DIED]}
        stream.commit((await side.verify(DRAFTS)).verdict)
        pool.deaths.explained({f"process at {address}"})
    assert not counts.num_poisoned


@pytest.mark.parametrize("num_choices", [2, 5])
async def test_a_request_with_many_choices_kills_no_more_workers_than_one_with_one(num_choices: int) -> None:
    workers = [f"worker {number}" for number in range(9)]
    _, pool, _, _ = make(*workers)
    pool.deaths = Deaths()
    suspicion = RequestSuspicion()
    choices = [another_choice(pool, suspicion) for _ in range(num_choices)]
    for side, _ in choices:
        await side.open()
    dead: set[str] = set()

    def kills(address: str, moment: str) -> Unavailable | None:
        if moment != "computes" and address not in dead:
            return None
        dead.add(address)
        return DIED

    for _, other in choices:
        other.error_at = kills  # type: ignore[method-assign]

    async def goes_on(side: TargetSide) -> None:
        try:
            await side.verify(DRAFTS)
        finally:
            side.close()

    ends = await asyncio.gather(*(goes_on(side) for side, _ in choices), return_exceptions=True)
    assert dead == {"worker 0", "worker 1"}
    assert [getattr(end, "reason", "") for end in ends] == ["POISONED_REQUEST"] * num_choices


async def test_choices_of_a_request_are_tried_one_at_a_time_and_all_go_on() -> None:
    _, pool, _, _ = make("a", "b")
    suspicion = RequestSuspicion()
    choices = [another_choice(pool, suspicion) for _ in range(4)]
    for side, _ in choices:
        await side.open()
    pool.faults["a", "computes"] = [DIED] * 4
    await asyncio.gather(*(side.verify(DRAFTS) for side, _ in choices))
    assert pool.suspected == [0] * 4 + [1] * 4
    assert not any(stream.is_suspect for stream in suspicion.streams)
    assert not suspicion.alone.locked()


async def test_where_workers_die_anyway_a_suspect_is_tried_alone_once_more_and_no_further_time() -> None:
    side, pool, _, counts = await begun("a", "b", "c", "d")
    pool.deaths.lost("one that computed others")
    for address in "ab":
        pool.faults[address, "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1], "alone"
    assert not counts.num_poisoned

    side, pool, _, counts = await begun("a", "b", "c", "d")
    pool.deaths.lost("one that computed others")
    for address in "abc":
        pool.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal) as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "POISONED_REQUEST"
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)], "no fourth worker"
    assert counts.num_poisoned == 1


async def test_a_stream_that_comes_again_is_not_spared_for_the_workers_that_it_has_killed_before() -> None:
    side, pool, _, _ = await begun("a", "b")
    for address in "ab":
        pool.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal):
        await side.verify(DRAFTS)
    pool.deaths.lost("process at b")  # as a probe finds it, later
    again, other, _, _ = await begun("c", "d", "e")
    other.deaths = pool.deaths
    for address in "cd":
        other.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal):
        await again.verify(DRAFTS)
    assert other.questions == [("c", 3), ("d", 3)]


async def test_a_suspect_that_waits_for_its_turn_when_the_next_worker_dies_is_no_worse() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "waits"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1], "and is a suspect still"
    assert not counts.num_poisoned


async def test_a_suspect_is_cleared_by_the_tokens_that_were_being_decided() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    for _ in range(3):  # whichever worker it is on dies, a token later each time
        for address in ("a", "b", "c"):
            pool.faults[address, "computes"] = []
        pool.faults[pool.openings[-1][0], "computes"] = [DIED]
        stream.commit((await side.verify(DRAFTS)).verdict)
    assert pool.suspected == [0, 1, 1, 1]


async def test_a_worker_that_was_asked_nothing_when_it_died_makes_no_suspect() -> None:
    side, pool, _, _ = await begun("a", "b", "c")
    for cause in (DRAINS, FULL, Unavailable("stops", reason="WORKER_STOPPED")):
        pool.faults[pool.openings[-1][0], "computes"] = [cause]
        await side.verify(DRAFTS)
    pool.faults[pool.openings[-1][0], "stops"] = [DIED]
    await side.stop_decoding()
    assert not any(pool.suspected)


async def test_a_run_is_on_trial_for_as_many_tokens_as_its_dead_worker_may_have_decided_unheard() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [*[None] * (TRIAL_TOKENS - 1), DIED]  # type: ignore[list-item]
    with pytest.raises(Internal):
        async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
            stream.commit(timed.verdict)
    assert pool.suspected == [0, TRIAL_TOKENS]

    side, pool, stream, _ = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [*[None] * TRIAL_TOKENS, DIED]  # type: ignore[list-item]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
        stream.commit(timed.verdict)
    assert len(stream.log.output_ids) == 51


async def test_a_trial_that_is_longer_than_deaths_are_close_finds_its_stream_guilty_all_the_same() -> None:
    side, pool, stream, counts = await begun("a", "b", "c")
    pool.work_ms = LATE_MS / 50
    pool.faults["a", "computes"] = [None, None, DIED]  # type: ignore[list-item]
    pool.faults["b", "computes"] = [*[None] * (CLOSE_TOKENS + 10), DIED]  # type: ignore[list-item]
    with pytest.raises(Internal):
        async for timed in side.decode(Choice("", 0, "off", credit_tokens=100)):
            stream.commit(timed.verdict)
    assert pool.suspected == [0, 50], "no third worker"
    assert counts.num_poisoned == 1


async def test_a_quick_run_is_on_trial_for_what_was_decided_while_news_were_late() -> None:
    """Else the one that killed the first worker is cleared, and another one is on trial when it kills the second."""
    side, pool, stream, _ = await begun("a", "b", "c")
    pool.work_ms = LATE_MS / 10
    pool.faults["a", "computes"] = [None, None, DIED]  # type: ignore[list-item]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
        stream.commit(timed.verdict)
    assert pool.suspected == [0, 10]


async def test_a_stream_is_past_its_trial_once_the_next_one_has_its_turn_though_not_all_was_heard_of() -> None:
    side, pool, stream, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [None, None, DIED]  # type: ignore[list-item]
    num_heard = 0
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
        stream.commit(timed.verdict)
        num_heard += 1
        if num_heard == 2:  # of the four of its trial
            pool.trials.begins("process at b")
    assert len(stream.log.output_ids) == 51
    assert pool.suspected == [0, TRIAL_TOKENS, TRIAL_TOKENS], "a suspect still: it was there"
    assert not counts.num_poisoned


@pytest.mark.parametrize(
    ("num_left", "token_ms", "expected"),
    [(50, 0.0, TRIAL_TOKENS), (50, LATE_MS, TRIAL_TOKENS), (50, 10.0, 25), (7, 10.0, 7), (500, 0.1, MAX_TRIAL_TOKENS)],
)
def test_how_long_a_trial_is(num_left: int, token_ms: float, expected: int) -> None:
    assert trial_tokens(num_left, token_ms) == expected


async def test_a_stream_that_kills_its_workers_a_token_apart_does_not_go_round_for_ever() -> None:
    side, pool, stream, _ = await begun("a", "b")

    async def lose() -> None:
        pool.faults = {(pool.openings[-1][0], "computes"): [DIED]}
        stream.commit((await side.verify(DRAFTS)).verdict)

    for _ in range(MAX_CLOSE_DEATHS):
        await lose()
    with pytest.raises(Internal):
        await lose()
    assert len(pool.openings) == 1 + MAX_CLOSE_DEATHS


async def test_a_stream_with_tokens_between_outlives_any_number_of_workers() -> None:
    side, pool, stream, counts = await begun("a", "b")
    for _ in range(3 * MAX_CLOSE_DEATHS):
        pool.faults = {(pool.openings[-1][0], "computes"): [DIED]}
        for _ in range(CLOSE_TOKENS):
            stream.commit((await side.verify(DRAFTS)).verdict)
    assert counts.num_recoveries == 3 * MAX_CLOSE_DEATHS
    assert not counts.num_poisoned
