"""Who looks on sees the streams that wait and run, of the own tenant unless an operator, and what all did; no text."""

from __future__ import annotations

import asyncio

from endless import endless
from stack import in_process_stack

from outrider.client import Client
from outrider.server_info import Activity, StreamState

SLOW = "toy:vocab=16,seed=1,pass_ms=4"


def of(address: str, tenant: str) -> Client:
    return Client(address, metadata={"x-outrider-tenant": tenant})


async def until(client: Client, wanted: object) -> Activity:
    while True:
        told = await client.activity()
        if wanted(told):  # type: ignore[operator]
            return told
        await asyncio.sleep(0.02)


async def test_streams_as_they_are() -> None:
    limits = {"max_running_requests": 1}
    async with in_process_stack(SLOW, coordinator=limits) as stack, Client(stack.address) as client:
        nothing = await client.activity()
        assert (nothing.streams, nothing.num_left_out, nothing.num_hidden) == ((), 0, 0)
        async with endless(client, "first"), endless(client, "second", num_tokens=0):
            told = await until(client, lambda told: len(told.streams) == 2)
            first, second = told.streams
            assert (first.request_id, first.state, first.tenant) == ("first", StreamState.RUNNING, "default")
            assert (first.num_prompt_tokens, first.max_tokens) == (3, 3000)
            assert first.num_tokens == first.speculation.num_tokens >= 5
            assert first.speculation.num_draft_tokens > 0
            assert first.last_step is not None
            assert first.last_step.num_draft_tokens == 2
            assert 0 < first.timings.verify_ms < first.age_ms == first.timings.total_ms
            assert (second.request_id, second.state, second.num_tokens) == ("second", StreamState.WAITING, 0)
            assert second.last_step is None
            few = await client.activity(max_streams=1)
            assert ([one.request_id for one in few.streams], few.num_left_out) == (["first"], 1)
        ended = await until(client, lambda told: not told.streams)
        (counts,) = ended.models.values()
        assert counts.num_tokens >= first.num_tokens, "what has ended is in the totals"
        assert sum(counts.gamma_histogram) >= counts.num_spec_steps > 0
        assert ended.uptime_s > nothing.uptime_s


async def test_each_choice_is_one() -> None:
    async with in_process_stack(SLOW) as stack, Client(stack.address) as client:
        async with endless(client, "both", n=2):
            told = await client.activity()
            assert [(one.request_id, one.index) for one in told.streams] == [("both", 0), ("both", 1)]


async def test_others_see_their_own_and_operators_all() -> None:
    async with (
        in_process_stack(SLOW, coordinator={"operator_tenants": ("ops",)}) as stack,
        of(stack.address, "a") as a,
        of(stack.address, "b") as b,
        of(stack.address, "ops") as ops,
    ):
        async with endless(a, "one"), endless(b, "two"):
            of_a, of_all = await a.activity(), await ops.activity()
        assert ([one.tenant for one in of_a.streams], of_a.num_hidden) == (["a"], 1)
        assert ([one.request_id for one in of_all.streams], of_all.num_hidden) == (["one", "two"], 0)
        assert of_a.models.keys() == of_all.models.keys()


async def test_clocks_are_told() -> None:
    async with in_process_stack() as stack, Client(stack.address) as client:
        info = await client.server_info()
    assert info.unix_time_s > 1.7e9
    offsets = [worker.clock_offset_ms for worker in info.workers]
    assert len(offsets) == 2
    assert all(offset is not None and abs(offset) < 60_000 for offset in offsets), "one process, one clock"
