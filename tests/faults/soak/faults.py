"""Brings the planned faults about, and takes the time until they are noticed and overcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from faults.soak import plan
from faults.soak.clients import Progress, Running
from faults.soak.fleet import Fleet
from faults.soak.plan import COORDINATORS, TARGETS, Fault, Request

VICTIM_WAIT_S = 5.0
"""A victim without an open stream gets so long to have one, or is hit all the same."""
WATCH_S = 10.0
POLL_S = 0.02
NUM_FLAPS = 3


@dataclass
class Damage:
    """What was done, and what came of it."""

    kinds: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_kills_of_streams: int = 0
    """Kills of a process that had open streams."""
    detection_s: list[float] = field(default_factory=list)
    """From the kill or freeze of a worker until a coordinator sends no more streams there."""
    recovery_s: list[float] = field(default_factory=list)
    """From a kill until the next token of the stream that waited longest for it, of those that went on."""
    targets_hit_at: list[float] = field(default_factory=list)
    """When a target was killed or frozen, or a way to one disturbed, in `time.monotonic`; once for each."""


class Director:
    """`running`: the requests that are open now. `launch`: starts one more, beside those of the plan."""

    def __init__(
        self, fleet: Fleet, progress: Progress, running: set[Running], launch: Callable[[Request], None]
    ) -> None:
        self.damage = Damage()
        self._fleet = fleet
        self._progress = progress
        self._running = running
        self._launch = launch
        self._watching: set[asyncio.Task[None]] = set()
        self._taken: set[str | tuple[str, str]] = set()
        self._given_back = asyncio.Condition()

    async def bring(self, fault: Fault) -> None:
        """From its turn until everything that it hits is whole again. Several may be under way, of different things."""
        await self._progress.reach(self._progress.num_tokens + fault.after_tokens, limit_s=WATCH_S)
        async with self._alone_with({*fault.victims, *fault.links}):
            await self._bring(fault)

    @contextlib.asynccontextmanager
    async def _alone_with(self, names: set[str | tuple[str, str]]) -> AsyncIterator[None]:
        async with self._given_back:
            await self._given_back.wait_for(lambda: not names & self._taken)
            self._taken |= names
        try:
            yield
        finally:
            async with self._given_back:
                self._taken -= names
                self._given_back.notify_all()

    async def _bring(self, fault: Fault) -> None:
        self.damage.kinds[fault.kind] += 1
        match fault.kind:
            case plan.KILL:
                await self._kill(fault)
            case plan.FREEZE | plan.FREEZE_LONG:
                await self._freeze(fault)
            case plan.FLAP:
                for _ in range(NUM_FLAPS):
                    await self._kill(fault)
            case plan.DRAIN | plan.ROLL:
                for name in fault.victims:
                    await self._drain(name)
            case plan.HALF_OPEN_COORDINATOR:
                for link in fault.links:
                    self._fleet.relays[link].fall_silent()
                await self._kill(fault)
            case plan.CANCEL_STORM:
                for request in fault.requests:
                    self._launch(request)
            case _:
                await self._disturb_links(fault)

    async def finish(self) -> None:
        """Waits for what is still being timed."""
        await asyncio.gather(*self._watching)

    async def _kill(self, fault: Fault) -> None:
        open_streams = await asyncio.gather(*map(self._open_streams, fault.victims))
        for name in fault.victims:
            self._fleet.kill(name)
        self.damage.num_kills += len(fault.victims)
        self.damage.num_kills_of_streams += sum(map(bool, open_streams))
        self._hit(fault.victims)
        self._time(fault, takes_recovery=fault.kind == plan.KILL and len(fault.victims) == 1)
        await self._lasts(fault)
        await self._restart(fault.victims)

    async def _freeze(self, fault: Fault) -> None:
        await asyncio.gather(*map(self._open_streams, fault.victims))
        for name in fault.victims:
            self._fleet.freeze(name)
        self._hit(fault.victims)
        self._time(fault)
        await self._lasts(fault)
        for name in fault.victims:
            self._fleet.thaw(name)

    async def _drain(self, name: str) -> None:
        await self._open_streams(name)
        self._fleet.drain(name)
        await self._restart([name])

    async def _disturb_links(self, fault: Fault) -> None:
        for link in fault.links:
            relay = self._fleet.relays[link]
            match fault.kind:
                case plan.CUT:
                    relay.cut()
                case plan.HOLD:
                    relay.hold()
                case plan.SLOW:
                    relay.delay_s = fault.delay_s
                case plan.SILENT:
                    relay.fall_silent()
        self._hit(called for _, called in fault.links)
        await self._lasts(fault)
        for link in fault.links:
            self._fleet.relays[link].heal()

    def _hit(self, names: Iterable[str]) -> None:
        self.damage.targets_hit_at += [time.monotonic() for name in names if name in TARGETS]

    async def _lasts(self, fault: Fault) -> None:
        await self._progress.reach(self._progress.num_tokens + fault.lasts_tokens, limit_s=fault.limit_s)

    async def _restart(self, names: Iterable[str]) -> None:
        for name in names:
            await self._fleet.ended(name)
        await asyncio.gather(*(self._fleet.restart(name) for name in names))

    async def _open_streams(self, name: str) -> int:
        """Streams on a service at this moment; waits a while for one to come."""
        for _ in range(round(VICTIM_WAIT_S / POLL_S)):
            reading = await self._fleet.reading(name)
            if reading is not None and reading.num_streams:
                return reading.num_streams
            await asyncio.sleep(POLL_S)
        return 0

    def _time(self, fault: Fault, *, takes_recovery: bool = False) -> None:
        """Beside everything else: figures, never judged, of faults that come alone."""
        if self._taken - {*fault.victims, *fault.links}:
            return
        now = time.monotonic()
        workers = [name for name in fault.victims if name not in COORDINATORS]
        timings = [self._detect(worker, caller, now) for worker in workers for caller in COORDINATORS]
        timings += [self._recover(list(self._running), now)] if takes_recovery else []
        for timing in timings:
            task = asyncio.create_task(timing)
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)

    async def _detect(self, worker: str, caller: str, since: float) -> None:
        address = self._fleet.relays[caller, worker].address
        service = self._fleet.services[worker]
        starts = service.num_starts
        while service.num_starts == starts and (service.is_frozen or not service.is_meant_to_run):
            reading = await self._fleet.reading(caller)
            if reading is not None and reading.health.get(address) is False:
                self.damage.detection_s.append(time.monotonic() - since)
                return
            await asyncio.sleep(POLL_S)

    async def _recover(self, streams: list[Running], since: float) -> None:
        """Streams that were told to be slow, or to end, prove nothing."""
        waiting = [one for one in streams if one.num_tokens and not one.request.is_slow]
        gaps: list[float] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                while waiting:
                    gaps += [after for one in waiting if (after := _next_arrival(one, since)) is not None]
                    waiting = [one for one in waiting if _next_arrival(one, since) is None and one in self._running]
                    await asyncio.sleep(POLL_S)
        if gaps:
            self.damage.recovery_s.append(max(gaps))


def _next_arrival(running: Running, since: float) -> float | None:
    return next((arrival - since for arrival in running.arrivals if arrival > since), None)
