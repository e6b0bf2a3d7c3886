"""Admission under more requests than there are places: what targets hold, whose turn it is, who is refused and why."""

from __future__ import annotations

import contextlib
import random

import pytest
from conftest import scaled

from coordinator.admission import Admission, Ticket
from coordinator.fleet.limits import Limits
from outrider.errors import ResourceExhausted


class Clock:
    """Stands still unless it is told to go on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def runs(ticket: Ticket) -> bool:
    return ticket.admitted.done() and ticket.admitted.exception() is None


async def test_targets_bound_what_runs_by_rows_and_by_blocks() -> None:
    limits: dict[str, Limits | None] = {"rows": Limits(2, 1e9), "blocks": Limits(100, 64, block_size=16), "new": None}
    admission = Admission(100, 100, limits.get)
    rows = [admission.enter(1, 0, model="rows") for _ in range(3)]
    assert [runs(ticket) for ticket in rows] == [True, True, False]
    blocks = [admission.enter(1, 0, model="blocks", num_tokens=17) for _ in range(3)]
    assert [runs(ticket) for ticket in blocks] == [True, True, False], "two whole blocks each"
    assert runs(admission.enter(5, 0, model="new", num_tokens=10**6)), "of no target known: its own worker will tell"
    admission.leave(rows[0])
    admission.leave(blocks[0])
    assert runs(rows[2])
    assert runs(blocks[2])
    limits["blocks"] = Limits(100, 96, block_size=16)
    more = admission.enter(1, 0, model="blocks", num_tokens=20)
    assert runs(more)
    waits = admission.enter(1, 0, model="blocks", num_tokens=20)
    limits["blocks"] = Limits(100, 128, block_size=16)
    assert not runs(waits)
    admission.look()
    assert runs(waits), "a target has come, or others' streams have ended"


async def test_a_stream_that_is_alone_is_let_in_whatever_it_takes() -> None:
    """Its target says that it never fits; or other coordinators' streams fill it, and it waits there."""
    admission = Admission(8, 8, lambda model: Limits(0, 0, 16))
    huge = admission.enter(1, 0, num_tokens=10**9)
    assert runs(huge)
    assert not runs(admission.enter(1, 0, num_tokens=1))


async def test_a_full_model_holds_up_no_other_and_a_large_request_is_not_passed_by() -> None:
    admission = Admission(4, 8, {"full": Limits(1, 1e9), "free": None}.get)
    first, behind = admission.enter(1, 0, model="full"), admission.enter(1, 0, model="full")
    assert (runs(first), runs(behind)) == (True, False)
    small = admission.enter(2, 0, model="free")
    assert runs(small)
    large = admission.enter(3, 0, model="free")
    assert not runs(large)
    late = admission.enter(1, 0, model="other")
    assert not runs(late), "the place is kept for who waits for three"
    admission.leave(small)
    assert runs(large)
    admission.leave(large)
    assert runs(late)


async def test_a_tenant_is_not_starved_neither_of_places_nor_of_the_queue() -> None:
    admission = Admission(2, 10)
    running = [admission.enter(1, 0, tenant="many") for _ in range(2)]
    waiting = [admission.enter(1, 0, tenant="many") for _ in range(10)]
    with pytest.raises(ResourceExhausted, match="2 streams run and 10 wait") as full:
        admission.enter(1, 0, tenant="many")
    assert full.value.reason == "QUEUE_FULL"
    with pytest.raises(ResourceExhausted), admission.arriving("many"):
        pass
    with admission.arriving("one"):
        one = admission.enter(1, 0, tenant="one")
    displaced = [ticket for ticket in waiting if ticket.admitted.done()]
    assert displaced == [waiting[-1]], "the last of who has most"
    with pytest.raises(ResourceExhausted):
        displaced[0].admitted.result()
    admission.leave(displaced[0])
    assert admission.num_waiting == 10
    admission.leave(running[0])
    admission.leave(running[1])
    assert runs(one), "within as many turns as there are tenants"
    for ticket in (*waiting, one):
        admission.leave(ticket)
    assert (admission.num_running, admission.num_waiting, admission._models) == (0, 0, {})


async def test_who_cannot_begin_in_time_is_refused_at_once() -> None:
    clock = Clock()
    admission = Admission(2, 100, clock=clock)
    first = [admission.enter(1, 0) for _ in range(2)]
    unknown = admission.enter(1, 0, time_left_s=1e-6)
    assert not unknown.admitted.done(), "nothing was measured: nobody is refused for a guess"
    admission.leave(unknown)
    clock.now = 4.0
    for ticket in first:
        admission.leave(ticket)
    running = [admission.enter(1, 0) for _ in range(2)]
    in_time = admission.enter(1, 0, time_left_s=2.1)
    with pytest.raises(ResourceExhausted) as late:
        admission.enter(1, 0, time_left_s=3.0)
    assert late.value.reason == "DEADLINE_TOO_SHORT"
    assert late.value.retry_delay_s == pytest.approx(1.0, rel=0.1)
    urgent = admission.enter(1, -1, time_left_s=3.0)
    assert admission.num_waiting == 2, "the one refused has left no trace"
    admission.leave(running[0])
    assert runs(urgent)
    admission.leave(urgent)
    assert runs(in_time)


async def test_a_place_is_free_once_texts_are_complete_for_so_many_clients_that_still_read() -> None:
    admission = Admission(2, 4)
    tickets = [admission.enter(1, 0) for _ in range(4)]
    for ticket in tickets[:2]:
        admission.finish(ticket)
        admission.finish(ticket)
    assert [runs(ticket) for ticket in tickets] == [True] * 4
    assert (admission.num_running, admission.num_lingering) == (2, 2)
    admission.finish(tickets[2])
    assert admission.num_running == 2, "as many linger as may run: a further one keeps its place"
    for ticket in tickets:
        admission.leave(ticket)
    assert (admission.num_running, admission.num_lingering, admission.num_waiting) == (0, 0, 0)


async def test_whatever_comes_and_goes_no_bound_is_passed_and_nothing_is_left() -> None:
    for seed in range(scaled(300, at_least=30)):
        rng, clock = random.Random(seed), Clock()
        limits = {"a": Limits(3, 200, 16), "b": Limits(5, 100, 8), "c": None}
        admission = Admission(6, 9, limits.get, clock)
        tickets: list[Ticket] = []
        for _ in range(200):
            clock.now += rng.random()
            if rng.random() < 0.55:
                with contextlib.suppress(ResourceExhausted):
                    with admission.arriving(tenant := rng.choice("xyz")):
                        ticket = admission.enter(
                            rng.choice((1, 1, 2, 4)), rng.choice((0, 1, -1)), tenant=tenant, model=rng.choice("abc"),
                            num_tokens=rng.randrange(1, 60), time_left_s=rng.choice((None, 0.5, 10.0)),
                        )  # fmt: skip
                    tickets.append(ticket)
            elif tickets:
                ticket = tickets.pop(rng.randrange(len(tickets)))
                if rng.random() < 0.2:
                    ticket.admitted.cancel()
                if rng.random() < 0.3:
                    admission.finish(ticket)
                    tickets.append(ticket)
                else:
                    admission.leave(ticket)
            held = [ticket for ticket in tickets if ticket.has_place]
            assert admission.num_running == sum(ticket.num_streams for ticket in held) <= 6
            assert 0 <= admission.num_waiting <= 9
            for name, limit in limits.items():
                own = [ticket for ticket in held if ticket.model == name]
                if limit is not None and len(own) > 1:
                    assert limit.allow(sum(t.num_streams for t in own), sum(t.num_promised for t in own))
        for ticket in tickets:
            admission.leave(ticket)
            admission.leave(ticket)
        assert (admission.num_running, admission.num_waiting, admission.num_lingering) == (0, 0, 0)
        assert not admission._models
        assert not admission._waiting
