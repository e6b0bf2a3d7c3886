"""Clients of a fleet under faults: each runs one request to its end, wherever it may go on, and keeps what it got."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from faults.soak.oracle import Delivered
from faults.soak.plan import Request

import outrider
from outrider.client import KeepAlive
from outrider.errors import OutriderError
from outrider.results import Speculation
from outrider.resume import Resume

PATIENCE_S = 120.0
"""Without a token for so long, with every fault of the plan over in seconds, a request has failed."""
HANG_S = 3 * PATIENCE_S
"""Without an event or an error for so long, it hangs."""
RESUME = Resume(patience_s=PATIENCE_S, max_losses=1000)
PASSING = ("UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED")
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
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


@dataclass(eq=False, slots=True)
class Text:
    """What has come of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    token_logprobs: list[float] = field(default_factory=list)
    complete: outrider.Complete | None = None


@dataclass(eq=False)
class Running:
    """One request on its way."""

    request: Request
    began_at: float = field(default_factory=time.monotonic)
    texts: list[Text] = field(default_factory=list)
    started: outrider.Started | None = None
    stats: list[Speculation] = field(default_factory=list)
    num_resumes: int = 0
    refusals: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """When each chunk came, in `time.monotonic`."""
    failure: str = ""

    def __post_init__(self) -> None:
        self.texts = [Text() for _ in range(self.request.options.get("n", 1))]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def is_complete(self) -> bool:
        return all(text.complete is not None for text in self.texts)

    def delivered(self) -> list[Delivered]:
        """By choice; nothing before the stream has started."""
        if self.started is None:
            return []
        return [
            Delivered(
                tuple(one.token_ids),
                one.text,
                one.complete.finish_reason if one.complete is not None else "",
                one.complete.matched_stop if one.complete is not None else None,
                tuple(one.token_logprobs),
                self.started.seed,
                self.started.acceptance,
                choice,
            )
            for choice, one in enumerate(self.texts)
        ]


async def run_request(running: Running, addresses: Sequence[str], progress: Progress, seed: int) -> None:
    """Until it has completed, was cancelled as planned, or failed; that is noted in `running`."""
    try:
        await _again_and_again(running, addresses, progress, seed)
    except (OutriderError, TimeoutError) as error:
        running.failure = _said(error)


async def _again_and_again(running: Running, addresses: Sequence[str], progress: Progress, seed: int) -> None:
    """Call after call, from one coordinator to the next. Raises what does not pass, or does not in time; once it has
    begun, a text whose client should mend it is not helped here."""
    by_hand, rng = running.request.resumes_by_hand, random.Random(f"{seed}/backoff/{running.request.name}")
    number, backoff_s, last_token_at, num_tokens = running.request.coordinator, MIN_BACKOFF_S, time.monotonic(), 0
    while True:
        address = addresses[number % len(addresses)] if by_hand else addresses
        try:
            async with outrider.Client(address, keep_alive=KEEP_ALIVE, resume=None if by_hand else RESUME) as client:
                await _stream(client, running, progress)
            return
        except OutriderError as error:
            if running.num_tokens > num_tokens:
                backoff_s, last_token_at, num_tokens = MIN_BACKOFF_S, time.monotonic(), running.num_tokens
            running.refusals.append(_said(error))
            may_pass = error.status in PASSING and (by_hand or running.started is None)
            if not may_pass or time.monotonic() - last_token_at > PATIENCE_S:
                raise
        number += 1
        await asyncio.sleep(backoff_s * rng.uniform(0.5, 1.5))
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


async def _stream(client: outrider.Client, running: Running, progress: Progress) -> None:
    """One call: from where the calls before it ended. Raises TimeoutError once it hangs."""
    request, options, loop = running.request, dict(running.request.options), asyncio.get_running_loop()
    if (started := running.started) is not None:
        running.num_resumes += 1
        options |= {
            "resume_token_ids": list(running.texts[0].token_ids),
            "seed": started.seed,
            "acceptance": started.acceptance,
            "prompt_hash": started.prompt_hash,
            "model_fingerprint": started.model_fingerprint,
        }
    async with asyncio.timeout(HANG_S) as hang, aclosing(client.generate(request.prompt, **options)) as events:
        async for event in events:
            hang.reschedule(loop.time() + HANG_S)
            _take(running, event)
            if isinstance(event, outrider.Chunk):
                progress.count(len(event.token_ids))
                await _behave(request, running.num_tokens, len(event.token_ids))
            if request.cancel_after is not None and running.num_tokens >= request.cancel_after:
                return
    if not running.is_complete:
        running.failure = "the stream ended without `complete`"


def _take(running: Running, event: outrider.Event) -> None:
    match event:
        case outrider.Started():
            running.failure = running.failure or _changed(running.started, event)
            running.started = running.started or event
        case outrider.Chunk():
            one = running.texts[event.index]
            one.token_ids += event.token_ids
            one.text += event.text
            one.token_logprobs += event.logprobs.token_logprobs if event.logprobs is not None else ()
            running.arrivals.append(time.monotonic())
        case outrider.Complete():
            one, one.complete = running.texts[event.index], event
            running.stats.append(event.speculation)
            running.num_resumes += event.num_resumes
            if event.usage.completion_tokens != len(one.token_ids):
                running.failure = f"usage tells {event.usage} for {len(one.token_ids)} tokens"


def _changed(before: outrider.Started | None, now: outrider.Started) -> str:
    """What a resumed stream says of itself must be what it said first."""
    if before is None:
        return ""
    kept = ("seed", "acceptance", "prompt_hash", "model", "model_fingerprint", "max_tokens")
    changed = [name for name in kept if getattr(before, name) != getattr(now, name)]
    return f"resumed with another {', '.join(changed)}" if changed else ""


def _said(error: BaseException) -> str:
    return f"{getattr(error, 'status', 'HANGS')} {getattr(error, 'reason', '')}: {error}"


async def _behave(request: Request, num_tokens: int, num_new: int) -> None:
    at, stall_s = request.stall
    if stall_s and num_tokens - num_new < at <= num_tokens:
        await asyncio.sleep(stall_s)
    elif request.pause_s:
        await asyncio.sleep(request.pause_s)
