"""Streams that move between target workers which fail when they are told to."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest

import coordinator.failover as failover
import coordinator.suspicion as suspicion
import coordinator.verifying as verifying
from coordinator.fleet.deaths import Deaths
from coordinator.fleet.trials import Trials
from coordinator.gamma.policy import Candidate
from coordinator.peer import WORKER_LOST, WORKER_SILENT
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.suspicion import RequestSuspicion
from coordinator.target_link import Timed
from coordinator.text.tokenizer import ToyCodec
from coordinator.verifying import TargetSide
from outrider.errors import DRAINING, Aborted, OutriderError, ResourceExhausted, Unavailable
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import TargetOpening, Verdict
from outrider.serving.session_calls import SealedProposal

REQUEST = ResolvedRequest(
    request_id="r",
    model="toy",
    prompt_ids=(1, 2),
    prompt_hash=hash_ids((1, 2)),
    sampling=SamplingParams(),
    stopping=StoppingParams(1000),
    max_speculative_tokens=4,
)
DIED = Unavailable("gone", reason=WORKER_LOST)
SILENT = Unavailable("silent", reason=WORKER_SILENT)
DRAINS = Unavailable("drains", reason=DRAINING)
FULL = ResourceExhausted("full", retry_delay_s=0.01)
FORGOTTEN = Aborted("its lease", reason="SESSION_LOST")
DRAFTS = SealedProposal(3, "model")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "FIRST_PAUSE_S", 1e-4)
    monkeypatch.setattr(failover, "MAX_PAUSE_S", 1e-3)
    monkeypatch.setattr(suspicion, "DOUBT_S", 0.01)
    monkeypatch.setattr(suspicion, "SILENT_DOUBT_S", 0.05)
    monkeypatch.setattr(verifying, "ASK_AGAIN_S", 0.005)


class Link:
    """A worker that fails at what its pool says, when it says so."""

    sends_features = is_verifying = False
    unheard_s = 0.1

    def __init__(self, pool: Pool, address: str) -> None:
        self.pool, self.address, self.closed, self.was_asked = pool, address, False, False
        self.incarnation = f"process at {address}"

    async def open(self, opening: TargetOpening) -> Timed:
        self._opened(opening, "opens")
        return self._token()

    async def open_deferred(self, opening: TargetOpening) -> None:
        self._opened(opening, "waits")

    async def verify(self, proposal: SealedProposal) -> Timed:
        self.pool.questions.append((self.address, proposal.num_draft_tokens))
        await asyncio.sleep(0)
        self._fails("computes", was_asked=True)
        return self._token()

    async def decode(self, credit_tokens: int, drafter: str, num_drafts: int, parents: tuple[int, ...]) -> Any:
        self.pool.questions.append((self.address, credit_tokens, drafter, num_drafts))
        for _ in range(credit_tokens):
            self._fails("computes", was_asked=True)
            yield self._token()

    async def stop_decoding(self) -> None:
        self.pool.questions.append((self.address, "stop"))
        self._fails("stops")

    def _opened(self, opening: TargetOpening, moment: str) -> None:
        self.epoch = opening.epoch
        self.pool.openings.append((self.address, opening.epoch, tuple(opening.committed_ids)))
        self.pool.suspected.append(opening.num_suspect_tokens)
        self._fails(moment)

    def _fails(self, moment: str, *, was_asked: bool = False) -> None:
        error = self.pool.error_at(self.address, moment)
        if error is not None:
            self.was_asked = was_asked
            raise error

    def _token(self) -> Timed:
        header = self.pool.stream.log.header(self.epoch)
        compute_us = int(1000 * self.pool.work_ms)
        return Timed(Verdict(header=header, committed_ids=(3,), origins=(Origin.PLAIN,), compute_us=compute_us), 1.0)

    def close(self) -> None:
        self.closed = True


class Pool:
    """Addresses in order of preference. `faults`: what happens at (address, moment), the first first."""

    def __init__(self, stream: Stream, *addresses: str) -> None:
        self.stream, self.addresses = stream, list(addresses)
        self.faults: dict[tuple[str, str], list[OutriderError]] = {}
        self.openings: list[Any] = []
        self.suspected: list[int] = []
        self.questions: list[Any] = []
        self.drafters: dict[str, tuple[str, ...]] = {}
        self.errors: list[Any] = []
        self.num_open = 0
        self.work_ms = 0.0
        self.dies = True
        self.lives: set[str] = set()
        """Incarnations of those that answer after all."""
        self.deaths, self.trials = Deaths(), Trials()
        self.changed = asyncio.Event()

    def error_at(self, address: str, moment: str) -> OutriderError | None:
        pending = self.faults.get((address, moment)) or [None]  # type: ignore[list-item]
        return pending.pop(0)

    def connect_target(self, stream: Stream, avoid: frozenset[str], standby: str = "", drafter: str = "") -> Any:
        for address in sorted(self.addresses, key=lambda a: drafter not in ("", *self.drafters.get(a, ()))):
            if address not in avoid:
                self.num_open += 1
                return Link(self, address)
        raise Unavailable("nobody left")

    async def without_guilt(self, deaths: Any) -> set[str]:
        asked = {death.incarnation for death in deaths}
        explained = {incarnation for incarnation in asked if self.deaths.is_explained(incarnation)}
        alive = asked & self.lives if self.dies else asked
        for incarnation in alive:
            self.deaths.answers(incarnation)
        return explained | alive

    def num_other_deaths(self, incarnations: Any) -> int:
        return self.deaths.num_besides(incarnations)

    def killed(self, incarnations: Any) -> None:
        self.deaths.explained(incarnations)

    def trial_begins(self, link: Any) -> int:
        return self.trials.begins(link.incarnation)

    def is_trial_over(self, link: Any, number: int) -> bool:
        return self.trials.is_over(link.incarnation, number)

    def disconnect(self, link: Any, error: Exception | None = None) -> None:
        if error in (DIED, SILENT):
            self.deaths.lost(link.incarnation)
        self.num_open -= 1
        self.errors.append(error)

    def target_candidates(self, link: Any) -> tuple[Candidate, ...]:
        return tuple(Candidate(name) for name in self.drafters.get(link.address, ()))

    def next_change(self) -> asyncio.Event:
        return self.changed

    def comes(self, address: str) -> None:
        self.addresses.append(address)
        self.changed, changed = asyncio.Event(), self.changed
        changed.set()


class Counts:
    """Of what a meter is told."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.num_recoveries = self.num_poisoned = 0

    def round(self, *_: Any) -> None: ...

    def lost_target(self, cause: str, unheard_s: float) -> None:
        assert unheard_s == 0.1
        self.causes[cause] += 1

    def recovered(self, after_s: float) -> None:
        assert after_s >= 0
        self.num_recoveries += 1

    def poisoned(self) -> None:
        self.num_poisoned += 1


def another_choice(pool: Pool, suspicion: RequestSuspicion) -> tuple[TargetSide, Pool]:
    """Of the same request, over the same workers."""
    stream = Stream(dataclasses.replace(REQUEST), len(suspicion.streams), ToyCodec(94))
    other = Pool(stream, *pool.addresses)
    other.faults, other.deaths, other.trials = pool.faults, pool.deaths, pool.trials
    other.openings, other.questions, other.suspected = pool.openings, pool.questions, pool.suspected
    return TargetSide(stream, other, suspicion=suspicion.of_stream()), other


def make(*addresses: str, wait_s: float = 30.0) -> tuple[TargetSide, Pool, Stream, Counts]:
    stream = Stream(dataclasses.replace(REQUEST), 0, ToyCodec(94))
    pool, counts = Pool(stream, *addresses), Counts()
    stream.statistics.observer = counts
    return TargetSide(stream, pool, wait_s), pool, stream, counts


async def begun(*addresses: str, wait_s: float = 30.0) -> tuple[TargetSide, Pool, Stream, Counts]:
    """With its first token."""
    side, pool, stream, counts = make(*addresses, wait_s=wait_s)
    stream.commit((await side.open()).verdict)
    return side, pool, stream, counts
