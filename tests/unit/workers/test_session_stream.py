"""One end of a session stream by itself: heartbeats, silence, a peer that does not read, an end that frees."""

import asyncio
from dataclasses import dataclass

import pytest

from outrider.errors import Aborted, InvalidArgument, ResourceExhausted, Unavailable
from outrider.serving.session_stream import MAX_QUEUED, SessionStream, serve_session


@dataclass
class Message:
    kind: str

    def WhichOneof(self, name):
        return self.kind


BEAT = Message("heartbeat")


def new_stream(**limits):
    return SessionStream(heartbeat=BEAT, heartbeat_ms=10, **limits)


async def messages(*kinds, then_silence=False):
    for kind in kinds:
        yield Message(kind)
    if then_silence:
        await asyncio.Event().wait()


async def collect(stream, requests, drive, received=None):
    received = [] if received is None else received
    async for message in serve_session(stream, requests, drive):
        received.append(message.kind)
    return received


async def echo(stream):
    while (message := await stream.receive()) is not None:
        stream.send(message)


async def test_messages_come_in_order_and_heartbeats_are_not_seen():
    assert await collect(new_stream(), messages("a", "heartbeat", "b", "c"), echo) == ["a", "b", "c"]


async def test_what_was_sent_before_a_failure_still_goes_out():
    async def drive(stream):
        stream.send(Message("a"))
        raise InvalidArgument("no")

    received = []
    with pytest.raises(InvalidArgument):
        await collect(new_stream(), messages(), drive, received)
    assert received == ["a"]


async def test_what_reading_raises_reaches_the_driver_and_the_caller():
    async def broken():
        yield Message("a")
        raise InvalidArgument("cannot be decoded")

    with pytest.raises(InvalidArgument, match="decoded"):
        await collect(new_stream(), broken(), echo)


async def test_heartbeats_only_while_working():
    async def drive(stream):
        await asyncio.sleep(0.1)
        stream.send(Message("idle over"))
        with stream.working():
            await asyncio.sleep(0.2)
        stream.send(Message("work over"))
        await asyncio.sleep(0.1)

    kinds = await collect(new_stream(), messages(then_silence=True), drive)
    assert kinds[0] == "idle over"
    assert kinds[-1] == "work over"
    assert "heartbeat" in kinds


async def test_idle_lease_ends_a_driver_in_the_middle_of_anything():
    ended = []

    async def drive(stream):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(Aborted) as error:
        await collect(new_stream(idle_lease_s=0.05), messages(then_silence=True), drive)
    assert error.value.reason == "SESSION_LOST"
    assert ended == [True]


async def test_a_silent_peer_is_lost_only_while_work_is_outstanding():
    async def drive(stream):
        await asyncio.sleep(0.2)
        stream.send(Message("still here"))
        with stream.working():
            await stream.receive()

    received = []
    with pytest.raises(Unavailable) as error:
        await collect(new_stream(peer_timeout_s=0.1), messages(then_silence=True), drive, received)
    assert error.value.reason == "PEER_SILENT"
    assert received[0] == "still here"


async def test_a_peer_that_does_not_read_is_dropped():
    async def drive(stream):
        for _ in range(MAX_QUEUED + 1):
            stream.send(Message("a"))
        await asyncio.Event().wait()

    with pytest.raises(ResourceExhausted):
        await collect(new_stream(), messages(then_silence=True), drive)


async def test_a_peer_that_does_not_wait_is_dropped():
    async def drive(stream):
        await asyncio.Event().wait()

    with pytest.raises(ResourceExhausted):
        await collect(new_stream(), messages(*["a"] * MAX_QUEUED), drive)


async def test_closing_the_output_cancels_the_driver_and_waits_for_its_end():
    ended = []

    async def drive(stream):
        try:
            stream.send(Message("a"))
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    output = serve_session(new_stream(), messages(then_silence=True), drive)
    assert (await anext(output)).kind == "a"
    await output.aclose()
    assert ended == [True]


async def test_waiting_takes_nothing():
    stream = new_stream()
    pump = asyncio.create_task(stream.pump(messages("a")))
    for _ in range(3):
        await stream.wait()
    assert (await stream.receive()).kind == "a"
    assert await stream.receive() is None
    await pump
    stream.close()


async def test_a_stream_handed_over_answers_the_message_at_hand_and_no_other():
    stream, answering = new_stream(), asyncio.Event()

    async def drive(stream):
        while (message := await stream.receive()) is not None:
            stream.hand_over(Aborted("elsewhere", reason="DRAINING"))
            await answering.wait()
            stream.send(message)

    received = []
    asyncio.get_running_loop().call_later(0.05, answering.set)
    with pytest.raises(Aborted, match="elsewhere"):
        await collect(stream, messages("a", "b", then_silence=True), drive, received)
    assert received == ["a"]


async def test_a_silent_stream_is_handed_over_at_once():
    stream = new_stream()
    asyncio.get_running_loop().call_later(0.05, stream.hand_over, Aborted("elsewhere"))
    with pytest.raises(Aborted, match="elsewhere"):
        async with asyncio.timeout(10):
            await collect(stream, messages(then_silence=True), echo)


async def test_what_was_sent_says_as_much_as_a_heartbeat():
    stream = SessionStream(heartbeat=BEAT, heartbeat_ms=60_000)
    outgoing = stream.outgoing()
    with stream.working():
        stream.send(Message("a"))
        assert (await anext(outgoing)).kind == "a"
        stream._tick()
        assert stream.num_queued == 0, "none is due"
        stream._last_sent -= 61
        stream._tick()
        assert (await anext(outgoing)).kind == "heartbeat"
    stream.close()


def test_heartbeats_come_on_the_services_event_loop_too():
    """Which knows no time of a timer that is due at once."""
    uvloop = pytest.importorskip("uvloop")

    async def beats():
        stream, faults = new_stream(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        outgoing, kinds = stream.outgoing(), []
        with stream.working():
            while kinds.count("heartbeat") < 5:
                stream._last_sent = stream._loop.time() - 0.0099999
                stream._timer.cancel()
                stream._tick()
                kinds.append((await anext(outgoing)).kind)
        stream.close()
        return faults

    assert uvloop.run(beats()) == []
