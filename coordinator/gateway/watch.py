"""What a gateway's log says of its coordinators between requests: that none can be reached, why, and that one can be
again. Clients are told that none can; the cause is the operator's."""

from __future__ import annotations

import asyncio
import logging

from outrider.client import Client
from outrider.errors import OutriderError, PermissionDenied, Unauthenticated
from outrider.serving.access import CALLERS_UNKNOWN

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
RETRY_INTERVAL_S = 1.0
TIMEOUT_S = 5.0


async def watch(client: Client) -> None:
    """Asks at once, then now and then, and tells each change but that all is well at first. Never returns."""
    told = ""
    while True:
        fault = await find_fault(client)
        if fault and not told:
            log.warning("no coordinator serves this gateway, requests wait and fail: %s", fault)
        elif told and not fault:
            log.info("a coordinator answers again")
        told = fault
        await asyncio.sleep(RETRY_INTERVAL_S if fault else INTERVAL_S)


async def find_fault(client: Client) -> str:
    """Why no coordinator can be asked; empty where one can. One that wants a token of whoever asks is well: tokens are
    the callers' to show."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.server_info()
    except TimeoutError:
        return f"{client.address} did not answer within {TIMEOUT_S:g} s"
    except OutriderError as error:
        is_well = isinstance(error, Unauthenticated | PermissionDenied) and error.reason != CALLERS_UNKNOWN
        return "" if is_well else error.message
    return ""
