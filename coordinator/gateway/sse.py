"""Server-sent events as OpenAI's clients read them: a JSON object an event, `[DONE]` after a text that is complete."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
"""The last one is for proxies that would collect events before passing them on."""


class EventStream:
    """One answer. Each call returns once the connection has room for more, so that a slow reader slows its text."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def begin(self, headers: dict[str, str]) -> None:
        """Status 200."""
        self.has_begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (HEADERS | headers).items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def data(self, value: dict[str, Any]) -> None:
        """A piece of the answer."""
        await self._body(b"data: %b\n\n" % encode(value))

    async def fail(self, error: dict[str, Any]) -> None:
        """Ends the stream with an error, and without `[DONE]`."""
        await self._body(b"event: error\ndata: %b\n\n" % encode(error))
        await self._body(b"", more=False)

    async def done(self) -> None:
        """Ends the stream: everything was said."""
        await self._body(DONE, more=False)

    async def _body(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def encode(value: dict[str, Any]) -> bytes:
    """JSON in ASCII: some clients take U+2028 for the end of a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
