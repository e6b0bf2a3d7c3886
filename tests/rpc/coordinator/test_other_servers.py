"""An address of a worker, or of a coordinator, at which something else answers: the log warns of it, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from stack import listening
from waiting import until

from coordinator.fleet.worker import WorkerRecord
from outrider.serving.fleet import FleetMember
from outrider.serving.worker_calls import DRAFT, TARGET
from outrider.v1 import worker_pb2


@asynccontextmanager
async def of_kind(kind: str) -> AsyncIterator[str]:
    """Address of a server of gRPC without our services, or of one that speaks HTTP/1.1."""
    if kind == "grpc":
        async with listening(grpc.aio.server()) as address:
            yield address
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("kind", ["grpc", "http"])
@pytest.mark.parametrize("role", [TARGET, DRAFT])
async def test_what_is_no_worker_is_warned_of_once(kind: str, role: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with of_kind(kind) as address:
        worker = WorkerRecord(address, role, lambda: None)
        try:
            await asyncio.wait_for(worker.first_probe.wait(), 30)
            assert f"is no {role} worker, something else answers there" in worker.detail
            (warning,) = warnings(caplog)
            assert f"{role} worker {address}: is no {role} worker" in warning
            assert "see --target-workers and --draft-workers" in warning
        finally:
            await worker.close()


async def test_nobody_there_yet_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerRecord("127.0.0.1:1", TARGET, lambda: None)
    try:
        await asyncio.wait_for(worker.first_probe.wait(), 30)
        assert worker.detail.startswith("UNAVAILABLE")
        assert not warnings(caplog)
    finally:
        await worker.close()


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_what_is_no_coordinator_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with of_kind(kind) as address:
        registration = worker_pb2.RegisterWorkerRequest(role=worker_pb2.WORKER_ROLE_DRAFT, address="127.0.0.1:1")
        member = FleetMember([address], registration, worker_pb2.WorkerCapacity)
        member.start()
        try:
            await until(lambda: bool(warnings(caplog)))
        finally:
            await member.leave()
    assert f"coordinator {address}: " in caplog.text
    assert "it is no coordinator, something else answers there: see --coordinators" in warnings(caplog)[0]
