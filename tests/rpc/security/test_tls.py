"""TLS on every hop: who is served, who is not and with which status, and certificates that change under a running fleet."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import DAY, NOW, Authority, Pair
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stack import Stack, in_process_stack, start

import coordinator.server
from outrider import TLS, Client, OutriderError
from outrider.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from outrider.serving.channel import open_channel
from outrider.serving.server import running_server
from outrider.serving.tls import Dialer
from outrider.settings import CoordinatorSettings, TargetWorkerSettings
from outrider.v1 import worker_pb2, worker_pb2_grpc

REQUEST = {"temperature": 0, "max_tokens": 12, "num_speculative_tokens": 3, "ignore_eos": True, "timeout_s": 60}


class Fleet:
    """Certificates of each role from one authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "fleet")
        self.stranger = Authority(folder, "stranger")
        roles = ("coordinator", "draft-worker", "target-worker")
        self.pairs = {role: self.authority.certify(role) for role in roles}

    def settings(self, role: str, *, client_ca: bool = True) -> dict[str, Any]:
        pair, ca = self.pairs[role], self.authority.ca
        own = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": ca}
        return {**own, "tls_client_ca": ca} if client_ca else own

    def client(self, pair: Pair | None = None) -> TLS:
        return TLS(self.authority.ca) if pair is None else TLS(self.authority.ca, pair.cert, pair.key)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@asynccontextmanager
async def secured(fleet: Fleet, **coordinator: Any) -> AsyncIterator[Stack]:
    """mTLS within the fleet, TLS towards clients."""
    async with in_process_stack(
        coordinator={**fleet.settings("coordinator", client_ca=False), **coordinator},
        draft_worker=fleet.settings("draft-worker"),
        target_worker=fleet.settings("target-worker"),
    ) as stack:
        yield stack


async def test_a_text_over_tls_is_the_text_in_plaintext(fleet: Fleet) -> None:
    async with in_process_stack() as stack, Client(stack.address) as client:
        expected = await client.complete([1, 2, 3], **REQUEST)
    async with secured(fleet) as stack, Client(stack.address, tls=fleet.client()) as client:
        answer = await client.complete([1, 2, 3], **REQUEST)
        assert (await client.server_info()).workers[0].healthy
    assert answer.token_ids == expected.token_ids
    assert answer.speculation.num_draft_tokens > 0


async def test_callers_that_a_worker_does_not_know_are_refused(fleet: Fleet) -> None:
    async with secured(fleet) as stack:
        for worker in (*stack.target, *stack.draft):
            for pair, code in (
                (None, "UNAVAILABLE"),
                (fleet.stranger.certify("coordinator"), "UNAVAILABLE"),
                (fleet.authority.certify("coordinator", until=NOW - DAY), "UNAVAILABLE"),
                (fleet.authority.certify("target-worker"), "PERMISSION_DENIED"),
                (fleet.authority.certify("coordinator"), "OK"),
            ):
                async with Dialer(fleet.client(pair)).open(worker.address) as channel:
                    assert await describe_status(channel) == code, pair
            async with open_channel(worker.address) as channel:
                assert await describe_status(channel) == "UNAVAILABLE", "plaintext"


async def describe_status(channel: grpc.aio.Channel, **more: Any) -> str:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=20, **more)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
