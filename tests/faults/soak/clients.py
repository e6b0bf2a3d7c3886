"""Clients of a fleet under faults: each runs one request to its end, wherever it may go on, and keeps what it got."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from faults.soak.oracle import Delivered
from faults.soak.plan import NUM_COORDINATORS, Request

import outrider
from outrider.client import KeepAlive
from outrider.errors import OutriderError
from outrider.results import Speculation

PATIENCE_S = 120.0
"""Without a new token for so long, with every fault of the plan over in seconds, a request hangs."""
PASSING = ("UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED")
MAX_BACKOFF_S = 1.0
KEEP_ALIVE = KeepAlive(interval_ms=10_000, timeout_ms=5_000)


class Progress:
    """Tokens delivered to all clients, and who waits for them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._changed = asyncio.Event()

    def count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._changed.set()

    async def reach(self, num_tokens: int, limit_s: float) -> bool:
        """Until so many were delivered in all. False: not within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self.num_tokens < num_tokens:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


@dataclass(eq=False)
class Running:
    """One request on its way."""

    request: Request
    coordinator: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    token_logprobs: list[float] = field(default_factory=list)
    started: outrider.Started | None = None
    complete: outrider.Complete | None = None
    stats: list[Speculation] = field(default_factory=list)
    num_resumes: int = 0
    refusals: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """When each chunk came, in `time.monotonic`."""
    failure: str = ""

    def delivered(self) -> Delivered | None:
        """None before the stream has started."""
        if self.started is None:
            return None
        complete = self.complete
        return Delivered(
            tuple(self.token_ids),
            self.text,
            complete.finish_reason if complete is not None else "",
            complete.matched_stop if complete is not None else None,
            tuple(self.token_logprobs),
            self.started.seed,
            self.started.acceptance,
        )


async def run_request(running: Running, address_of: Callable[[int], str], progress: Progress, seed: int) -> None:
    """Until it has completed, was cancelled as planned, or failed; that is noted in `running`."""
    rng = random.Random(f"{seed}/backoff/{running.request.name}")
    backoff_s, last_token_at, num_tokens = 0.05, time.monotonic(), 0
    while True:
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                outrider.Client(address_of(running.coordinator), keep_alive=KEEP_ALIVE) as client,
            ):
                await _stream(client, running, progress)
            return
        except (OutriderError, TimeoutError) as error:
            status = getattr(error, "status", "HANGS")
            if len(running.token_ids) > num_tokens:
                backoff_s, last_token_at, num_tokens = 0.05, time.monotonic(), len(running.token_ids)
            running.refusals.append(f"{status} {error}")
            if status not in PASSING or time.monotonic() - last_token_at > PATIENCE_S:
                running.failure = f"{status} {error}"
                return
        await asyncio.sleep(backoff_s * rng.uniform(0.5, 1.5))
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        running.coordinator = (running.coordinator + 1) % NUM_COORDINATORS


async def _stream(client: outrider.Client, running: Running, progress: Progress) -> None:
    """One call: from where the calls before it ended."""
    request, options = running.request, dict(running.request.options)
    if running.started is not None:
        running.num_resumes += 1
        options |= {
            "resume_token_ids": list(running.token_ids),
            "seed": running.started.seed,
            "acceptance": running.started.acceptance,
            "prompt_hash": running.started.prompt_hash,
        }
    async with aclosing(client.generate(request.prompt, **options)) as events:
        async for event in events:
            match event:
                case outrider.Started():
                    running.failure = running.failure or _changed(running.started, event)
                    running.started = running.started or event
                case outrider.Chunk():
                    running.token_ids += event.token_ids
                    running.text += event.text
                    if event.logprobs is not None:
                        running.token_logprobs += event.logprobs.token_logprobs
                    running.arrivals.append(time.monotonic())
                    progress.count(len(event.token_ids))
                    await _behave(request, len(running.token_ids), len(event.token_ids))
                case outrider.Complete():
                    running.complete = event
                    running.stats.append(event.speculation)
                    if event.usage.completion_tokens != len(running.token_ids):
                        running.failure = f"usage tells {event.usage} for {len(running.token_ids)} tokens"
            if request.cancel_after is not None and len(running.token_ids) >= request.cancel_after:
                return
    if running.complete is None:
        running.failure = "the stream ended without `complete`"


def _changed(before: outrider.Started | None, now: outrider.Started) -> str:
    """What a resumed stream says of itself must be what it said first."""
    if before is None:
        return ""
    kept = ("seed", "acceptance", "prompt_hash", "model")
    changed = [name for name in kept if getattr(before, name) != getattr(now, name)]
    return f"resumed with another {', '.join(changed)}" if changed else ""


async def _behave(request: Request, num_tokens: int, num_new: int) -> None:
    at, stall_s = request.stall
    if stall_s and num_tokens - num_new < at <= num_tokens:
        await asyncio.sleep(stall_s)
    elif request.pause_s:
        await asyncio.sleep(request.pause_s)
