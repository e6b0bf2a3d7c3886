"""Where a client's calls go: coordinators by address or name, each with a connection of its own.

None of them is special: a call goes to the one with the fewest calls of this client. One that cannot be reached, or
that is about to end, is left alone for a while that doubles; names are looked up again then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from functools import partial

import grpc.aio

from outrider.errors import Unavailable
from outrider.resume import Resume
from outrider.serving.channel import check_target
from outrider.serving.forks import is_ours, use_grpc
from outrider.serving.naming import PREFIX, Resolve, resolve, split_names

LOOKUP_INTERVAL_S = 10.0
HOLD = Resume()
"""Its waits are those of an address that failed."""


class Connection:
    """A channel, and the calls that it carries."""

    def __init__(self, address: str, channel: grpc.aio.Channel, version: int) -> None:
        """version: of what the channel was opened with."""
        self.address = address
        self.channel = channel
        self.version = version
        self.num_calls = 0
        self.is_left = False
        """No further call will use it."""


class _Endpoint:
    """An address. Its connection is opened by the first call."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.num_failures = 0
        self.ready_at = 0.0

    @property
    def num_calls(self) -> int:
        return self.connection.num_calls if self.connection is not None else 0


class _Lent(AbstractAsyncContextManager[Connection]):
    """No generator: a loop that ends closes all its generators at once, this one before the stream that is within."""

    def __init__(
        self, lend: Callable[[], Awaitable[Connection]], take_back: Callable[[Connection], Awaitable[None]]
    ) -> None:
        self._lend = lend
        self._take_back = take_back

    async def __aenter__(self) -> Connection:
        self._connection = await self._lend()
        return self._connection

    async def __aexit__(self, *_: object) -> None:
        await self._take_back(self._connection)


class Endpoints:
    """Raises InvalidArgument for what is no address."""

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """version: of what channels are opened with; those of another one are left."""
        fixed = [address for address in addresses if not address.startswith(PREFIX)]
        for address in fixed:
            check_target(address, "address")
        _, self._names = split_names([a for a in addresses if a.startswith(PREFIX)], "address")
        self._fixed = tuple(dict.fromkeys(fixed))
        self._open_channel = open_channel
        self._resolve = resolve
        self._clock = clock
        self._rng = rng or random.Random()
        self._version = version
        self._endpoints = {address: _Endpoint() for address in self._fixed}
        self._lookup = asyncio.Lock()
        self._look_up_at = 0.0
        self._left: set[Connection] = set()
        self.is_known = False
        """Whether any of them has answered yet."""
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._endpoints)

    def connection(self, tried: AbstractSet[str] = frozenset()) -> AbstractAsyncContextManager[Connection]:
        """For one call; not to an address of `tried` if there is another. Entering it raises Unavailable where a name
        leads nowhere, and after `close`; RuntimeError in a child of a process that had used gRPC."""
        return _Lent(partial(self._lend, tried), self._take_back)

    async def _lend(self, tried: AbstractSet[str]) -> Connection:
        use_grpc()
        if self.is_closed:
            raise Unavailable("this client is closed", reason="CLIENT_CLOSED")
        await self._look_up()
        connection = self._pick(tried)
        connection.num_calls += 1
        return connection

    async def _take_back(self, connection: Connection) -> None:
        connection.num_calls -= 1
        await self._close_left()

    def answered(self, connection: Connection) -> None:
        """A coordinator is there; over a connection that was left it says nothing about further calls."""
        self.is_known = True
        endpoint = self._endpoints.get(connection.address)
        if endpoint is not None and not connection.is_left:
            endpoint.num_failures, endpoint.ready_at = 0, 0.0

    def failed(self, connection: Connection) -> None:
        """The coordinator is gone, or going: further calls do without this connection, and for a while without its
        address. Calls that it still carries go on."""
        self._look_up_at = 0.0
        endpoint = self._endpoints.get(connection.address)
        if connection.is_left or endpoint is None:
            return
        self._leave(endpoint)
        endpoint.num_failures += 1
        endpoint.ready_at = self._clock() + HOLD.wait_s(endpoint.num_failures, self._rng)

    def ready_in_s(self) -> float:
        """Until a call may be tried; 0: at once."""
        return max(0.0, min((e.ready_at for e in self._endpoints.values()), default=0.0) - self._clock())

    async def close(self) -> None:
        """Ends every call; in a forked child none, since they are its parent's."""
        self.is_closed = True
        if not is_ours():
            return
        connections = {e.connection for e in self._endpoints.values() if e.connection is not None} | self._left
        await asyncio.gather(*(connection.channel.close() for connection in connections))

    def _pick(self, tried: AbstractSet[str]) -> Connection:
        now = self._clock()
        untried = {a: e for a, e in self._endpoints.items() if a not in tried} or self._endpoints
        # among equals by chance, or all clients of a program would begin with the same one
        address, endpoint = min(
            untried.items(), key=lambda item: (max(0.0, item[1].ready_at - now), item[1].num_calls, self._rng.random())
        )
        version = self._version()
        if endpoint.connection is not None and endpoint.connection.version != version:
            self._leave(endpoint)
        if endpoint.connection is None:
            endpoint.connection = Connection(address, self._open_channel(address), version)
        return endpoint.connection

    async def _look_up(self) -> None:
        """Names again, if it is time. What cannot be looked up now stays as it was."""
        if not self._names or self._clock() < self._look_up_at:
            return
        async with self._lookup:
            if self._clock() < self._look_up_at:
                return
            answers = await asyncio.gather(*(self._resolve(name) for name in self._names), return_exceptions=True)
            faults = [f"{n}: {a}" for n, a in zip(self._names, answers, strict=True) if isinstance(a, BaseException)]
            if faults and not self._endpoints:
                raise Unavailable(f"no coordinator by that name ({'; '.join(faults)})", reason="NAME_NOT_FOUND")
            if not faults:
                found = [address for answer in answers if not isinstance(answer, BaseException) for address in answer]
                self._set_addresses([*self._fixed, *found])
                await self._close_left()
            self._look_up_at = self._clock() + LOOKUP_INTERVAL_S

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        """Those that are gone keep the calls that they have."""
        for address in self._endpoints.keys() - set(addresses):
            self._leave(self._endpoints.pop(address))
        for address in addresses:
            self._endpoints.setdefault(address, _Endpoint())

    def _leave(self, endpoint: _Endpoint) -> None:
        connection, endpoint.connection = endpoint.connection, None
        if connection is not None:
            connection.is_left = True
            self._left.add(connection)

    async def _close_left(self) -> None:
        if not is_ours():
            return
        unused = [connection for connection in self._left if not connection.num_calls]
        self._left.difference_update(unused)
        for connection in unused:
            await connection.channel.close()
