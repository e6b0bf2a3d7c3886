"""Clients that neither send nor read: they lose their connections, and keep no place from anybody."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from gateway_stack import TARGET, Front, error_of, front, metric, small_send_buffers
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from uvicorn.server import ServerState
from waiting import until

from coordinator.gateway import body
from coordinator.gateway.connection import PatientConnection
from coordinator.gateway.metrics import GatewayMetrics

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"model": TARGET, "prompt": "abc", "max_tokens": 4}
PAUSE_S = 1.0
"""Both ends are in this process: what stalls one stalls the other."""


@asynccontextmanager
async def stranger(served: Front, sent: bytes, receive_bytes: int = 0) -> AsyncIterator[socket.socket]:
    """A connection over which so much was sent. receive_bytes: of its buffer."""
    with socket.socket() as connection:
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", served.server.port))
        await loop.sock_sendall(connection, sent)
        yield connection


def head(num_bytes: int) -> bytes:
    """Of a request with such a body."""
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\n\r\n"
    ).encode()


async def all_of(connection: socket.socket) -> bytes:
    """Until the other end closes."""
    got, loop = b"", asyncio.get_running_loop()
    try:
        while part := await loop.sock_recv(connection, 65_536):
            got += part
    except ConnectionResetError:
        pass
    return got


async def test_whoever_reads_nothing_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    small_send_buffers(monkeypatch)
    gateway = {"max_client_pause_s": PAUSE_S, "max_concurrent_requests": 1}
    async with front(TARGET, None, gateway=gateway) as served:
        shown = {"report_steps": True, "logprobs": 20, "ignore_eos": True, "n": 2}
        asked = json.dumps({**ASKED, "max_tokens": 4000, "stream": True, **shown}).encode()
        async with stranger(served, head(len(asked)) + asked, receive_bytes=4096):

            async def is_counted() -> bool:
                return await metric(served.http, "outrider_gateway_requests_total", status="499") == 1

            await until(is_counted)
            assert (await served.http.post(COMPLETIONS, json=ASKED)).status_code == 200

            async def is_free() -> bool:
                return (await served.client.server_info()).num_requests_running == 0

            await until(is_free)


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nhost: x\r\n", b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nG"])
async def test_whoever_says_not_what_they_want_is_cut_off(sent: bytes) -> None:
    async with front(draft=None, gateway={"max_client_pause_s": PAUSE_S}) as served, stranger(served, sent) as waiting:
        got = await asyncio.wait_for(all_of(waiting), 60)
        assert got.startswith(b"HTTP/1.1 200 " if b"\r\n\r\n" in sent else b"")
        assert bool(got) == (b"\r\n\r\n" in sent)


async def test_bodies_that_do_not_come_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many that are on their way the first makes room, and of too much in memory."""
    monkeypatch.setattr(body, "MAX_BODIES", 2)
    async with front(draft=None, gateway={"max_concurrent_requests": 1}) as served:
        async with stranger(served, head(100) + b"{") as first, stranger(served, head(100) + b"{"):
            await until(are_of(served, 2))
            assert (await served.http.post(COMPLETIONS, json=ASKED)).status_code == 200
            answer = await asyncio.get_running_loop().sock_recv(first, 65_536)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"too_slow"' in answer
    monkeypatch.setattr(body, "MAX_FULL_BODIES", 1)
    async with front(draft=None, gateway={"max_body_bytes": 1024}) as served:
        async with stranger(served, head(1000) + b"a" * 900) as first:
            await until(are_of(served, 1))
            async with stranger(served, head(1000) + b"a" * 900):
                answer = await asyncio.get_running_loop().sock_recv(first, 65_536)
                assert answer.startswith(b"HTTP/1.1 408 ")
                await until(are_of(served, 1))
                refused = await served.http.post(COMPLETIONS, json={**ASKED, "prompt": "a" * 1024})
                assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large")


def are_of(served: Front, number: int) -> Any:
    """Whether so many requests run."""

    async def are() -> bool:
        return await metric(served.http, "outrider_gateway_requests_running") == number

    return are


class Unread:
    """A transport whose client has read some of what waits for it whenever it is looked at."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = list(sizes)
        self.is_aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self._sizes.pop(0)

    def abort(self) -> None:
        self.is_aborted = True

    @property
    def num_looks(self) -> int:
        return len(self._sizes)


async def test_whoever_reads_slowly_keeps_the_connection() -> None:
    """64 KiB are read in each pause but the last."""
    config = uvicorn.Config(Starlette(), lifespan="off", log_config=None)
    config.load()
    transport = Unread(300_000, 230_000, 100_000, 34_500)
    own: dict[str, Any] = {"max_pause_s": 0.01, "metrics": GatewayMetrics(CollectorRegistry()), "is_tls": False}
    connection = PatientConnection(config=config, server_state=ServerState(), app_state={}, **own)
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.pause_writing()
    await until(lambda: transport.is_aborted)
    assert transport.num_looks == 0
    connection.connection_lost(OSError())
