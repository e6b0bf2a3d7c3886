"""What a worker exports: its sessions, its engine and its cache, read when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from outrider.lm.engine_stats import EngineStats
from outrider.serving.metrics import PREFIX
from outrider.serving.session_log import SessionCounters

Labels = Mapping[str, str]
"""Of all that a worker exports: role (`draft-worker` or `target-worker`) and model_name."""
MoreFamilies = Callable[[Labels], Iterable[Metric]]


def no_families(labels: Labels) -> Iterable[Metric]:
    return ()


def worker_families(
    labels: Labels, *, num_sessions: int, stats: EngineStats, counters: SessionCounters
) -> Iterator[Metric]:
    """Of one moment."""

    def add(family: Any, value: float, **more: str) -> Any:
        family.add_metric([*labels.values(), *more.values()], value)
        return family

    def gauge(name: str, meaning: str, value: float) -> Metric:
        return add(GaugeMetricFamily(PREFIX + name, meaning, labels=list(labels)), value)

    def counter(name: str, meaning: str, value: float) -> Metric:
        return add(CounterMetricFamily(PREFIX + name, meaning, labels=list(labels)), value)

    used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
    yield gauge("num_requests_running", "Sequences that have their place in the cache.", stats.num_sequences)
    yield gauge("num_requests_waiting", "Sequences that wait for a place in the cache.", stats.num_waiting)
    yield gauge("num_sessions", "Open session streams, waiting ones too.", num_sessions)
    yield gauge("kv_cache_usage_perc", "Part of the cache's blocks that open sequences hold; 1 is all.", used)
    yield counter("prefix_cache_hits", "Tokens that the prefix cache spared.", stats.num_cached_tokens)
    yield counter("num_preemptions", "Sequences that lost their blocks in the midst of work.", stats.num_preemptions)
    yield counter("num_idle_evictions", "Sequences that lost their blocks between work.", stats.num_idle_evictions)
    yield counter("engine_steps", "Steps of the engine.", stats.num_steps)
    yield counter("engine_model_calls", "Passes of the model.", stats.num_model_calls)
    yield counter("engine_rows", "Tokens that went through the model.", stats.num_rows)
    events = CounterMetricFamily(
        f"{PREFIX}session_events", "What sessions did and refused, by kind.", labels=[*labels, "event"]
    )
    for name, number in dataclasses.asdict(counters).items():
        add(events, number, event=name.removeprefix("num_"))
    yield events
