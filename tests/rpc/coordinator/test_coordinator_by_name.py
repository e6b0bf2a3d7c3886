"""A coordinator that knows its workers by name only serves as one that knows their addresses."""

import asyncio

import pytest
from stack import in_process_stack, start

import coordinator.server
from outrider import Client
from outrider.errors import InvalidArgument
from outrider.settings import CoordinatorSettings

PROMPT = [1, 2, 3]
OPTIONS = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


async def test_serves_through_workers_found_by_name() -> None:
    async with in_process_stack() as services, Client(services.address, timeout_s=30) as by_address:
        expected = await by_address.complete(PROMPT, **OPTIONS)
        settings = CoordinatorSettings(
            port=0,
            lease_ms=500,
            drain_grace_s=2.0,
            target_workers=(f"dns:///localhost:{services.target[0].port}",),
            draft_workers=(f"dns:///localhost:{services.draft[0].port}",),
        )
        server = await start(coordinator.server.serve, settings)
        try:
            async with Client(server.address, timeout_s=30) as client, asyncio.timeout(30):
                # `localhost` may stand for an IPv6 address too, at which no worker of this test listens.
                while {w.role for w in (await client.server_info()).workers if w.healthy} != {"draft", "target"}:
                    await asyncio.sleep(0.05)
                answer = await client.complete(PROMPT, num_speculative_tokens=3, **OPTIONS)
        finally:
            await server.close()
    assert answer.token_ids == expected.token_ids
    assert answer.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"


async def test_bad_name_ends_the_start_with_its_field() -> None:
    with pytest.raises(InvalidArgument, match="draft_workers has 'dns:///nowhere'"):
        await start(coordinator.server.serve, CoordinatorSettings(port=0, draft_workers=("dns:///nowhere",)))
