"""What the coordinator exports: streams, latencies and speculation by model, workers as it sees them.

Counts are those of `StreamStatistics`, added up over all streams of a model: emitted = accepted + corrections + bonus +
plain holds here as it does there. Labels are model and drafter names, fixed words and workers' addresses; never
anything that a client sends.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coordinator.draft_worker_families import draft_worker_families
from coordinator.failover_families import FailoverFamilies
from coordinator.fleet.standing import Standing
from coordinator.metric_families import FALLBACKS, NO_PROPOSAL, Totals, families
from coordinator.round_parts import RoundClock
from coordinator.statistics import Drafting
from coordinator.stream import Stream
from coordinator.traces import KeepStep
from outrider.results import Step
from outrider.sampling.params import Origin
from outrider.serving.metrics import PREFIX, Reading
from outrider.serving.worker_calls import DRAFT

ROLE = "coordinator"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0)
_LONG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_SUMMED_AT_THE_END = ("num_cached_tokens", "num_dropped_proposals", "num_draft_failures", "num_proposal_bytes")


class Fleet(Protocol):
    """What is read of the directory."""

    def workers(self) -> Iterable[Any]: ...

    def health(self, worker: Any) -> tuple[bool, str]: ...

    def standing(self, worker: Any) -> Standing: ...


class Places(Protocol):
    """What is read of admission."""

    num_running: int
    num_waiting: int
    num_paused: int


class CoordinatorMetrics:
    """The families of one coordinator, in `registry`."""

    def __init__(self, registry: CollectorRegistry, places: Places, fleet: Fleet, *, is_read: bool = True) -> None:
        """is_read: False where nobody can ever ask for `registry`: then rounds are not counted."""
        self._is_read = is_read
        self._places = places
        self._fleet = fleet
        self._latencies = _Latencies(registry)
        self._failovers = FailoverFamilies(registry)
        self._models: dict[str, _ModelTotals] = {}
        self._failures: Tally[tuple[str, str]] = Tally()
        registry.register(Reading(self._streams))
        registry.register(Reading(self._workers))

    def watch(self, stream: Stream, arrived: float) -> StreamMeter:
        """Counts the rounds of `stream` from now on. `arrived` is its request's, in `time.perf_counter` seconds."""
        meter = StreamMeter(self._model(stream.request.model), stream, arrived)
        if self._is_read:
            stream.statistics.observer = meter
            meter.keeps = (meter.part,)
        return meter

    def failed(self, model: str, status: str) -> None:
        """A request did not end well; what does is counted by stream. model: as served, never as asked for."""
        self._failures[model, status] += 1

    def _model(self, name: str) -> _ModelTotals:
        if name not in self._models:
            self._models[name] = _ModelTotals(self._latencies, self._failovers, name)
        return self._models[name]

    def _streams(self) -> Iterator[Metric]:
        for state in ("running", "waiting", "paused"):
            number = getattr(self._places, f"num_{state}")
            gauge = GaugeMetricFamily(
                f"{PREFIX}num_requests_{state}", f"Streams {state}, a choice each.", labels=["role"]
            )
            gauge.add_metric([ROLE], number)
            yield gauge
        yield from families(self._models, self._failures)

    def _workers(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        healthy = GaugeMetricFamily(
            f"{PREFIX}worker_healthy", "1 where new streams may go to the worker.", labels=labels
        )
        sessions = GaugeMetricFamily(f"{PREFIX}worker_num_sessions", "Sessions of ours on the worker.", labels=labels)
        away = GaugeMetricFamily(
            f"{PREFIX}worker_round_trip_seconds", "Median of health calls to the worker.", labels=labels
        )
        for worker in self._fleet.workers():
            values = [f"{worker.role}-worker", worker.address]
            healthy.add_metric(values, float(self._fleet.health(worker)[0]))
            sessions.add_metric(values, worker.num_sessions)
            away.add_metric(values, worker.network.value() / 1000)
        yield from (healthy, sessions, away)
        drafts = [worker for worker in self._fleet.workers() if worker.role == DRAFT]
        known = ((worker.address, self._fleet.standing(worker)) for worker in drafts)
        yield from draft_worker_families(known, time.monotonic())


class _Latencies:
    """Histograms by model. A name's children are bound once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, meaning, ["model_name"], buckets=buckets, registry=registry)

        self.queue = histogram("request_queue_time_seconds", "Waiting here and for a place on the target.", _LONG_S)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG_S)
        self.between = histogram(
            "inter_token_latency_seconds",
            "Between deliveries of one stream; a round delivers several tokens.",
            _SHORT_S,
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "From the first token to the last, per token after it.", _SHORT_S
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end, of finished streams.", _LONG_S)


class _ModelTotals(Totals):
    """With the model's children of the histograms."""

    def __init__(self, latencies: _Latencies, failovers: FailoverFamilies, name: str) -> None:
        super().__init__()
        self.failovers = failovers.of(name)
        self.queue = latencies.queue.labels(name)
        self.first_token = latencies.first_token.labels(name)
        self.between = latencies.between.labels(name)
        self.per_token = latencies.per_token.labels(name)
        self.whole = latencies.whole.labels(name)


class StreamMeter:
    """One stream's way into its model's totals: once a round, and once at its end."""

    def __init__(self, totals: _ModelTotals, stream: Stream, arrived: float) -> None:
        self._totals = totals
        self._stream = stream
        self._arrived = arrived
        self._first_at = self._last_at = 0.0
        self._num_tokens = 0
        self._clock = RoundClock(stream.statistics.queue_ms)
        self.keeps: tuple[KeepStep, ...] = ()
        """What is to be told of each round."""

    def round(self, num_draft_tokens: int, origins: tuple[Origin, ...], by: Drafting) -> None:
        """As `StreamStatistics.count`."""
        now, totals = time.perf_counter(), self._totals
        if self._last_at:
            totals.between.observe(now - self._last_at)
        else:
            self._first_at = now
            totals.num_prompt_tokens += len(self._stream.request.prompt_ids)
            totals.queue.observe(self._stream.statistics.queue_ms / 1000)
            totals.first_token.observe(now - self._arrived)
        self._last_at = now
        self._num_tokens += len(origins)
        totals.rounds.count(num_draft_tokens, origins, by)
        if by.reason in FALLBACKS:
            totals.fallbacks[by.reason] += 1
        elif by.drafter and not num_draft_tokens:
            totals.fallbacks[NO_PROPOSAL] += 1

    def part(self, choice: int, step: Step) -> None:
        """A round is over."""
        times = self._totals.part_ms
        for part, start_ms, end_ms in self._clock.lay(step):
            times[part] += end_ms - start_ms

    def lost_target(self, cause: str, unheard_s: float) -> None:
        """As `StreamStatistics.count_loss`."""
        self._totals.failovers.lost(cause, unheard_s)

    def recovered(self, after_s: float) -> None:
        """As `StreamStatistics.count_recovery`."""
        self._totals.failovers.recovered(after_s)

    def poisoned(self) -> None:
        """As `StreamStatistics.count_poisoned`."""
        self._totals.failovers.poisoned.inc()

    def ended(self) -> None:
        """Whatever ended it."""
        totals, statistics = self._totals, self._stream.statistics
        statistics.observer = None
        for name in _SUMMED_AT_THE_END:
            setattr(totals.rounds, name, getattr(totals.rounds, name) + getattr(statistics, name))
        totals.rounds.ahead.add(statistics.ahead)
        if not self._stream.finished:
            return
        totals.finished[self._stream.finish.name.lower()] += 1
        totals.whole.observe(time.perf_counter() - self._arrived)
        if self._num_tokens > 1:
            totals.per_token.observe((self._last_at - self._first_at) / (self._num_tokens - 1))
