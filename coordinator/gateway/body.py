"""The JSON body of a request, bounded and read strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from coordinator.strict_json import parse_json
from outrider.errors import InvalidArgument

BODY_TIMEOUT_S = 60.0


class TooLarge(InvalidArgument):
    """The body is longer than this gateway takes."""

    http_status = 413


class NotJson(InvalidArgument):
    """The body says that it is something else. A page of another origin can send that without being asked first."""

    http_status = 415


class TooSlow(InvalidArgument):
    """The body does not come."""

    http_status = 408


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises InvalidArgument, and starlette's ClientDisconnect where it was cut short."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson(f"content-type is {kind[:80]!r}, must be application/json", field="content-type")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise TooLarge(f"the body has more than {max_bytes} bytes: send less", reason="TOO_LARGE")
    except TimeoutError:
        raise TooSlow(f"the body was not there after {BODY_TIMEOUT_S:g} s", reason="TOO_SLOW") from None
    try:
        body = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is no JSON: {error}", reason="BAD_JSON") from None
    if not isinstance(body, dict):
        raise InvalidArgument(f"the body is a JSON {type(body).__name__}, must be an object", reason="BAD_JSON")
    return body
