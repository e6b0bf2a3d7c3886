"""Moving between target workers: who is tried again, what is asked there, and when it is enough."""

from __future__ import annotations

import asyncio

import pytest
from moving_streams import (
    DIED,
    DRAFTS,
    DRAINS,
    FORGOTTEN,
    FULL,
    begun,
    make,
    no_pauses,  # noqa: F401  # the fixture
)

import coordinator.failover as failover
from coordinator.failover import MAX_FORGOTTEN
from coordinator.gamma.policy import Choice
from outrider.errors import Aborted, InvalidArgument, ResourceExhausted, Unavailable


async def test_another_worker_is_asked_the_same_from_the_log_and_says_that_it_took_a_prefill() -> None:
    side, pool, stream, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [DIED]
    timed = await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3)], "the very same drafts"
    assert [(address, epoch) for address, epoch, _ in pool.openings] == [("a", 1), ("b", 2)]
    assert pool.openings[-1][2] == tuple(stream.log.output_ids), "an opening holds all that is committed"
    assert timed.is_recovery
    assert not (await side.verify(DRAFTS)).is_recovery
    assert (counts.causes, counts.num_recoveries) == ({"died": 1}, 1)
    side.close()
    assert pool.num_open == 0


async def test_a_worker_that_failed_is_tried_again_once_another_has_given_a_token() -> None:
    side, pool, _, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [DRAINS]
    pool.faults["b", "computes"] = [DRAINS]
    await side.verify(DRAFTS)
    assert [address for address, _, _ in pool.openings] == ["a", "b", "a"]


async def test_the_first_token_is_asked_for_elsewhere_too() -> None:
    side, pool, stream, _ = make("a", "b")
    pool.faults["a", "opens"] = [DIED]
    timed = await side.open()
    assert pool.openings == [("a", 1, ()), ("b", 2, ())]
    assert timed.is_recovery
    assert timed.verdict.header == stream.log.header(2)


async def test_no_worker_at_all_is_told_at_once() -> None:
    side, _, _, _ = make()
    with pytest.raises(Unavailable, match="nobody left"):
        await side.open()
    side.close()


async def test_a_run_goes_on_with_what_is_left_of_it() -> None:
    side, pool, stream, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [None, None, DIED]  # type: ignore[list-item]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=5)):
        stream.commit(timed.verdict)
    assert len(stream.log.output_ids) == 1 + 5
    assert pool.questions == [("a", 5, "", 0), ("b", 3, "", 0)]


async def test_a_run_that_was_told_to_end_is_told_so_again_behind_its_next_token() -> None:
    side, pool, stream, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [None, DIED]  # type: ignore[list-item]
    pool.faults["a", "stops"] = [DIED]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=9)):
        stream.commit(timed.verdict)
        if len(stream.log.output_ids) == 2:
            await side.stop_decoding()
        if len(stream.log.output_ids) == 3:
            break
    assert pool.questions == [("a", 9, "", 0), ("a", "stop"), ("b", 8, "", 0), ("b", "stop")]


async def test_drafts_of_its_own_are_asked_of_a_worker_that_has_the_drafter() -> None:
    for offered, asked in ((("eagle",), ("b", 4, "eagle", 3)), ((), ("b", 4, "", 0))):
        side, pool, stream, _ = await begun("a", "b")
        pool.drafters = {"a": ("eagle",), "b": offered}
        pool.faults["a", "computes"] = [DIED]
        async for timed in side.decode(Choice("eagle", 3, "best", credit_tokens=4)):
            stream.commit(timed.verdict)
        assert pool.questions == [("a", 4, "eagle", 3), asked]


async def test_a_run_with_drafts_of_its_own_goes_to_a_worker_that_makes_the_same_ones() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    pool.drafters = {"a": ("eagle",), "c": ("eagle",)}
    pool.faults["a", "computes"] = [DIED]
    async for timed in side.decode(Choice("eagle", 3, "best", credit_tokens=4)):
        stream.commit(timed.verdict)
    assert pool.questions == [("a", 4, "eagle", 3), ("c", 4, "eagle", 3)]
    pool.faults["c", "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions[-1] == ("a", 3), "drafts that come along are asked about anywhere"


async def test_what_another_worker_would_say_too_goes_to_the_client() -> None:
    side, pool, _, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [InvalidArgument("no", field="x")]
    with pytest.raises(InvalidArgument):
        await side.verify(DRAFTS)
    assert len(pool.openings) == 1
    assert not counts.causes
    side.close()
    assert pool.num_open == 0


async def test_a_session_that_is_gone_is_opened_on_the_same_worker_a_few_times() -> None:
    side, pool, _, counts = await begun("a", "b")
    for _ in range(2 * MAX_FORGOTTEN):
        pool.faults["a", "computes"] = [FORGOTTEN]
        await side.verify(DRAFTS)
    assert {address for address, _, _ in pool.openings} == {"a"}
    pool.faults["a", "computes"] = [FORGOTTEN] * (MAX_FORGOTTEN + 1)
    with pytest.raises(Aborted):
        await side.verify(DRAFTS)
    assert not any(pool.suspected)
    assert set(counts.causes) == {"session"}


async def test_full_workers_are_asked_again_until_there_is_room() -> None:
    side, pool, _, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [DRAINS]
    pool.faults["b", "computes"] = [FULL] * 3
    pool.faults["a", "waits"] = [DRAINS] * 3
    await side.verify(DRAFTS)
    assert counts.causes["full"] == 3


async def test_a_stream_that_finds_all_workers_full_is_told_so_at_once_unless_it_has_begun() -> None:
    side, pool, _, _ = make("a", "b")
    pool.faults = {("a", "opens"): [FULL], ("b", "waits"): [FULL], ("b", "computes"): [FULL]}
    with pytest.raises(ResourceExhausted):
        await asyncio.wait_for(side.open(), 20)
    assert [address for address, _, _ in pool.openings] == ["a", "b"]

    side, pool, _, _ = await begun("a", wait_s=0.1)
    pool.faults["a", "computes"] = [FULL] * 10_000
    with pytest.raises(ResourceExhausted):
        await side.verify(DRAFTS)
    assert len(pool.openings) > 1, "it was asked again"


async def test_a_stream_without_any_worker_waits_for_one_and_goes_on() -> None:
    side, pool, stream, _ = await begun("a")
    pool.faults["a", "computes"] = [DIED]
    pool.addresses.clear()
    waiting = asyncio.create_task(side.verify(DRAFTS))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pool.comes("c")
    await waiting
    assert pool.questions == [("a", 3), ("c", 3)]
    assert pool.openings[-1][2] == tuple(stream.log.output_ids)


@pytest.mark.parametrize("has_client_deadline", [False, True])
async def test_it_waits_for_a_bounded_time_or_until_just_before_its_deadline(has_client_deadline: bool) -> None:
    side, pool, stream, _ = await begun("a", wait_s=1e6 if has_client_deadline else 0.02)
    now = asyncio.get_running_loop().time()
    stream.deadline, stream.has_client_deadline = now + (0.05 if has_client_deadline else 1e6), has_client_deadline
    pool.faults["a", "computes"] = [DIED]
    pool.addresses.clear()
    with pytest.raises(Unavailable, match="gone") as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "NO_TARGET_WORKER"
    assert failure.value.retry_delay_s
    assert pool.num_open == 0
    if has_client_deadline:
        assert failover.Failover().gives_up_at(1e6, now + 100) <= now + 100 - failover.LAST_WORDS_S
