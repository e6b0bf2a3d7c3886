"""Streams that wait or run, for whoever looks on: counts and times, never text or ids."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.statistics import StreamStatistics
from coordinator.stream import Stream
from outrider.results import Speculation, Step
from outrider.round_counts import RoundCounts
from outrider.server_info import StreamState, StreamStatus


@dataclass(slots=True, eq=False)
class LiveStream:
    """One of them. arrived: its request, in `time.perf_counter` seconds."""

    stream: Stream
    arrived: float
    has_place: bool = False
    last_step: Step | None = None

    def keep(self, choice: int, step: Step) -> None:
        """A round has ended."""
        self.last_step = step

    def status(self) -> StreamStatus:
        """As of now."""
        request, statistics = self.stream.request, self.stream.statistics
        age_ms = 1000 * (time.perf_counter() - self.arrived)
        return StreamStatus(
            request_id=request.request_id,
            index=self.stream.choice,
            model=request.model,
            tenant=request.tenant,
            state=self._state(),
            age_ms=age_ms,
            num_prompt_tokens=len(request.prompt_ids),
            num_tokens=len(self.stream.log.output_ids),
            max_tokens=request.stopping.max_tokens,
            timings=statistics.timings(age_ms),
            speculation=statistics.speculation(),
            last_step=self.last_step,
        )

    def _state(self) -> StreamState:
        if not self.has_place:
            return StreamState.WAITING
        # one that goes on from resumed tokens begins with a prefill too
        return StreamState.RUNNING if self.stream.statistics.has_rounds else StreamState.PREFILL


class LiveStreams:
    """Of one coordinator, in the order in which they began."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[LiveStream, ...]] = {}
        self._num_begun = 0
        self._ended: defaultdict[str, RoundCounts] = defaultdict(RoundCounts)

    @contextlib.contextmanager
    def watching(self, streams: Sequence[Stream], arrived: float) -> Iterator[tuple[LiveStream, ...]]:
        """While the streams of one request wait and run."""
        self._num_begun += 1
        key, live = self._num_begun, tuple(LiveStream(stream, arrived) for stream in streams)
        self._requests[key] = live
        try:
            yield live
        finally:
            del self._requests[key]
            for stream in streams:
                self._ended[stream.request.model].add(stream.statistics.rounds)

    def of(self, tenant: str | None) -> tuple[list[LiveStream], int]:
        """(its streams, how many others have); None: all tenants'. A stream that has finished is none."""
        live = [one for streams in self._requests.values() for one in streams if not one.stream.finished]
        seen = [one for one in live if tenant in (None, one.stream.request.tenant)]
        return seen, len(live) - len(seen)

    def totals(self) -> dict[str, Speculation]:
        """Rounds of all streams so far, by model."""
        models: defaultdict[str, RoundCounts] = defaultdict(RoundCounts)
        for name, ended in self._ended.items():
            models[name].add(ended)
        for live in self._requests.values():
            for one in live:
                models[one.stream.request.model].add(one.stream.statistics.rounds)
        return {name: StreamStatistics(rounds=counts).speculation() for name, counts in models.items()}
