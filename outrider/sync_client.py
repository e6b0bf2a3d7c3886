"""The blocking twin of `outrider.Client`, for code without an event loop.

    with outrider.SyncClient("localhost:50050") as client:
        for event in client.chat([{"role": "user", "content": "Hello"}], temperature=0):
            if isinstance(event, outrider.Chunk):
                print(event.text, end="")

Methods, options, results and errors are those of `outrider.Client`, which does the work on an event loop in a thread
that all blocking clients of the process share. Any number of threads may use one client; one stream is for one of them
at a time.

A client does not live through a fork, nor do its streams: in a forked child they raise RuntimeError, and once a process
has made a call so does every call of a new client there. Start processes by spawn,
`multiprocessing.get_context("spawn")`, or make clients and first calls after the fork.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from outrider.client import Client
from outrider.loop_thread import LoopThread, shared_loop

P = ParamSpec("P")
R = TypeVar("R")


class _Stream(Generic[R]):
    """An async generator's events, one asked for at a time: it is not closed while it still makes one."""

    def __init__(self, events: AsyncGenerator[R, None]) -> None:
        self._events = events
        self._turn = asyncio.Lock()

    async def next(self) -> R | None:
        async with self._turn:
            return await anext(self._events, None)

    async def close(self) -> None:
        async with self._turn:
            await self._events.aclose()


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncClient, P], R]:
    """The same method, whose caller waits for the result."""

    @functools.wraps(method)
    def call(self: SyncClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._running_loop().run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[SyncClient, P], Generator[R, None, None]]:
    """The same method, whose events are waited for one by one. Leaving the loop early (`close`) cancels the request."""

    @functools.wraps(method)
    def call(self: SyncClient, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        return _events(self._running_loop(), method(self._client, *args, **kwargs))

    return call


def _events(loop: LoopThread, events: AsyncGenerator[R, None]) -> Generator[R, None, None]:
    stream = _Stream(events)
    try:
        while (event := loop.run(stream.next())) is not None:
            yield event
    finally:
        loop.submit(stream.close())  # no waiting: the garbage collector may be who ends this, on any thread


def _made_like(
    make: Callable[P, Client],
) -> Callable[[Callable[..., None]], Callable[Concatenate[SyncClient, P], None]]:
    """The same parameters."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[SyncClient, P], None]:
        return functools.wraps(Client.__init__)(method)

    return decorate


class SyncClient:
    """Connections to coordinators of one service; use it as a context manager, or `close()` it."""

    @_made_like(Client)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        async def make() -> Client:
            return Client(*args, **kwargs)

        self._loop = shared_loop()
        self._first: SyncClient | None = None
        self._client = self._loop.run(make())
        weakref.finalize(self, _let_go, self._loop, self._client)

    def with_metadata(self, metadata: Mapping[str, str]) -> SyncClient:
        """The same client over the same connections, whose calls carry `metadata` too. Close the first one."""
        other = copy.copy(self)
        other._first = self  # whose end would close the connections
        other._client = self._client.with_metadata(metadata)
        return other

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    close = _blocking(Client.close)
    generate = _iterating(Client.generate)
    chat = _iterating(Client.chat)
    complete = _blocking(Client.complete)
    model_info = _blocking(Client.model_info)
    server_info = _blocking(Client.server_info)
    trace = _blocking(Client.trace)
    records = _blocking(Client.records)
    activity = _blocking(Client.activity)
    tokenize = _blocking(Client.tokenize)
    detokenize = _blocking(Client.detokenize)
    token_bytes = _blocking(Client.token_bytes)

    def _running_loop(self) -> LoopThread:
        self._loop.check_is_here()
        return self._loop


def _let_go(loop: LoopThread, client: Client) -> None:
    """Of a client that nobody holds any more. No waiting: this may run on any thread."""
    loop.submit(client.close())
