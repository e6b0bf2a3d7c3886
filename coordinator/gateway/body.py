"""The JSON body of a request, bounded and read strictly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from coordinator.strict_json import parse_json
from outrider.errors import InvalidArgument

BODY_TIMEOUT_S = 60.0
MAX_BODIES = 1024
MAX_FULL_BODIES = 64
"""Together in memory while they come, in bodies of the greatest length."""


class TooLarge(InvalidArgument):
    """The body is longer than this gateway takes."""

    http_status = 413


class NotJson(InvalidArgument):
    """The body says that it is something else. A page of another origin can send that without being asked first."""

    http_status = 415


class TooSlow(InvalidArgument):
    """The body does not come."""

    http_status = 408


@dataclass(slots=True, eq=False)
class _Coming:
    limit: asyncio.Timeout
    num_bytes: int = 0


class Bodies:
    """Those that are on their way, of nobody knows whom: they hold no place among requests. Where there are too many of
    them, the one that has been on its way longest makes room, so that whoever sends nothing keeps nobody out."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one body."""
        self._max_bytes = max_bytes
        self._coming: dict[_Coming, None] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._coming)

    async def read(self, request: Request) -> bytearray:
        """Raises InvalidArgument, and starlette's ClientDisconnect where it was cut short."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NotJson(f"content-type is {kind[:80]!r}, must be application/json", field="content-type")
        raw = bytearray()
        coming = _Coming(asyncio.timeout(BODY_TIMEOUT_S))
        try:
            async with coming.limit:
                self._coming[coming] = None
                self._make_room()
                async for part in request.stream():
                    raw += part
                    if len(raw) > self._max_bytes:
                        raise TooLarge(f"the body has more than {self._max_bytes} bytes: send less", reason="TOO_LARGE")
                    coming.num_bytes += len(part)
                    self._num_bytes += len(part)
                    self._make_room()
        except TimeoutError:
            raise TooSlow(
                f"the body did not come in time: it has {BODY_TIMEOUT_S:g} s, and less where the gateway ends or very "
                "many are on their way",
                reason="TOO_SLOW",
            ) from None
        finally:
            self._forget(coming)
        return raw

    def end_within(self, grace_s: float) -> None:
        """Those that are on their way have so long."""
        until = asyncio.get_running_loop().time() + grace_s
        for coming in self._coming:
            when = coming.limit.when()
            if when is not None and until < when and not coming.limit.expired():
                coming.limit.reschedule(until)

    def _make_room(self) -> None:
        max_bytes = MAX_FULL_BODIES * self._max_bytes
        while len(self._coming) > MAX_BODIES or (self._coming and self._num_bytes > max_bytes):
            oldest = next(iter(self._coming))
            self._forget(oldest)
            if not oldest.limit.expired():
                oldest.limit.reschedule(asyncio.get_running_loop().time())

    def _forget(self, coming: _Coming) -> None:
        self._coming.pop(coming, None)
        self._num_bytes -= coming.num_bytes
        coming.num_bytes = 0


def parse_body(raw: bytearray) -> dict[str, Any]:
    """Raises InvalidArgument."""
    try:
        body = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is no JSON: {error}", reason="BAD_JSON") from None
    if not isinstance(body, dict):
        raise InvalidArgument(f"the body is a JSON {type(body).__name__}, must be an object", reason="BAD_JSON")
    return body
