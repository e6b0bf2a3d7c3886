"""`/health`: whether texts can be had here. `/live`: whether this process answers at all."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.gateway.service import Gateway
from outrider.errors import OutriderError
from outrider.server_info import ServerInfo
from outrider.serving.access import CALLERS_UNKNOWN

TIMEOUT_S = 2.0
REMEMBERED_S = 1.0
"""What was found is told for so long: whoever may ask this may ask it often."""
_ANSWERS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""Of a coordinator that is well, and tells strangers nothing."""


class Health:
    """Both routes. Neither tells a stranger more than well or not, and why not."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asking = asyncio.Lock()
        self._found = ""
        self._until = 0.0

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        """200; 503 while nothing can be served or the gateway drains."""
        fault = "the gateway is draining" if self._gateway.running.ends_soon else await self._fault()
        if fault:
            return JSONResponse({"status": "unavailable", "detail": fault}, 503)
        return JSONResponse({"status": "ok"})

    async def _fault(self) -> str:
        async with self._asking:
            if time.monotonic() >= self._until:
                self._found = await self._look()
                self._until = time.monotonic() + REMEMBERED_S
        return self._found

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return _fault_of(await self._gateway.client.server_info())
        except TimeoutError:
            return f"no coordinator answered within {TIMEOUT_S:g} s"
        except OutriderError as error:
            if error.reason == CALLERS_UNKNOWN:
                return error.message
            return "" if error.status in _ANSWERS else f"{error.status}: no coordinator can be reached"


def _fault_of(info: ServerInfo) -> str:
    if info.draining:
        return "the coordinator is draining"
    is_served = any(worker.role == "target" and worker.healthy for worker in info.workers)
    return "" if is_served else "no target worker is healthy"
