"""Targets of one model with limits of their own: a stream goes where it fits, and waits for such a one to come back."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from stack import Server, start

import coordinator.server as coordinator_server
import target_worker.server as target_server
from outrider import Chunk, Client
from outrider.lm.loading import load_model
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

TOY = "toy:vocab=16,seed=1"
SLOW = f"{TOY},pass_ms=2"
FEW_DRAFTS: dict[str, Any] = {"max_draft_tokens": 2}
SHORT_CONTEXT = 40
PROMPT, LONG, SHORT = [1, 2, 3], 200, 20
PATIENCE_S = 60.0


def target(context_length: int = 0, **values: Any) -> Any:
    """context_length: shorter than that of the others, of the same weights."""
    common = {"model": TOY, "port": 0, "log_level": "error", "drain_delay_s": 0.0, "drain_grace_s": 0.0}
    settings = TargetWorkerSettings(**{**common, **values})
    loaded = load_model(settings)
    about = loaded.description
    about = dataclasses.replace(about, context_length=context_length or about.context_length)
    return start(target_server.serve, settings, loaded=dataclasses.replace(loaded, description=about))


@asynccontextmanager
async def coordinator(*targets: Server) -> Any:
    settings = CoordinatorSettings(
        port=0, log_level="error", target_workers=tuple(t.address for t in targets), target_wait_s=PATIENCE_S
    )
    server = await start(coordinator_server.serve, settings)
    try:
        async with Client(server.address) as client:
            yield client
    finally:
        await server.close()


async def test_long_texts_go_where_they_fit_and_short_ones_anywhere() -> None:
    async with AsyncExitStack() as cleanup:
        big, small = await target(), await target(SHORT_CONTEXT, **FEW_DRAFTS)
        for server in (big, small):
            cleanup.push_async_callback(server.close)
        async with coordinator(small, big) as client:
            long, short = {"max_tokens": LONG, "temperature": 0}, {"max_tokens": SHORT, "temperature": 0}
            alone = (await client.complete(PROMPT, **long)).token_ids
            many = [client.complete(PROMPT, **(long if i % 2 else short)) for i in range(24)]
            texts = [answer.token_ids for answer in await asyncio.gather(*many)]
            assert texts == [alone if i % 2 else alone[:SHORT] for i in range(24)]
            await big.close()
            assert (await client.complete(PROMPT, **short)).token_ids == alone[:SHORT]


async def test_a_stream_that_fits_nowhere_else_waits_for_its_target() -> None:
    async with AsyncExitStack() as cleanup:
        big, small = await target(model=SLOW), await target(SHORT_CONTEXT, model=SLOW)
        cleanup.push_async_callback(small.close)
        async with coordinator(big, small) as client:
            events = client.generate(PROMPT, max_tokens=LONG, temperature=0, num_speculative_tokens=2)
            ids: list[int] = []
            again = None
            async for event in events:
                if isinstance(event, Chunk):
                    ids += event.token_ids
                    if again is None and len(ids) >= 10:
                        await big.close()
                        again = asyncio.create_task(target(model=SLOW, port=big.port))
            assert again is not None
            cleanup.push_async_callback((await again).close)
            assert len(ids) == LONG
            assert ids == list((await client.complete(PROMPT, max_tokens=LONG, temperature=0)).token_ids)


async def test_drafts_a_round_are_as_many_as_every_target_carries() -> None:
    async with AsyncExitStack() as cleanup:
        big, small = await target(), await target(**FEW_DRAFTS)
        for server in (big, small):
            cleanup.push_async_callback(server.close)
        async with coordinator(big, small) as client:
            assert (await client.model_info()).max_speculative_tokens == 2
            options = {"max_tokens": SHORT, "temperature": 0}
            texts = await asyncio.gather(*(client.complete(PROMPT, **options) for _ in range(8)))
            assert len({answer.token_ids for answer in texts}) == 1
