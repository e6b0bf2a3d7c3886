"""One soak: a fleet, clients, faults, and a report of every text, every leak and every failure."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
from faults.soak.clients import Progress, Running, run_request
from faults.soak.faults import Damage, Director
from faults.soak.fleet import Fleet
from faults.soak.oracle import Oracle
from faults.soak.plan import COORDINATORS, LONG_DECK, SERVICES, Request, fault, request
from faults.soak.readings import Reading

from outrider.errors import Unavailable

MIN_LAW_P_VALUE = 1e-6
"""One right run in a million is taken for wrong."""
REST_S = 1.0
MAX_LOOKS = 60
"""So many times, REST_S apart, is looked for what is not free yet: leases, pings and closings all end much sooner."""
TELLING_S = 20.0
POISONED = "POISONED_REQUEST"
WARM_UP = 8
"""Requests before the fleet is read for the first time: what a service opens once and keeps is no leak."""


@dataclass
class Report:
    """What is said at the end. Times are for information, the rest is judged."""

    seed: int
    num_texts: int = 0
    num_equal: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_resumed: int = 0
    num_suspected: int = 0
    """Taken for requests that kill their targets, two of which the plan had hit."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_law_pairs: int = 0
    law_p_value: float = 1.0
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)

    @property
    def verdict(self) -> str:
        """SOUND, BROKEN, or INCONCLUSIVE: nothing was at stake."""
        if self.differences or self.failures or self.leaks or self.crashes or self.law_p_value < MIN_LAW_P_VALUE:
            return "BROKEN"
        at_stake = self.damage.num_kills_of_streams and self.num_texts and 0 < self.num_accepted < self.num_drafted
        return "SOUND" if at_stake else "INCONCLUSIVE"

    def summary(self) -> dict[str, Any]:
        """The line for machines."""
        return {
            "texts": self.num_texts,
            "equal": self.num_equal,
            "kills": self.damage.num_kills,
            "leaks": len(self.leaks),
            "failed": len(self.failures),
            "detection_s_p99": _p99(self.damage.detection_s),
            "recovery_s_p99": _p99(self.damage.recovery_s),
            "verdict": self.verdict,
            "seed": self.seed,
            "kills_of_streams": self.damage.num_kills_of_streams,
            "tokens": self.num_tokens,
            "resumed": self.num_resumed,
            "cancelled": self.num_cancelled,
            "suspected": self.num_suspected,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "law_pairs": self.num_law_pairs,
            "law_p": self.law_p_value,
            "crashes": len(self.crashes),
            "complaints": len(self.complaints),
            "faults": dict(sorted(self.damage.kinds.items())),
        }


def _p99(samples: list[float]) -> float | None:
    return round(float(np.percentile(samples, 99)), 3) if samples else None


class Soak:
    """num_streams: clients at once. num_lines: faults at once. goes_on: whether the fault of this number is wanted."""

    def __init__(
        self,
        seed: int,
        *,
        num_streams: int = 8,
        num_lines: int = 2,
        deck: tuple[tuple[str, str], ...] = LONG_DECK,
        goes_on: Callable[[int], bool],
        log: TextIO = sys.stderr,
    ) -> None:
        self._seed = seed
        self._num_streams = num_streams
        self._num_lines = num_lines
        self._deck = deck
        self._goes_on = goes_on
        self._log = log
        self._began = time.monotonic()
        self._fleet = Fleet(seed)
        self._oracle = Oracle(seed)
        self._progress = Progress()
        self._running: set[Running] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._report = Report(seed)
        self._stops = False

    async def run(self) -> Report:
        report = self._report
        try:
            await self._fleet.start()
            names = (f"warm-up-{i}" for i in itertools.count())
            await asyncio.gather(*(self._serve(request(self._seed, next(names))) for _ in range(WARM_UP)))
            before = await self._readings_at_rest()
            director = Director(self._fleet, self._progress, self._running, self._launch)
            report.damage = director.damage
            clients = [asyncio.create_task(self._client(number)) for number in range(self._num_streams)]
            await asyncio.gather(*(self._line(director, number) for number in range(self._num_lines)))
            self._stops = True
            self._tell("the last texts")
            await asyncio.gather(*clients, *self._beside)
            await director.finish()
            self._tell("what is still held")
            report.leaks = await self._leaks(before)
        finally:
            await self._fleet.close()
        report.crashes, report.complaints = self._fleet.crashes, self._fleet.complaints
        report.num_law_pairs, report.law_p_value = self._oracle.num_law_pairs, self._oracle.law_p_value()
        return report

    async def _line(self, director: Director, number: int) -> None:
        """One fault after the other, beside those of the other lines."""
        for index in itertools.count(number, self._num_lines):
            if not self._goes_on(index):
                return
            planned = fault(self._seed, index, self._deck)
            self._tell(f"fault {index}: {planned.kind} {' '.join(planned.victims) or planned.links or ''}")
            await director.bring(planned)

    def _tell(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.2f} s: {line}", file=self._log, flush=True)

    async def _client(self, number: int) -> None:
        """One request after the other, those that the plan has for this client."""
        for turn in itertools.count():
            if self._stops:
                return
            await self._serve(request(self._seed, f"{number}-{turn}"))

    def _launch(self, one: Request) -> None:
        task = asyncio.create_task(self._serve(one))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _serve(self, one: Request) -> None:
        running = Running(one)
        self._running.add(running)
        try:
            await run_request(running, self._fleet.client_addresses, self._progress, self._seed)
        finally:
            self._running.discard(running)
        self._judge(running)

    def _judge(self, running: Running) -> None:
        report, name = self._report, running.request.name
        report.num_resumed += running.num_resumes
        report.num_cancelled += not (running.is_complete or running.failure)
        for stats in running.stats:
            report.num_drafted += stats.num_draft_tokens
            report.num_accepted += stats.num_accepted_draft_tokens
        took_s = time.monotonic() - running.began_at
        if took_s > TELLING_S:
            self._tell(f"request {name} took {took_s:.1f} s: {running.refusals[-2:]}")
        if POISONED in running.failure and sum(at > running.began_at for at in report.damage.targets_hit_at) > 1:
            # two targets that had it were hit by the plan: from inside that cannot be told from a request that kills
            report.num_suspected += 1
        elif running.failure:
            report.failures.append(f"request {name}: {running.failure} (before: {running.refusals[-3:]})")
            self._tell(report.failures[-1])
        for got in running.delivered():
            report.num_texts += 1
            report.num_tokens += len(got.token_ids)
            difference = self._oracle.fault(running.request, got)
            report.num_equal += not difference
            if difference:
                where = f"request {name}, choice {got.choice}, {running.num_resumes} resumes"
                report.differences.append(f"{where}: {difference}")
                self._tell(report.differences[-1])

    async def _readings_at_rest(self) -> dict[str, Reading]:
        """By service, once they are twice the same. Raises Unavailable."""
        last: dict[str, Reading] = {}
        for _ in range(MAX_LOOKS):
            await asyncio.sleep(REST_S)
            now = {name: reading for name in SERVICES if (reading := await self._fleet.reading(name)) is not None}
            if now == last and len(now) == len(SERVICES) and _all_healthy(now):
                return now
            last = now
        raise Unavailable(f"the fleet does not come to rest: {last}")

    async def _leaks(self, before: dict[str, Reading]) -> list[str]:
        """What is held beyond what was held at first, once it does not become less any more."""
        found: list[str] = []
        for _ in range(MAX_LOOKS):
            await asyncio.sleep(REST_S)
            found = []
            for name in SERVICES:
                reading = await self._fleet.reading(name)
                found += reading.more_than(before[name]) if reading is not None else [f"{name} does not answer"]
            if not found:
                return []
        for name in SERVICES:
            self._tell(f"{name} is connected: {self._fleet.connections(name)}")
        self._tell(f"clients and relays are connected: {self._fleet.own_connections()}")
        return found


def _all_healthy(readings: dict[str, Reading]) -> bool:
    return all(all(readings[name].health.values()) for name in COORDINATORS)
