"""One request of either API, from its body to the last byte of its answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from coordinator.gateway import calls
from coordinator.gateway.answer import Answer
from coordinator.gateway.api import Api
from coordinator.gateway.body import parse_body
from coordinator.gateway.errors import CLIENT_GONE, Failure, answer_to, failure_of, log_cause
from coordinator.gateway.fields import Fields, parse
from coordinator.gateway.metrics import Count
from coordinator.gateway.running import ClientGone, while_connected
from coordinator.gateway.service import Gateway, request_id_of
from coordinator.gateway.sse import EventStream
from outrider.errors import Internal, OutriderError
from outrider.serving.request_context import REQUEST_ID

log = logging.getLogger(__name__)


class Generation:
    """The route of one API."""

    def __init__(self, gateway: Gateway, api: Api[Any]) -> None:
        self._gateway = gateway
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = self._gateway.metrics.began(self._api.path)
        status = 500
        try:
            request = Request(scope, receive)
            status = await _Exchange(self._gateway, self._api, request, send, count).run()
        except (ClientGone, ClientDisconnect):
            status = CLIENT_GONE
        finally:
            count.ended(status)


class _Exchange:
    """One request and its answer."""

    def __init__(self, gateway: Gateway, api: Api[Any], request: Request, send: Send, count: Count) -> None:
        self._gateway = gateway
        self._api = api
        self._request = request
        self._send = send
        self._count = count
        self._stream = EventStream(send)
        self._fields: Fields | None = None
        self._request_id = request_id_of(request)

    async def run(self) -> int:
        """What it came to, as an HTTP status. Raises ClientGone or ClientDisconnect."""
        failure: OutriderError
        try:
            raw = await self._gateway.bodies.read(self._request)
            async with self._gateway.running.place():
                await while_connected(self._request.receive, self._answer(parse_body(raw)))
            return 200
        except (ClientGone, ClientDisconnect):
            raise
        except OutriderError as error:
            failure = error
        except Exception:
            log.exception("%s failed", self._api.path)
            failure = Internal("internal error; the gateway's log has its cause")
        return await self._fail(self._failure(failure))

    async def _answer(self, body: dict[str, Any]) -> None:
        fields = self._fields = parse(self._api.fields, body)
        request_id = self._request_id = fields.request_id or self._request_id
        prompts = self._api.prompts(fields)
        options = self._api.options(fields) | {"request_id": request_id}
        client = self._gateway.client_of(self._request)
        spellings, echoes = self._gateway.spellings, await self._api.echoes(fields, prompts, client)
        async with aclosing(calls.events(client, prompts, options)) as events:
            # Whoever asked is known to a coordinator before anything is kept for an answer, or said of it.
            told = _with(await anext(events), events)
            answer = Answer(self._api, fields, client, spellings, request_id=request_id, echoes=echoes)
            if fields.stream:
                await self._send_pieces(answer, told, request_id)
            else:
                whole = await answer.whole(told)
        # last of all: from here on the connection says that it has been let go, as if the client had hung up
        if fields.stream:
            await self._stream.done()
        else:
            response = JSONResponse(whole, headers={REQUEST_ID: request_id})
            await response(self._request.scope, self._request.receive, self._send)

    async def _send_pieces(self, answer: Answer, told: AsyncIterator[calls.Told], request_id: str) -> None:
        """The status waits for what the coordinator says of the request, not for its first token."""
        await self._stream.begin({REQUEST_ID: request_id})
        is_first = True
        async with aclosing(answer.pieces(told)) as pieces:
            async for piece in pieces:
                await self._stream.data(piece)
                if is_first:
                    is_first = False
                    self._count.first_piece()

    def _failure(self, error: OutriderError) -> Failure:
        field = "response_format"
        if self._fields is not None:
            with suppress(OutriderError):
                field = self._fields.structured()[0]
        return failure_of(error, structured_field=field)

    async def _fail(self, failure: Failure) -> int:
        log_cause(failure, self._request_id)
        if self._stream.has_begun:
            await self._stream.fail(failure.body)
        else:
            response = answer_to(failure, self._request_id)
            await response(self._request.scope, self._request.receive, self._send)
        return failure.status


async def _with(first: calls.Told, rest: AsyncIterator[calls.Told]) -> AsyncIterator[calls.Told]:
    yield first
    async for event in rest:
        yield event
