"""Workers come from lists, names and leases, in any mixture; each is known for as long as one source holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from waiting import until

from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.sources import DnsSource, LeaseSource, StaticSource
from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from outrider.settings import CoordinatorSettings

LEASE_MS = 3000
A, B, C = "127.0.0.1:9", "127.0.0.2:9", "127.0.0.3:9"


class Clock:
    """Stands still until it is moved, so that no lease ends by itself. This process never seems to have stood still,
    however busy the machine is: what leases would be longer by does not pass here."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return 0.0

    def pass_lease(self, part: float = 1.01) -> None:
        self.now += part * LEASE_MS / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("coordinator.fleet.directory.time", clock)
    monkeypatch.setattr("coordinator.fleet.worker.time", clock)
    monkeypatch.setattr("coordinator.fleet.directory.SWEEP_INTERVAL_S", 0.01)
    return clock


@pytest.fixture
async def directory(clock: Clock) -> AsyncIterator[WorkerDirectory]:
    found = WorkerDirectory(CoordinatorSettings())
    await found.start()
    yield found
    await found.close()


def leases_of(directory: WorkerDirectory, max_workers: int = 8) -> LeaseSource:
    return LeaseSource(directory, lease_ms=LEASE_MS, max_workers=max_workers)


def known(directory: WorkerDirectory) -> dict[str, str]:
    return {worker.address: worker.role for worker in directory.workers()}


async def swept() -> None:
    for _ in range(5):
        await asyncio.sleep(0.02)


async def test_what_is_listed_stays_whatever_else_holds_it(directory: WorkerDirectory, clock: Clock) -> None:
    StaticSource(directory, [(A, "target"), (B, "draft")]).start()
    record = next(iter(directory.workers()))
    leases = leases_of(directory)
    leases.register(A, "target")
    clock.pass_lease()
    await until(lambda: len(record.held_until) == 1)
    assert next(iter(directory.workers())) is record
    assert record.fault() != "its lease ran out"
    with pytest.raises(
        FailedPrecondition, match=r"listed as a target worker in this coordinator's settings"
    ) as refused:
        leases.register(A, "draft")
    assert refused.value.reason == "ROLE_MISMATCH"
    with pytest.raises(InvalidArgument, match=C):
        StaticSource(directory, [(C, "target"), (C, "draft")])


async def test_a_lease_is_renewed_replaced_drained_and_forgotten(directory: WorkerDirectory, clock: Clock) -> None:
    leases = leases_of(directory)
    first = leases.register(A, "draft")
    (record,) = directory.workers()
    leases.drain(first)
    assert record.fault() == "draining"
    second = leases.register(A, "draft")
    assert record.fault() != "draining"
    for call in (leases.renew, leases.drain):
        with pytest.raises(NotFound):
            call(first)
    for _ in range(4):
        clock.pass_lease(0.6)
        await swept()
        leases.renew(second)
    assert list(directory.workers()) == [record], "renewed, not taken anew"
    clock.pass_lease()
    assert record.fault() == "its lease ran out"
    await until(lambda: not known(directory))
    for lease in (second, ""):
        with pytest.raises(NotFound):
            leases.renew(lease)


async def test_a_worker_that_comes_back_as_another_role_is_another_worker(directory: WorkerDirectory) -> None:
    leases = leases_of(directory)
    leases.register(A, "draft")
    (record,) = directory.workers()
    leases.register(A, "target")
    assert known(directory) == {A: "target"}
    assert next(iter(directory.workers())) is not record


async def test_leases_are_bounded_and_ended_ones_make_room(directory: WorkerDirectory, clock: Clock) -> None:
    leases = leases_of(directory, max_workers=2)
    leases.register(A, "draft")
    leases.register(B, "target")
    leases.register(A, "draft")  # not one more
    with pytest.raises(ResourceExhausted, match="max_registered_workers") as full:
        leases.register(C, "target")
    assert full.value.retry_delay_s == LEASE_MS / 1000
    assert known(directory) == {A: "draft", B: "target"}
    clock.pass_lease()
    await until(lambda: not known(directory))
    leases.register(C, "target")
    assert known(directory) == {C: "target"}


async def test_a_name_and_a_lease_hold_one_worker_together(directory: WorkerDirectory, clock: Clock) -> None:
    """Neither takes it from the other, as long as both go on."""
    lookups: list[str] = []

    async def resolve_here(name: str) -> list[str]:
        lookups.append(name)
        return [A]

    source = DnsSource(directory, [("workers.test:9", "draft")], lease_ms=LEASE_MS, resolve=resolve_here)
    leases = leases_of(directory)
    source.start()
    await until(lambda: bool(known(directory)))
    (record,) = directory.workers()
    lease = leases.register(A, "draft")
    await until(lambda: len(lookups) > 1)
    leases.renew(lease)
    assert len(record.held_until) == 2
    with pytest.raises(FailedPrecondition, match=r"in the name workers\.test:9"):
        leases.register(A, "target")
    await source.close()
    clock.pass_lease(0.9)
    leases.renew(lease)
    clock.pass_lease(0.9)  # the name's part has ended
    await until(lambda: list(record.held_until) == [LeaseSource.HOLDER])
    assert known(directory) == {A: "draft"}
    clock.pass_lease()
    await until(lambda: not known(directory))


async def test_a_name_with_an_address_of_the_other_role_still_gives_the_rest(
    directory: WorkerDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "coordinator")  # a service in this process may have set its own
    StaticSource(directory, [(A, "target")]).start()
    lookups: list[str] = []

    async def resolve_here(name: str) -> list[str]:
        lookups.append(name)
        return [A, B]

    source = DnsSource(directory, [("workers.test:9", "draft")], lease_ms=300, resolve=resolve_here)
    source.start()
    await until(lambda: len(lookups) > 2)
    assert known(directory) == {A: "target", B: "draft"}
    assert caplog.text.count(f"{A} is listed") == 1, "told once"
    await source.close()


async def test_a_lease_does_not_run_out_while_this_process_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could have renewed it."""
    monkeypatch.setattr("coordinator.fleet.directory.SWEEP_INTERVAL_S", 0.01)
    directory, lease_s = WorkerDirectory(CoordinatorSettings()), 0.5
    await directory.start()
    try:
        while True:
            await asyncio.sleep(0.02)
            taken_at = time.monotonic()
            directory.hold(A, "target", "a lease", lease_s)
            await asyncio.sleep(0)
            stops_at = time.monotonic()
            time.sleep(2 * lease_s)  # noqa: ASYNC251 - that is the point
            if stops_at < taken_at + lease_s / 2:  # else the machine stood still by itself
                break
        await asyncio.sleep(0.02)
        assert A in known(directory)
        await until(lambda: A not in known(directory))
    finally:
        await directory.close()
