"""When a worker counts as lost for saying nothing: in time, and not before several of its heartbeats are missing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordinator.peer as peer_module
from coordinator.peer import NOT_UNDERSTOOD, WORKER_SILENT, Peer
from outrider.errors import Unavailable
from outrider.settings import CoordinatorSettings


class Call:
    """A worker from which nothing comes but what is put into `says`."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[str] = asyncio.Queue()
        self.heard: list[str] = []
        self.cancelled = False

    async def read(self) -> str:
        return await self.says.get()

    async def write(self, message: str) -> None:
        self.heard.append(message)

    def cancel(self) -> None:
        self.cancelled = True


def listening(call: Call, interval_s: float, timeout_s: float) -> Peer:
    to: Any = call
    return Peer(
        to, str, address="a:1", heartbeat="beat", is_heartbeat="beat".__eq__, interval_s=interval_s, timeout_s=timeout_s
    )


async def ticks_until_lost(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, timeout_s: float, heard_at: int = -1
) -> int:
    """Ticks of the peer's clock from its question, or from a heartbeat in the middle, to its loss."""
    num_ticks, real = 0, asyncio.sleep

    async def tick(delay_s: float) -> None:
        nonlocal num_ticks
        if delay_s:
            if num_ticks == heard_at:
                call.says.put_nowait("beat")
            num_ticks += 1
        for _ in range(5):
            await real(0)

    monkeypatch.setattr(peer_module.asyncio, "sleep", tick)
    call = Call()
    peer = listening(call, interval_s, timeout_s)
    peer.num_outstanding = 1
    with pytest.raises(Unavailable, match=f"silent for {timeout_s:g} s") as lost:
        await peer.receive()
    assert lost.value.reason == WORKER_SILENT
    assert call.cancelled
    assert peer.was_asked
    peer.close()
    return num_ticks - max(0, heard_at)


@pytest.mark.parametrize("heard_at", [-1, 2])
async def test_by_default_it_is_known_within_two_seconds_and_not_before_three_heartbeats_are_missing(
    monkeypatch: pytest.MonkeyPatch, heard_at: int
) -> None:
    defaults = CoordinatorSettings.model_fields
    interval_s, timeout_s = defaults["heartbeat_ms"].default / 1000, defaults["peer_timeout_s"].default
    num_ticks = await ticks_until_lost(monkeypatch, interval_s, timeout_s, heard_at)
    assert num_ticks * interval_s <= timeout_s == 2.0
    assert (num_ticks - 1) * interval_s >= 3 * interval_s


@given(st.integers(10, 5000), st.floats(0.01, 60.0))
def test_never_later_than_told_where_there_is_room_for_two_heartbeats(heartbeat_ms: int, timeout_s: float) -> None:
    async def max_ticks() -> int:
        peer = listening(Call(), heartbeat_ms / 1000, timeout_s)
        peer.close()
        return peer._max_silent_ticks

    num_ticks, interval_s = asyncio.run(max_ticks()), heartbeat_ms / 1000
    assert num_ticks >= 2
    assert (num_ticks - 1) * interval_s <= max(timeout_s, interval_s) + 1e-6


async def test_a_peer_that_owes_nothing_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.sleep

    async def tick(delay_s: float) -> None:
        await real(0)

    monkeypatch.setattr(peer_module.asyncio, "sleep", tick)
    call = Call()
    peer = listening(call, 0.5, 2.0)
    for _ in range(100):
        await real(0)
    assert not call.cancelled
    assert peer.receive_now() is None
    peer.close()
    assert not peer.was_asked


async def test_a_sender_that_gives_up_does_not_cut_its_message_short() -> None:
    """gRPC ends a call whose write is cancelled."""

    class Slow(Call):
        async def write(self, message: str) -> None:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            await super().write(message)

    call = Slow()
    peer = listening(call, 0.5, 2.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await peer.send("first")
    await peer.send("second")
    assert call.heard == ["first", "second"]
    assert not call.cancelled
    peer.close()


async def test_a_call_that_the_worker_ends_is_no_death() -> None:
    class Ended(Call):
        async def read(self) -> Any:
            return grpc.aio.EOF

        async def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.OK

    peer = listening(Ended(), 0.5, 2.0)
    with pytest.raises(Unavailable) as lost:
        await peer.receive()
    assert lost.value.reason == "WORKER_STOPPED"
    peer.close()


async def test_bytes_that_are_no_message_lose_the_worker_at_once() -> None:
    """gRPC gives None for them."""
    call: Any = Call()
    peer = listening(call, 100.0, 1000.0)
    call.says.put_nowait(None)
    with pytest.raises(Unavailable) as caught:
        await peer.receive()
    assert caught.value.reason == NOT_UNDERSTOOD
    assert call.cancelled
    peer.close()
