"""Suspects on a real worker: one is computed alone among them, all others go on; and a prefix that waits to be used."""

import asyncio

import pytest
from session_clients import (
    TOY,
    TargetRequest,
    ask,
    decode_request,
    header_of,
    open_request,
    read,
    running_target,
    target_opening,
    verify_request,
)

from outrider.serving import convert
from outrider.v1 import target_pb2

PROMPT = [1, 2, 3]


def suspect(num_tokens=1, **fields):
    return open_request(target_opening(PROMPT, deferred=True, num_suspect_tokens=num_tokens, **fields))


async def says(call):
    return (await read(call)).WhichOneof("message")


@pytest.mark.parametrize("end", ["token", "cancel", "run", "bye"])
async def test_the_next_suspect_is_told_once_the_first_one_is_cleared_or_gone(end):
    async with running_target(heartbeat_ms=50) as worker:
        first, second, free = worker.target.Session(), worker.target.Session(), worker.target.Session()
        ready = (await ask(first, suspect(3 if end == "run" else 1))).ready
        assert convert.header_from_pb(ready.header) == header_of(PROMPT)
        await second.write(suspect())
        waiting = asyncio.create_task(read(second))
        assert (await ask(free, open_request(target_opening(PROMPT)))).WhichOneof("message") == "verdict"
        assert not waiting.done(), "nobody but a suspect goes on"
        match end:
            case "token":
                assert (await ask(first, verify_request(PROMPT))).WhichOneof("message") == "verdict"
            case "run":
                await first.write(decode_request(PROMPT, 3))
                assert [await says(first) for _ in range(3)] == ["verdict"] * 3
            case "cancel":
                first.cancel()
            case "bye":
                await first.done_writing()
        assert (await asyncio.wait_for(waiting, 30)).WhichOneof("message") == "ready"
        for call in (second, free):
            await call.done_writing()
        first.cancel()
        await worker.wait_idle()


async def test_a_worker_says_that_it_lives_while_a_suspect_waits():
    async with running_target(heartbeat_ms=20) as worker:
        first, second = worker.target.Session(), worker.target.Session()
        await ask(first, suspect())
        await second.write(suspect())
        for _ in range(3):
            assert (await asyncio.wait_for(second.read(), 30)).WhichOneof("message") == "heartbeat"
        first.cancel()
        second.cancel()
        await worker.wait_idle()


async def test_what_was_ingested_is_not_computed_again():
    prompt = [i % 16 for i in range(200)]
    async with running_target(TOY, block_size=16) as worker:
        standby, call = worker.target.Session(), worker.target.Session()
        await standby.write(open_request(target_opening(prompt, deferred=True)))
        header = convert.header_to_pb(header_of([*prompt, 5, 6]))
        told = await ask(standby, TargetRequest(ingest=target_pb2.TargetIngest(header=header, committed_ids=[5, 6])))
        assert told.ready.header == header
        opening = target_opening(prompt, committed_ids=[5, 6], epoch=2, deferred=True)
        await call.write(open_request(opening))
        verdict = (await ask(call, verify_request([*prompt, 5, 6], epoch=2))).verdict
        assert verdict.num_cached_tokens >= len(prompt) - 16
        further = convert.header_to_pb(header_of([*prompt, 5, 6, 7, 8]))
        gap = TargetRequest(ingest=target_pb2.TargetIngest(header=further, committed_ids=[8]))
        assert (await ask(standby, gap)).out_of_step.header == header
        standby.cancel()
        call.cancel()
        await worker.wait_idle()
