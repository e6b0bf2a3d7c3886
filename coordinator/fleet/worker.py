"""One worker as the coordinator sees it, watched for as long as it is known: description, health, load, network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import aclosing

import grpc

from coordinator.fleet.deaths import Deaths
from coordinator.fleet.limits import Foreign, Limits, limits_of
from coordinator.model import TextTools, build_text_tools
from outrider.errors import OutriderError
from outrider.median import Median
from outrider.server_info import DraftRounds
from outrider.serving.refused import is_other_server, mending
from outrider.serving.tls import WORKER_NAMES, Dialer
from outrider.serving.worker_calls import WorkerDescription, describe, is_serving, watch_serving

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.25
PROBE_TIMEOUT_S = 2.0
"""At least; a coordinator that is patient with silent workers is as patient here."""
SEE_LISTS = "see --target-workers and --draft-workers"
NOT_SERVING = "answers NOT_SERVING: it starts or drains"


class WorkerRecord:
    """Described on connect, and again whenever another process answers at the address."""

    def __init__(
        self,
        address: str,
        role: str,
        on_change: Callable[[], None],
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        dialer: Dialer | None = None,
        max_session_s: float = 0.0,
        deaths: Deaths | None = None,
    ) -> None:
        """max_session_s: no session outlasts it. deaths: where it is told when it is lost, and when it answers."""
        self.address = address
        self.role = role
        self._probe_timeout_s = probe_timeout_s
        self.held_until: dict[str, float] = {}
        """By who holds it, in `time.monotonic` seconds; infinity: for good."""
        self.draining = False
        self.num_sessions = 0
        self.num_foreign_sessions = 0
        """Of other coordinators, as of the last probe."""
        self.num_promised_blocks = 0
        """To our sessions, as we count them."""
        self.description: WorkerDescription | None = None
        self.text: TextTools | None = None
        self.network = Median()
        self.proposal_ms = Median()
        self.catch_up_ms = Median()
        self.draft_rounds = DraftRounds()
        """Of our streams."""
        self.answers = False
        self.detail = "not reached yet"
        self.first_probe = asyncio.Event()
        self._dialer = dialer or Dialer()
        self._max_session_s = max_session_s
        self._deaths = deaths or Deaths()
        self._dialled = self._dialer.version
        self.channel: grpc.aio.Channel = self._dialer.open(address, WORKER_NAMES.get(role, ""))
        self._retired: list[asyncio.Task[None]] = []
        self._foreign = Foreign()
        self._on_change = on_change
        self._kicked = asyncio.Event()
        self._says_no = False
        self._mending = ""
        """Settings that must change before the worker can be used, as of the last probe."""
        self._listener = asyncio.create_task(self._listen())
        self._watcher = asyncio.create_task(self._watch())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For every call to this worker."""
        return self._dialer.metadata()

    @property
    def told(self) -> WorkerDescription:
        """Its description: of a worker that has been reached once."""
        assert self.description is not None
        return self.description

    def fault(self) -> str:
        """Why no stream should go there; empty when one may. Pairing is the directory's to judge."""
        if self.draining:
            return "draining"
        if max(self.held_until.values(), default=0.0) < time.monotonic():
            return "its lease ran out"
        return "" if self.answers else self.detail

    @property
    def load(self) -> int:
        """Streams on it, of all coordinators."""
        return self.num_sessions + self.num_foreign_sessions

    def limits(self) -> Limits:
        """Of our streams there, as a target."""
        capacity = self.told.capacity
        return limits_of(
            num_rows=capacity.max_batch_tokens,
            num_foreign_streams=self._foreign.num_streams,
            max_blocks=capacity.max_promised_blocks,
            num_foreign_blocks=self._foreign.num_blocks,
            block_size=capacity.block_size,
        )

    def has_room_for(self, num_cached_tokens: int, max_draft_tokens: int) -> bool:
        """Whether a stream that caches so many tokens at most, with so many drafts a round, can ever run there, as a
        target. Workers of one model may have different limits."""
        capacity = self.told.capacity
        return (
            num_cached_tokens < self.told.model.context_length
            and max_draft_tokens <= capacity.max_draft_tokens
            and self.num_blocks_of(num_cached_tokens) <= capacity.num_blocks
        )

    def takes_now(self, num_cached_tokens: int) -> bool:
        """Whether one more such stream runs there at once, as a target, without waiting for others."""
        num_blocks = self.num_promised_blocks + self.num_blocks_of(num_cached_tokens)
        return self.limits().allow(self.num_sessions + 1, num_blocks * max(1, self.told.capacity.block_size))

    def num_blocks_of(self, num_cached_tokens: int) -> int:
        """What a stream that caches so many tokens at most is promised there, as a target."""
        return -(-num_cached_tokens // max(1, self.told.capacity.block_size))

    def suspect(self) -> None:
        """A stream lost this worker: no new ones until it has answered again, which is asked at once."""
        if self.answers:
            log.warning("%s worker %s: a stream lost it; being probed", self.role, self.address)
        self.answers, self.detail = False, "a stream lost it; being probed"
        self._kicked.set()
        self._on_change()

    def probe_now(self) -> None:
        self._kicked.set()

    async def answers_as(self, incarnation: str, timeout_s: float) -> bool:
        """Whether that process still answers there."""
        try:
            found = await self._describe(without_tokenizer=True, timeout_s=timeout_s)
        except OutriderError:
            return False
        self._deaths.answers(found.incarnation)
        return found.incarnation == incarnation

    async def close(self) -> None:
        tasks = (self._watcher, self._listener, *self._retired)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.channel.close()

    def _dial_again(self) -> None:
        """With the certificates of now. Sessions of the old channel end on it."""
        old, self._dialled = self.channel, self._dialer.version
        self.channel = self._dialer.open(self.address, WORKER_NAMES.get(self.role, ""))
        self._listener.cancel()
        self._listener = asyncio.create_task(self._listen())
        self._retired = [task for task in self._retired if not task.done()]
        self._retired.append(asyncio.create_task(_close_later(old, self._max_session_s)))

    async def _watch(self) -> None:
        while True:
            self._kicked.clear()
            if self._dialer.version != self._dialled:
                self._dial_again()
            answered, detail = await self._probe()
            if answered and self._says_no:  # since the probe was answered
                answered, detail = False, NOT_SERVING
            changed, was_lost = (answered, detail) != (self.answers, self.detail), self.answers and not answered
            self.answers, self.detail = answered, detail
            self.first_probe.set()
            if changed:
                is_bad = self._mending or (was_lost and detail != NOT_SERVING)
                told = "; ".join(filter(None, (detail or "healthy", self._mending)))
                log.log(logging.WARNING if is_bad else logging.INFO, "%s worker %s: %s", self.role, self.address, told)
                self._on_change()
            if was_lost and detail != NOT_SERVING and self.description is not None:
                self._deaths.lost(self.description.incarnation)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S if answered else RETRY_INTERVAL_S):
                    await self._kicked.wait()

    async def _listen(self) -> None:
        """What the worker says by itself counts at once; the probes' clock is for workers that cannot say anything."""
        while True:
            try:
                async with aclosing(watch_serving(self.channel, self.role)) as told:
                    async for serving in told:
                        self._hear(serving)
            except OutriderError:
                pass
            self._says_no = False
            if self.answers:
                self._kicked.set()
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _hear(self, serving: bool) -> None:
        self._says_no = not serving
        if serving and not self.answers:
            self._kicked.set()
        elif self.answers and not serving:
            self.answers, self.detail = False, NOT_SERVING
            log.info("%s worker %s: %s", self.role, self.address, self.detail)
            self._on_change()

    async def _probe(self) -> tuple[bool, str]:
        self._mending = ""
        try:
            known, timeout_s = self.description, self._probe_timeout_s
            found = await self._describe(without_tokenizer=known is not None, timeout_s=timeout_s)
            self._deaths.answers(found.incarnation)
            if known is not None and found.incarnation != known.incarnation:
                if self.answers:
                    self._deaths.lost(known.incarnation)
                known, found = None, await self._describe(without_tokenizer=False, timeout_s=timeout_s)
            if known is None:
                self.draining = False
                self.text = await asyncio.to_thread(build_text_tools, found.model)
            if found.dropped and (known is None or not known.dropped):
                log.warning("%s worker %s: not used of what it tells: %s", self.role, self.address, found.dropped)
            self.description = found
            self.num_foreign_sessions = max(0, found.capacity.num_sessions - self.num_sessions)
            num_foreign_blocks = found.capacity.num_promised_blocks - self.num_promised_blocks
            self._foreign.heard(self.num_foreign_sessions, num_foreign_blocks)
            if found.role != self.role:
                self._mending = SEE_LISTS
                return False, f"is a {found.role or 'nameless'} worker, listed as {self.role}"
            started = time.perf_counter()
            serving = await is_serving(self.channel, self.role, timeout_s=timeout_s)
            self.network.add(1000 * (time.perf_counter() - started))
            return (True, "") if serving else (False, NOT_SERVING)
        except OutriderError as error:
            self._mending = mending(error, WORKER_NAMES.get(self.role, ""))
            said = f"{error.status}: {error.message}"
            if not is_other_server(error):
                return False, said
            self._mending = SEE_LISTS
            return False, f"is no {self.role} worker, something else answers there ({said})"
        except Exception as error:  # a tokenizer or template of any library's making
            return False, f"its tokenizer or chat template cannot be read: {error}"

    async def _describe(self, *, without_tokenizer: bool, timeout_s: float) -> WorkerDescription:
        return await describe(
            self.channel, without_tokenizer=without_tokenizer, timeout_s=timeout_s, metadata=self.metadata
        )


async def _close_later(channel: grpc.aio.Channel, delay_s: float) -> None:
    try:
        await asyncio.sleep(delay_s)
    finally:
        await channel.close()
