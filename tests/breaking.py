"""A `GenerationService` before a coordinator that breaks every stream, in all the ways in which networks and processes
do: what the client must mend by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.errors import DRAINING, Aborted, OutriderError, ResourceExhausted, Unavailable
from outrider.resume import Resume
from outrider.serving.channel import open_channel
from outrider.serving.server import Server, running_server
from outrider.settings import CoordinatorSettings
from outrider.v1 import generation_pb2, generation_pb2_grpc

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
TOLD: dict[str, OutriderError] = {
    "lost": Unavailable("worker gone", reason="WORKER_LOST", retry_delay_s=0.0),
    "draining": Unavailable("elsewhere", reason=DRAINING, retry_delay_s=0.0),
    "session": Aborted("open it again", reason="SESSION_LOST", retry_delay_s=0.0),
}
"""Ways with a status of ours."""
BARE = {
    "reset": grpc.StatusCode.UNAVAILABLE,
    "internal": grpc.StatusCode.INTERNAL,
    "unknown": grpc.StatusCode.UNKNOWN,
    "cancelled": grpc.StatusCode.CANCELLED,
}
"""Ways in which a transport tells of a process that is gone."""
CUT, FULL = "cut", "full"
"""The stream ends as if it had its end; a queue is full, for one that had run already."""
WAYS = (*TOLD, *BARE, CUT, FULL)
QUICK = Resume(patience_s=3600.0, max_losses=10**9, min_wait_s=0.0, max_wait_s=0.001)
"""For clients of it: losses without end, and no time for waits."""


class Breaking:
    """Ends each stream after a number of messages from `lengths`, in one of `ways`; one that is complete ends well."""

    def __init__(
        self, channel: grpc.aio.Channel, seed: int, lengths: Sequence[int], ways: Sequence[str] = WAYS
    ) -> None:
        self.rng = random.Random(seed)
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.broken: Counter[str] = Counter()
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.lengths = lengths
        self._ways = ways

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        way, num_left = self.rng.choice(self._ways), self.rng.choice(self.lengths)
        call = self._stub.Generate(request)
        try:
            async for response in call:
                if not num_left and (way != FULL or request.resume_token_ids):
                    self.broken[way] += 1
                    await self._end(way, context)
                    return
                num_left = max(0, num_left - 1)
                yield response
        finally:
            call.cancel()

    async def _end(self, way: str, context: Any) -> None:
        if way in TOLD:
            raise TOLD[way]
        if way in BARE:
            await context.abort(BARE[way], "Socket closed")
        if way == FULL:
            raise ResourceExhausted("full", reason="QUEUE_FULL", retry_delay_s=0.0)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return await self._stub.GetServerInfo(request)


@asynccontextmanager
async def breaking(
    address: str, seed: int, lengths: Sequence[int], ways: Sequence[str] = WAYS
) -> AsyncIterator[tuple[str, Breaking]]:
    """Its address, before the coordinator at `address`."""
    async with open_channel(address) as channel, running_server(CoordinatorSettings(port=0), [SERVICE]) as server:
        servicer = Breaking(channel, seed, lengths, ways)
        await server.open({SERVICE.full_name: servicer})
        yield address_of(server), servicer


def address_of(server: Server) -> str:
    return f"127.0.0.1:{server.port}"
