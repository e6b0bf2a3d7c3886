"""A worker whose engine computes no more says so: no session comes to it, and those that it has go elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from outrider.errors import PASS_FAILED, Unavailable
from outrider.lm.engine_health import EngineHealth

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
BROKEN = "WORKER_BROKEN"
"""Reason of a worker that takes no session for that."""


def refuse_if_broken(health: EngineHealth) -> None:
    """Raises Unavailable."""
    if fault := health.fault():
        raise Unavailable(f"the worker does not compute: {fault}", reason=BROKEN, retry_delay_s=1.0)


@contextlib.asynccontextmanager
async def watched_engine(
    health: EngineHealth, set_serving: Callable[[bool], Awaitable[None]], lose: Callable[[Unavailable], None]
) -> AsyncIterator[None]:
    """set_serving: told when it begins to compute no more, and when it may again. lose: ends the sessions there are."""
    watching = asyncio.create_task(_watch(health, set_serving, lose))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    health: EngineHealth, set_serving: Callable[[bool], Awaitable[None]], lose: Callable[[Unavailable], None]
) -> None:
    was_broken = False
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        fault = health.fault()
        if bool(fault) != was_broken:
            was_broken = bool(fault)
            log.error("the worker does not compute: %s", fault) if fault else log.warning("the worker tries again")
            await set_serving(not fault)
        if fault:
            lose(Unavailable(f"the worker does not compute: {fault}", reason=PASS_FAILED))
