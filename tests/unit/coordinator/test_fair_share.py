"""Whose turn it is: no tenant starves another, whatever it queues, and what is told of the queue is true."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from conftest import scaled

from coordinator.fair_share import MAX_REMEMBERED, FairQueue


@dataclass(frozen=True)
class Job:
    number: int
    tenant: str
    cost: float
    priority: int
    weight: int


def job(rng: random.Random, number: int, tenants: str = "abcd") -> Job:
    return Job(number, rng.choice(tenants), rng.choice((1, 2, 5, 20)), rng.choice((0, 0, 1, -3)), rng.choice((1, 2)))


def push(queue: FairQueue[Job], new: Job) -> None:
    queue.push(new, tenant=new.tenant, cost=new.cost, priority=new.priority, weight=new.weight)


def drain(queue: FairQueue[Job]) -> list[Job]:
    return [queue.pop() for _ in range(len(queue))]


def test_a_tenant_with_a_hundred_does_not_starve_one_with_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"many {number}", tenant="many", cost=10)
    for _ in range(30):
        queue.pop()
    assert queue.weight_ahead(tenant="one") == 0
    queue.push("one", tenant="one", cost=10)
    queue.push("second", tenant="one", cost=10)
    assert [queue.pop() for _ in range(3)] == ["one", "many 30", "second"]


def test_two_tenants_that_wait_are_given_as_much_as_each_other() -> None:
    """Start-time fair queueing's own bound: the dearest request of the one and of the other."""
    for seed in range(scaled(400, at_least=40)):
        rng = random.Random(seed)
        queue: FairQueue[Job] = FairQueue()
        given: Counter[str] = Counter()
        waiting, dearest = Counter[str](), dict.fromkeys("abcd", 0.0)
        since: dict[tuple[str, str], dict[str, float]] = {}
        for number in range(150):
            if rng.random() < 0.6 or not queue:
                new = job(rng, number)
                push(queue, new)
                waiting[new.tenant] += 1
                dearest[new.tenant] = max(dearest[new.tenant], new.cost)
            else:
                first = queue.first()
                done = queue.pop()
                assert done is first
                given[done.tenant] += done.cost
                waiting[done.tenant] -= 1
            for one, other in (("a", "b"), ("a", "c"), ("b", "d")):
                if waiting[one] and waiting[other]:
                    start = since.setdefault((one, other), dict(given))
                    difference = (given[one] - start.get(one, 0)) - (given[other] - start.get(other, 0))
                    assert abs(difference) <= dearest[one] + dearest[other], (seed, number)
                else:
                    since.pop((one, other), None)


def test_what_is_told_to_be_ahead_is_ahead() -> None:
    for seed in range(scaled(1000, at_least=100)):
        rng = random.Random(seed)
        queue: FairQueue[Job] = FairQueue()
        for number in range(rng.randrange(30)):
            if queue and rng.random() < 0.3:
                queue.pop()
            push(queue, job(rng, number))
        new = job(rng, 99, "abcdefg")
        told = queue.weight_ahead(tenant=new.tenant, priority=new.priority)
        push(queue, new)
        order = drain(queue)
        assert told == sum(other.weight for other in order[: order.index(new)]), seed


def test_a_tenants_own_requests_go_by_priority_then_in_order() -> None:
    for seed in range(scaled(200, at_least=20)):
        rng = random.Random(seed)
        queue: FairQueue[Job] = FairQueue()
        for number in range(40):
            push(queue, job(rng, number))
        order = drain(queue)
        for tenant in "abcd":
            own = [done for done in order if done.tenant == tenant]
            assert own == sorted(own, key=lambda done: (done.priority, done.number))


def test_a_priority_takes_nothing_from_another_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.push("pushy", tenant="pushy", cost=1, priority=-1000 - number)
        queue.push("modest", tenant="modest", cost=1)
    order = [queue.pop() for _ in range(20)]
    assert all(Counter(order[: 2 * n])["modest"] == n for n in range(11))


def test_who_leaves_is_not_charged_and_nobody_is_remembered_for_nothing() -> None:
    for seed in range(scaled(200, at_least=20)):
        rng = random.Random(seed)
        queue, here = FairQueue[Job](), list[Job]()
        for number in range(80):
            if here and rng.random() < 0.5:
                gone = here.pop(rng.randrange(len(here)))
                queue.remove(gone, tenant=gone.tenant)
            else:
                here.append(job(rng, number))
                push(queue, here[-1])
            assert (len(queue), set(queue)) == (len(here), set(here))
        with pytest.raises(ValueError, match="not in the queue"):
            queue.remove(job(rng, 0), tenant="a")
        drain(queue)
        with pytest.raises(IndexError, match="nobody waits"):
            queue.pop()
        assert not queue._tenants


def test_tenants_that_come_once_are_forgotten() -> None:
    """While somebody waits all the time, so that the queue never begins anew."""
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", tenant="stays", cost=1e12)
    queue.push("stays too", tenant="stays", cost=1)
    queue.pop()
    for number in range(3 * MAX_REMEMBERED):
        queue.push("once", tenant=str(number), cost=1)
        assert queue.pop() == "once"
        assert len(queue._tenants) <= MAX_REMEMBERED + 2
