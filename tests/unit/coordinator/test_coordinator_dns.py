"""Workers found by name: one lease per address, kept while the name resolves to it."""

import asyncio
import socket

import pytest
from waiting import until

from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.sources import DnsSource
from outrider.errors import InvalidArgument
from outrider.serving.naming import resolve, split_names
from outrider.settings import CoordinatorSettings

LEASE_MS = 300


async def test_addresses_come_and_go_with_the_name():
    answers = {"draft.test:9": ["127.0.0.1:9", "127.0.0.2:9"], "target.test:9": ["127.0.0.3:9"]}

    async def resolve_here(name: str) -> list[str]:
        if name not in answers:
            raise socket.gaierror("no such host")
        return answers[name]

    directory = WorkerDirectory(CoordinatorSettings(lease_ms=LEASE_MS))
    await directory.start()
    names = [("draft.test:9", "draft"), ("target.test:9", "target")]
    source = DnsSource(directory, names, lease_ms=LEASE_MS, resolve=resolve_here)
    source.start()

    def known() -> dict[str, str]:
        return {worker.address: worker.role for worker in directory.workers()}

    everyone = {"127.0.0.1:9": "draft", "127.0.0.2:9": "draft", "127.0.0.3:9": "target"}
    try:
        await until(lambda: known() == everyone)
        records = {worker.address: worker for worker in directory.workers()}
        await asyncio.sleep(4 * LEASE_MS / 1000)
        assert {worker.address: worker for worker in directory.workers()} == records, "renewed, not taken anew"
        answers["draft.test:9"] = ["127.0.0.2:9"]
        await until(lambda: "127.0.0.1:9" not in known())
        del answers["target.test:9"]
        await until(lambda: known() == {"127.0.0.2:9": "draft"})
        answers["target.test:9"] = ["127.0.0.4:9"]
        await until(lambda: known() == {"127.0.0.2:9": "draft", "127.0.0.4:9": "target"})
    finally:
        await source.close()
        await directory.close()


async def test_workers_outlive_a_name_service_that_cannot_be_asked():
    """One name is told to try again, another one gets no answer at all; a third one is renewed beside them."""
    answers = {"again.test:9": ["127.0.0.1:9"], "silent.test:9": ["127.0.0.2:9"], "there.test:9": ["127.0.0.3:9"]}
    is_down, asked = False, set[str]()

    async def resolve_here(name: str) -> list[str]:
        if is_down:
            asked.add(name)
            if name == "again.test:9":
                raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
            if name == "silent.test:9":
                await asyncio.Event().wait()
        return answers[name]

    directory = WorkerDirectory(CoordinatorSettings(lease_ms=LEASE_MS))
    await directory.start()
    source = DnsSource(directory, [(name, "target") for name in answers], lease_ms=LEASE_MS, resolve=resolve_here)
    source.start()
    try:
        await until(lambda: len(list(directory.workers())) == 3)
        records = list(directory.workers())
        is_down = True
        await until(lambda: len(asked) == 3)
        for _ in range(3):  # and again and again
            before = {worker.address: max(worker.held_until.values()) for worker in records}
            await until(lambda b=before: all(max(w.held_until.values()) > b[w.address] for w in records))
        assert list(directory.workers()) == records
    finally:
        await source.close()
        await directory.close()


async def test_resolves_to_addresses_with_the_port():
    assert "127.0.0.1:50052" in await resolve("localhost:50052")
    assert await resolve("127.0.0.1:1") == ["127.0.0.1:1"]


def test_names_are_told_from_addresses():
    addresses = ("10.0.0.1:1", "dns:///workers.ns:2", "host:3")
    assert split_names(addresses, "target_workers") == (("10.0.0.1:1", "host:3"), ("workers.ns:2",))


@pytest.mark.parametrize("address", ["dns:///host", "dns:///:1", "dns:///host:x", "dns:///"])
def test_bad_name_is_refused_with_its_field(address: str):
    with pytest.raises(InvalidArgument, match="target_workers has"):
        split_names((address,), "target_workers")
