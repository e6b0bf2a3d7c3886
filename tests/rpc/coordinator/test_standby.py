"""A warm standby: after a loss the prompt and the text are not computed again, but for the last few tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from stack import start
from waiting import until

import coordinator.server as coordinator_server
import target_worker.server as target_server
from coordinator.standby import STEP_TOKENS
from outrider import Client, results
from outrider.lm.loading import load_model
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

TARGET = "toy:vocab=48,seed=5,pass_ms=2"
BLOCK_SIZE = 16
PROMPT = [i % 48 for i in range(400)]
REQUEST: dict[str, Any] = {"temperature": 0, "max_tokens": 240, "num_speculative_tokens": 0}


@asynccontextmanager
async def targets(
    number: int, target: str = TARGET, overcommit: float = 2.0, **settings: Any
) -> AsyncIterator[tuple[Client, dict[str, Any], dict[str, Any]]]:
    """(client, server and toy model of each target by address)."""
    async with AsyncExitStack() as cleanup:
        servers, models = {}, {}
        for _ in range(number):
            worker = TargetWorkerSettings(
                model=target,
                log_level="warning",
                drain_grace_s=0,
                port=0,
                block_size=BLOCK_SIZE,
                cache_overcommit=overcommit,
            )
            loaded = load_model(worker)
            server = await start(target_server.serve, worker, loaded=loaded)
            cleanup.push_async_callback(server.close)
            servers[server.address], models[server.address] = server, loaded.model
        coordinator = CoordinatorSettings(
            port=0, log_level="warning", target_workers=tuple(servers), local_drafters=(), **settings
        )
        server = await start(coordinator_server.serve, coordinator)
        cleanup.push_async_callback(server.close)
        yield await cleanup.enter_async_context(Client(server.address)), servers, models


@pytest.mark.parametrize("warm_standby", [True, False])
async def test_a_loss_costs_about_a_pass_with_a_standby_and_a_prefill_without(warm_standby: bool) -> None:
    async with targets(2, warm_standby=warm_standby) as (client, servers, models):
        before = {address: model.num_rows_computed for address, model in models.items()}
        stream, got = client.generate(PROMPT, **REQUEST), 0
        while got < 50:
            event = await anext(stream)
            got += len(event.token_ids) if isinstance(event, results.Chunk) else 0
        rows = {address: model.num_rows_computed - before[address] for address, model in models.items()}
        busy = max(rows, key=lambda address: rows[address])
        (other,) = models.keys() - {busy}
        if warm_standby:
            await until(lambda: models[other].num_rows_computed - before[other] >= len(PROMPT) + 32)
        sessions = {w.address: w.num_sessions for w in (await client.server_info()).workers}
        assert sessions == {busy: 1, other: int(warm_standby)}
        before_loss = models[other].num_rows_computed
        await servers[busy].close()
        ids = [i async for event in stream if isinstance(event, results.Chunk) for i in event.token_ids]
        assert got + len(ids) == REQUEST["max_tokens"]
        num_rows = models[other].num_rows_computed - before_loss
        if warm_standby:  # a row a token at most, and what was not computed before
            assert num_rows <= REQUEST["max_tokens"] + BLOCK_SIZE + 2 * STEP_TOKENS < len(PROMPT)
        else:
            assert num_rows >= len(PROMPT)


async def test_the_text_is_the_same_and_nothing_leaks_whichever_worker_is_lost() -> None:
    async with targets(3, warm_standby=True) as (client, servers, _):
        whole = (await client.complete(PROMPT, **REQUEST)).token_ids
        stream, got = client.generate(PROMPT, **REQUEST), []
        while len(got) < 40:
            event = await anext(stream)
            got += event.token_ids if isinstance(event, results.Chunk) else ()
        held = [w.address for w in (await client.server_info()).workers if w.num_sessions]
        assert len(held) == 2, "a target and its standby"
        await servers[held[0]].close()  # one of the two
        while len(got) < 120:
            event = await anext(stream)
            got += event.token_ids if isinstance(event, results.Chunk) else ()
        await servers[held[1]].close()  # the other one: the third has all of it now
        got += [i async for event in stream if isinstance(event, results.Chunk) for i in event.token_ids]
        assert tuple(got) == whole
        async with asyncio.timeout(60):
            while any(w.num_sessions for w in (await client.server_info()).workers):
                await asyncio.sleep(0.05)


async def test_a_stream_with_one_worker_has_no_standby_and_lacks_nothing() -> None:
    async with targets(1, warm_standby=True) as (client, _, _):
        answer = await client.complete(PROMPT, **REQUEST)
        assert len(answer.token_ids) == REQUEST["max_tokens"]


async def test_a_standby_gives_its_promise_to_the_stream_that_comes() -> None:
    """Else that one waits for blocks which it holds itself, until the standby's lease ends."""
    num_blocks = -(-(len(PROMPT) + REQUEST["max_tokens"] - 1) // BLOCK_SIZE)
    async with targets(2, f"{TARGET},blocks={num_blocks}", 1.0, warm_standby=True) as (client, servers, models):
        stream, got = client.generate(PROMPT, **REQUEST), 0
        while got < 50:
            event = await anext(stream)
            got += len(event.token_ids) if isinstance(event, results.Chunk) else 0
        busy, other = sorted(models, key=lambda address: -models[address].num_rows_computed)
        await until(lambda: models[other].num_rows_computed >= len(PROMPT) + 32)
        before = models[other].num_rows_computed
        await servers[busy].close()
        async with asyncio.timeout(30):
            async for event in stream:
                got += len(event.token_ids) if isinstance(event, results.Chunk) else 0
        assert got == REQUEST["max_tokens"]
        assert models[other].num_rows_computed - before < len(PROMPT), "and what was computed for it is there"
